"""Which tokens of moved blocks are recomputed. Pure arithmetic on sizes and values."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

EARLY_LAYER = 1
"""The layer whose values show how much a token changes: the first that attention before it has shaped."""


def first_of_blocks(sizes: Sequence[int], ratio: float) -> torch.Tensor:
    """Indices of the first tokens of each block, (chosen,), ascending; `sizes` are the blocks' in tokens.

    Source: EPIC (arXiv 2410.15332) recomputes a fixed number of leading tokens per chunk; here it is a part of each.
    """
    begins = [sum(sizes[:index]) for index in range(len(sizes))]
    chosen = [range(begin, begin + math.ceil(ratio * size)) for begin, size in zip(begins, sizes, strict=True)]
    return torch.tensor([index for each in chosen for index in each], dtype=torch.long)


def most_deviating(before: torch.Tensor, after: torch.Tensor, ratio: float) -> torch.Tensor:
    """Indices of the tokens whose values changed most, (chosen,), ascending.

    Args:
        before, after: a layer's values, (1, kv_heads, seq, head_dim), as moved and as computed in place.

    Source: CacheBlend (arXiv 2405.16444), which takes the squared difference summed over heads and channels.
    """
    change = (after.float() - before.float()).square().sum((0, 1, 3))
    return change.topk(math.ceil(ratio * len(change))).indices.sort().values
