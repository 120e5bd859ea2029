"""Attention of a suffix over a long cache on a CPU: transformers' sdpa, but keys and values are not repeated per group.

Stock sdpa copies the whole cache once per query group as soon as there is a mask and more than one query token, which
is what every hand-over looks like. PyTorch's CPU kernel takes grouped heads and a mask, so here they stay grouped. Same
numbers within float tolerance; anything else is left to transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_grouped"


def use_grouped_heads(model: PreTrainedModel) -> None:
    """Switch a model that runs transformers' sdpa on a CPU to `grouped_sdpa`; leave every other model alone."""
    if model.config._attn_implementation == "sdpa" and model.device.type == "cpu":
        AttentionInterface.register(NAME, grouped_sdpa)
        AttentionMaskInterface.register(NAME, sdpa_mask)
        model.set_attn_implementation(NAME)


def grouped_sdpa(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (batch, heads, q, head_dim) over `key` and `value` (batch, kv_heads, kv, head_dim).

    Returns (batch, q, heads, head_dim), as transformers' attention functions do.
    """
    is_suffix = attention_mask is not None and query.shape[2] > 1 and key.shape[1] < query.shape[1]
    is_plain = not options.get("dropout") and options.get("position_bias") is None and options.get("softcap") is None
    if not (is_suffix and is_plain):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=options.get("scaling"), enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None
