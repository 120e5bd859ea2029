"""Attention over our caches: transformers' sdpa, for several sequences at once and for a suffix over a long cache.

Stock sdpa wants one rectangular batch, and on a CPU it copies the whole cache once per query group as soon as there is
a mask and more than one query token, which is what every hand-over looks like. Here each sequence attends to its own
keys where they lie, and grouped heads stay grouped. Same numbers within float tolerance; anything else is left to
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from langgraph_latent.kv.batching import PackedKeys, PackedSequence

STOCK = "sdpa"
NAME = "sdpa_packed"
MIN_SHARED = 512
"""Shared tokens from which on reading them once for several sequences is faster."""


def use_packed_attention(model: PreTrainedModel) -> bool:
    """Switch a model that runs transformers' sdpa to `packed_attention`; leave every other model alone.

    Returns whether it was switched.
    """
    if model.config._attn_implementation != STOCK or not model._can_set_attn_implementation():
        return False
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)
    return True


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (batch, heads, q, head_dim) over `key` and `value` (batch, kv_heads, kv, head_dim).

    With `PackedKeys`, `query` holds the new tokens of a packed batch, and each sequence attends to its own keys.
    Returns (batch, q, heads, head_dim), as transformers' attention functions do.
    """
    is_plain = not options.get("dropout") and options.get("position_bias") is None and options.get("softcap") is None
    scale = options.get("scaling")
    if isinstance(key, PackedKeys):
        if not is_plain:
            raise NotImplementedError("dropout, position bias and soft caps are not computed in a packed batch")
        if not hasattr(key, "sequences"):
            raise NotImplementedError("the model changes its keys after it has cached them")
        output = _attend_packed(query, key, scale)
    elif not is_plain or query.device.type != "cpu" or query.shape[1] <= key.shape[1]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    elif query.shape[2] == 1:
        output = _attend_once(query, key, value, attention_mask, scale)
    elif attention_mask is not None:
        output = scaled_dot_product_attention(query, key, value, attention_mask, scale=scale, enable_gqa=True)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return output.transpose(1, 2).contiguous(), None


def _attend_packed(query: torch.Tensor, key: PackedKeys, scale: float | None) -> torch.Tensor:
    """Each sequence's new tokens over its own keys, side by side as in `query`, (1, heads, new, head_dim)."""
    sequences = key.sequences
    is_biased = any(each.bias is not None for each in sequences)
    shared = [
        prefix for prefix in key.shared_prefixes if prefix.num_tokens >= MIN_SHARED and not key.window and not is_biased
    ]
    if len(shared) == 1 and len(shared[0].sequences) == len(sequences):
        return _attend_shared_prefix(query, sequences, shared[0].num_tokens, scale)
    queries = query.split([each.num_new for each in sequences], dim=2)
    outputs: dict[int, torch.Tensor] = {}
    for indices, num_tokens in shared:
        together = torch.cat([queries[index] for index in indices], dim=2)
        output = _attend_shared_prefix(together, [sequences[index] for index in indices], num_tokens, scale)
        outputs.update(zip(indices, output.split(1, dim=2), strict=True))
    for index, sequence in enumerate(sequences):
        if index not in outputs:
            outputs[index] = _attend(queries[index], sequence, key.window, scale)
    return torch.cat([outputs[index] for index in range(len(queries))], dim=2)


def _attend_shared_prefix(
    query: torch.Tensor, sequences: Sequence[PackedSequence], num_shared: int, scale: float | None
) -> torch.Tensor:
    """One new token of each sequence, (1, heads, sequences, head_dim); the first `num_shared` keys are equal in all.

    These are read once for all, the others per sequence; then both parts are joined by their softmax sums.
    Idea: shared-prefix attention as in Hydragen (arXiv 2402.05099) and cascade inference.
    """
    keys, values = sequences[0].keys, sequences[0].values
    groups = query.unflatten(1, (keys.shape[1], -1))  # (1, kv_heads, heads of a group, sequences, head_dim)
    shared = _partial(groups.flatten(2, 3), keys[:, :, :num_shared], values[:, :, :num_shared], scale)
    shared_output, shared_weight = (part.unflatten(2, groups.shape[2:4]) for part in shared)
    own = [
        _partial(own_query, each.keys[:, :, num_shared:], each.values[:, :, num_shared:], scale)
        for own_query, each in zip(groups.unbind(3), sequences, strict=True)
    ]
    own_output, own_weight = (torch.stack(parts, dim=3) for parts in zip(*own, strict=True))
    share = torch.sigmoid(shared_weight - own_weight).unsqueeze(-1)
    return torch.lerp(own_output, shared_output, share).flatten(1, 2)


def _partial(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of `query` (1, kv_heads, q, head_dim) over some keys, all visible, and its log softmax sums."""
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=scale)
        return output, log_sums
    scores = query @ keys.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    log_sums = scores.logsumexp(-1)
    return (scores - log_sums.unsqueeze(-1)).exp() @ values, log_sums


def _attend_once(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor:
    """One new token over all keys: the heads of a group become the query tokens of one head, which reads keys once."""
    groups = query.reshape(query.shape[0], keys.shape[1], -1, query.shape[-1])
    return scaled_dot_product_attention(groups, keys, values, mask, scale=scale).reshape(*query.shape[:3], -1)


def _attend(query: torch.Tensor, sequence: PackedSequence, window: int, scale: float | None) -> torch.Tensor:
    """One sequence's new tokens over all its keys, (1, heads, new, head_dim)."""
    new, length = query.shape[2], sequence.keys.shape[2]
    bias = None if sequence.bias is None else sequence.bias.to(query.dtype)
    if new == 1 and sequence.positions is None:
        return _attend_once(query, sequence.keys, sequence.values, bias if bias is None else bias[None], scale)
    at = torch.arange(length - new, length, device=query.device) if sequence.positions is None else sequence.positions
    distance = at[:, None] - torch.arange(length, device=query.device)
    mask = (distance >= 0) & (distance < window) if window else distance >= 0
    if bias is not None:
        mask = torch.where(mask, bias, -torch.inf)
    is_grouped = sequence.keys.shape[1] < query.shape[1]
    return scaled_dot_product_attention(query, sequence.keys, sequence.values, mask, scale=scale, enable_gqa=is_grouped)
