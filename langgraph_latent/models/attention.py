"""Attention over our caches: transformers' sdpa, for several sequences at once and for a suffix over a long cache.

Stock sdpa wants one rectangular batch, and on a CPU it copies the whole cache once per query group as soon as there is
a mask and more than one query token, which is what every hand-over looks like. Here each sequence attends to its own
keys where they lie, and grouped heads stay grouped. Same numbers within float tolerance; anything else is left to
transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from langgraph_latent.kv.state import RowKeys

NAME = "sdpa_rows"


def use_row_attention(model: PreTrainedModel) -> None:
    """Switch a model that runs transformers' sdpa to `row_attention`; leave every other model alone."""
    if model.config._attn_implementation == "sdpa":
        AttentionInterface.register(NAME, row_attention)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


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
    scale = options.get("scaling")
    if isinstance(key, RowKeys):
        if not is_plain:
            raise NotImplementedError("dropout, position bias and soft caps are not computed row by row")
        queries = query.split([size for size, _, _ in key.rows], dim=2)
        rows = zip(queries, key.rows, strict=True)
        output = torch.cat([_attend(own, keys, values, key.window, scale) for own, (_, keys, values) in rows], dim=2)
    elif is_plain and query.device.type == "cpu" and query.shape[1] > key.shape[1] and query.shape[2] == 1:
        output = _attend_once(query, key, value, attention_mask, scale)
    elif is_plain and query.device.type == "cpu" and query.shape[1] > key.shape[1] and attention_mask is not None:
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output.transpose(1, 2).contiguous(), None


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
