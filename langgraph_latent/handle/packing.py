"""The packed text form of a handle: token ids and JSON, deflated, in base64. It knows plain values, not handles.

What is read is bounded before it is inflated: a few kilobytes in a checkpoint must not become gigabytes.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from langgraph_latent.checks import is_whole_number
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.tokens import TOKEN_BYTES

VERSION = 2
MAX_TOKENS = 1 << 22
MAX_JSON_BYTES = 1 << 24
"""Of all rows of a handle and of its source handles together."""
MAX_VALUES = 1 << 18
"""Values in them, each of which takes far more memory than it takes text."""
MAX_SEGMENTS = 1 << 16
UNREADABLE = (LookupError, ValueError, TypeError, AttributeError, RecursionError, ConfigError, zlib.error)
"""What text that is not a packed form makes its readers raise."""

_MARKS = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{,:])', re.DOTALL)
"""A string, or what stands before each value."""

Packed = tuple[int, bytes, Sequence[Any]]
"""A handle as plain values: size in bytes, packed tokens, and a row for each segment."""


def pack(tokens: bytes, rows: Sequence[Any], sources: Sequence[Packed]) -> tuple[str, str]:
    """The texts of a handle's tokens and of its segments, with the source handles that rows name by number."""
    packed = [[nbytes, _pack_tokens(theirs), _pack_json(inner)] for nbytes, theirs, inner in sources]
    return _pack_tokens(tokens), _pack_json({"version": VERSION, "sources": packed, "rows": rows})


def unpack(tokens: str, segments: str) -> Iterator[Packed]:
    """The source handles that `pack` wrote, in their order, and last the handle itself, of size 0.

    Raises `HandleError` for what a newer version of this library wrote, and one of `UNREADABLE`.
    """
    own = _unpack_tokens(tokens)
    text = _inflate(segments, MAX_JSON_BYTES)
    sources, rows = _sources_and_rows(_read_json(text))
    num_tokens, num_bytes = len(own) // TOKEN_BYTES, len(text)
    for nbytes, packed, inner in sources:
        theirs, text = _unpack_tokens(packed), _inflate(inner, MAX_JSON_BYTES - num_bytes)
        num_tokens += len(theirs) // TOKEN_BYTES
        num_bytes += len(text)
        if num_tokens > MAX_TOKENS:
            raise ValueError(f"its blocks come from more than {MAX_TOKENS} tokens")
        yield nbytes, theirs, _read_json(text)
    yield 0, own, rows


def _sources_and_rows(content: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The parts of a packed form: of this version, or of the first release, which wrote none."""
    if isinstance(content, list):
        return (), content
    if "version" not in content:
        return content["origins"], content["rows"]
    version = content["version"]
    if is_whole_number(version, VERSION + 1):
        raise HandleError(
            f"the handle was made by a newer version of langgraph-latent: its packed form has version {version}, this "
            f"release reads up to {VERSION}. Upgrade langgraph-latent."
        )
    if not is_whole_number(version, VERSION):
        raise ValueError(f"there is no version {version!r} of it")
    return content["sources"], content["rows"]


def _pack_tokens(tokens: bytes) -> str:
    """Token ids as the narrowest of uint16 and uint32."""
    ids = array("I", tokens)
    narrow = array("H", ids) if not ids or max(ids) < 1 << 16 else ids
    return _deflate(narrow.itemsize.to_bytes(1, "little") + narrow.tobytes())


def _unpack_tokens(text: str) -> bytes:
    packed = _inflate(text, MAX_TOKENS * TOKEN_BYTES)
    return array("I", array({2: "H", 4: "I"}[packed[0]], packed[1:])).tobytes()


def _pack_json(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    if len(text) > MAX_JSON_BYTES:
        raise HandleError(
            f"a handle whose messages are {len(text):,} bytes is not stored; at most {MAX_JSON_BYTES:,} are"
        )
    return _deflate(text)


def _read_json(text: bytes) -> Any:
    """The rows in a JSON text, which holds a bounded number of values."""
    values = (found for found in _MARKS.finditer(text) if found.lastindex)
    if next(islice(values, MAX_VALUES, None), None) is not None:
        raise ValueError(f"it holds more than {MAX_VALUES} values")
    return json.loads(text.decode("utf-8", "surrogatepass"))


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _inflate(text: str, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    deflated = base64.b64decode(text, validate=True)
    if base64.b64encode(deflated).decode() != text:
        raise ValueError("its last character holds bits that mean nothing")
    data = inflater.decompress(deflated, limit)
    if not inflater.eof or inflater.unused_data:
        raise ValueError(f"it is cut, padded or larger than {limit} bytes")
    return data
