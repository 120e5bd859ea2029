"""Token ids as packed bytes: compared, cut and counted without making lists of them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

TOKEN_BYTES = 4


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as uint32 bytes, the form in which prefixes are compared."""
    return array("I", ids).tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The token ids in `pack_tokens(ids)`."""
    return array("I", tokens).tolist()


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens on which two packed sequences agree."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high // TOKEN_BYTES
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES
