"""Attention over our caches: transformers' sdpa, for several sequences at once and for a suffix over a long cache.

Stock sdpa wants one rectangular batch, and on a CPU it copies the whole cache once per query group as soon as there is
a mask and more than one query token, which is what every hand-over looks like. Here each sequence attends to its own
keys where they lie, and grouped heads stay grouped. Same numbers within float tolerance; anything else is left to
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from langgraph_latent.kv.state import RowKeys

NAME = "sdpa_rows"
MIN_SHARED = 128
"""Shared tokens from which on reading them once for several rows is faster."""


def use_row_attention(model: PreTrainedModel) -> bool:
    """Switch a model that runs transformers' sdpa to `row_attention`; leave every other model alone, and say so."""
    if model.config._attn_implementation != "sdpa":
        return False
    AttentionInterface.register(NAME, row_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (batch, heads, q, head_dim) over `key` and `value` (batch, kv_heads, kv, head_dim).

    With `RowKeys`, `query` holds the new tokens of several sequences side by side, and each attends to its own.
    Returns (batch, q, heads, head_dim), as transformers' attention functions do.
    """
    is_plain = not options.get("dropout") and options.get("position_bias") is None and options.get("softcap") is None
    is_grouped = is_plain and query.device.type == "cpu" and query.shape[1] > key.shape[1]
    scale = options.get("scaling")
    if isinstance(key, RowKeys):
        if not is_plain:
            raise NotImplementedError("dropout, position bias and soft caps are not computed row by row")
        output = torch.cat(_attend_rows(query, key, scale), dim=2)
    elif is_grouped and query.shape[2] == 1:
        output = _attend_once(query, key, value, attention_mask, scale)
    elif is_grouped and attention_mask is not None:
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output.transpose(1, 2).contiguous(), None


def _attend_rows(query: torch.Tensor, key: RowKeys, scale: float | None) -> list[torch.Tensor]:
    """Each row's new tokens over its own keys, (1, heads, new, head_dim)."""
    queries = query.split([size for size, _, _ in key.rows], dim=2)
    outputs: dict[int, torch.Tensor] = {}
    for rows, num_shared in key.siblings if not key.window else ():
        if num_shared >= MIN_SHARED:
            together = _attend_siblings([(queries[row], *key.rows[row][1:]) for row in rows], num_shared, scale)
            outputs.update(zip(rows, together, strict=True))
    for index, (_, keys, values) in enumerate(key.rows):
        if index not in outputs:
            outputs[index] = _attend(queries[index], keys, values, key.window, scale)
    return [outputs[index] for index in range(len(queries))]


def _attend_siblings(
    rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]], num_shared: int, scale: float | None
) -> Sequence[torch.Tensor]:
    """One new token of each row over its keys, of which the first `num_shared` are equal in all rows.

    The shared ones are read once for all rows, the others row by row, padded to one length; then both parts are joined
    by their softmax sums. Idea: shared-prefix attention as in Hydragen (arXiv 2402.05099) and cascade inference.
    """
    queries = torch.cat([query for query, _, _ in rows])
    num_rows, heads, _, dim = queries.shape
    _, shared_keys, shared_values = rows[0]
    kv_heads = shared_keys.shape[1]
    grouped = queries.view(num_rows, kv_heads, heads // kv_heads, dim) * (dim**-0.5 if scale is None else scale)
    together = grouped.transpose(0, 1).reshape(kv_heads, -1, dim)
    shared = _partial(together, shared_keys[0, :, :num_shared], shared_values[0, :, :num_shared])
    lengths = [keys.shape[2] - num_shared for _, keys, _ in rows]
    own_keys, own_values = (grouped.new_zeros(num_rows, kv_heads, max(lengths), dim) for _ in range(2))
    for row, ((_, keys, values), length) in enumerate(zip(rows, lengths, strict=True)):
        own_keys[row, :, :length] = keys[0, :, num_shared:]
        own_values[row, :, :length] = values[0, :, num_shared:]
    ends = torch.tensor(lengths, device=queries.device)[:, None, None, None]
    own = _partial(grouped, own_keys, own_values, torch.arange(max(lengths), device=queries.device) >= ends)
    shared = _Part(*(part.view(kv_heads, num_rows, -1, part.shape[-1]).transpose(0, 1) for part in shared))
    return _joined(shared, own).reshape(num_rows, 1, heads, 1, dim).unbind()


class _Part(NamedTuple):
    """Attention over a part of the keys, before it is divided by the sum of its weights."""

    values: torch.Tensor
    weight: torch.Tensor
    peak: torch.Tensor


def _partial(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor | None = None
) -> _Part:
    scores = query @ keys.transpose(-1, -2)
    if hidden is not None:
        scores = scores.masked_fill(hidden, float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    return _Part(weights @ values, weights.sum(-1, keepdim=True), peak)


def _joined(first: _Part, second: _Part) -> torch.Tensor:
    """Attention over all keys from that over two parts of them."""
    peak = torch.maximum(first.peak, second.peak)
    share, other_share = (first.peak - peak).exp(), (second.peak - peak).exp()
    values = first.values * share + second.values * other_share
    return values / (first.weight * share + second.weight * other_share)


def _attend_once(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """One new token over all keys: the heads of a group become the query tokens of one head, which reads keys once."""
    groups = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[-1])
    return scaled_dot_product_attention(groups, keys, values, mask, scale=scale).reshape(*query.shape[:3], -1)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int, scale: float | None
) -> torch.Tensor:
    """One sequence's new tokens over all its keys, (1, heads, new, head_dim)."""
    new, length = query.shape[2], keys.shape[2]
    if new == 1:
        return _attend_once(query, keys, values, None, scale)
    behind = torch.arange(length - new, length, device=query.device)[:, None] - torch.arange(
        length, device=query.device
    )
    mask = (behind >= 0) & (behind < window) if window else behind >= 0
    is_grouped = keys.shape[1] < query.shape[1]
    return scaled_dot_product_attention(query, keys, values, mask, scale=scale, enable_gqa=is_grouped)
