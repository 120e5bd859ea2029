"""What each layer's cache holds: its kind and window by the config, heads and channels by stored shapes or the config.

This module knows neither files nor torch: kinds are inferred from a config as transformers' `DynamicCache` does it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from langgraph_latent.spec.config import NO_ATTENTION
from langgraph_latent.spec.digest import StoredTensor
from langgraph_latent.spec.spec import LayerSpec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

KINDS = {
    "full_attention": "full",
    "sliding_attention": "sliding",
    "reference_sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "conv": "linear",
    "indexed_attention": "indexed",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid sliding",
    "moe": "none",
    "mlp": "none",
}
"""transformers' types of layers -> the kind of cache that it makes for them. Any other type is a kind of its own."""
WINDOWS = {"sliding": "sliding_window", "hybrid sliding": "sliding_window", "chunked": "attention_chunk_size"}
KEYS_AND_VALUES = ("full", "sliding", "chunked")
Shapes = Mapping[str, tuple[int, ...]]


def layers_of(config: PreTrainedConfig, stored: Iterable[StoredTensor] = ()) -> tuple[LayerSpec, ...]:
    """Every cache layer of a text model. Where the shapes of its projections are at hand, they are believed."""
    kinds, configs = kinds_of(config), config.per_layer_config
    layers = []
    for kind, layer, shapes in zip(kinds, configs, _projections(stored, len(kinds)), strict=False):
        window = _number(layer, WINDOWS[kind]) if kind in WINDOWS else 0
        sizes = (_stored_sizes(layer, shapes) or _configured_sizes(layer)) if kind in KEYS_AND_VALUES else ()
        layers.append(LayerSpec(kind, window, *sizes))
    return tuple(layers)


def kinds_of(config: PreTrainedConfig) -> list[str]:
    """The kind of every cache layer, as `transformers.cache_utils.get_layer_types_and_kwargs` tells them apart.

    That function itself can't be asked: it is imported with torch, and for some types only with the modeling code.
    """
    layers = config.per_layer_config
    types = getattr(config, "layer_types", None) or [_inferred_type(layer) for layer in layers]
    sharing = getattr(config, "kv_sharing_modes", None) or [""] * len(layers)
    if config.model_type in NO_ATTENTION:
        types = ["linear_attention"] * len(layers)
    return ["none" if mode == "reuse" else KINDS.get(name, name) for name, mode in zip(types, sharing, strict=False)]


def _inferred_type(layer: PreTrainedConfig) -> str:
    if getattr(layer, "sliding_window", None) is not None:
        return "sliding_attention"
    return "full_attention" if getattr(layer, "attention_chunk_size", None) is None else "chunked_attention"


def _number(config: PreTrainedConfig, name: str) -> int:
    """A whole number of a config; 0 where it has none of that name."""
    return int(getattr(config, name, None) or 0)


# -- heads and channels ----------------------------------------------------------------------------------------------

LAYER_TENSOR = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)\.(?:.*\.)?(\w+)\.weight")
OTHER_TOWERS = re.compile(r"vision|visual|audio|speech|encoder|cross_attn|crossattention|\bmtp\b|indexer")
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "wqkv", "c_attn", "W_pack")
SPLIT = (("k_proj", "v_proj", "q_proj"), ("wk", "wv", "wq"), ("key", "value", "query"))
"""Names of the projections to keys, values and queries."""


def _projections(stored: Iterable[StoredTensor], num_layers: int) -> Sequence[Shapes]:
    """Per layer, the shapes of its unquantised tensors by the last part of their names."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(num_layers)]
    for tensor in stored:
        match = LAYER_TENSOR.fullmatch(tensor.name)
        if match and "float" in tensor.dtype and not OTHER_TOWERS.search(tensor.name) and int(match[1]) < num_layers:
            found[int(match[1])][match[2]] = tensor.shape
    return found


def _stored_sizes(config: PreTrainedConfig, found: Shapes) -> tuple[int, int, int] | None:
    """Heads, key and value channels by the shapes of a layer's projections; None where it has none that is known."""
    if "kv_a_proj_with_mqa" in found:  # MLA keeps the latent as keys and the rotated part as values, one head each
        width = found["kv_a_proj_with_mqa"][0]
        (rank,) = found.get("kv_a_layernorm") or (_number(config, "kv_lora_rank"),)
        return 1, rank, width - rank
    heads = _number(config, "num_attention_heads")
    for key, value, query in SPLIT:
        if key in found and len(found[key]) == 2:
            width = found[key][0]
            head_dim = _head_dim(config, width, found.get("k_norm", ()), found.get(query, (0,))[0])
            num_heads = width // head_dim
            return num_heads, head_dim, found.get(value, found[key])[0] // num_heads
    for name in FUSED:
        if name in found and heads:
            head_dim = _number(config, "head_dim") or _number(config, "hidden_size") // heads
            num_heads = (max(found[name]) // head_dim - heads) // 2  # the output is the longer side
            return (heads if getattr(config, "new_decoder_architecture", False) else num_heads), head_dim, head_dim
    return None


def _head_dim(config: PreTrainedConfig, width: int, norm: tuple[int, ...], query_width: int) -> int:
    """The first size of a head that the width of the keys is a multiple of."""
    heads = _number(config, "num_attention_heads") or 1
    normed = norm[0] if len(norm) == 1 and norm[0] < width else 0
    candidates = (normed, _number(config, "head_dim"), query_width // heads, _number(config, "hidden_size") // heads)
    return next((head_dim for head_dim in candidates if head_dim and width % head_dim == 0), width)


def _configured_sizes(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Heads, key and value channels by the config's fields."""
    if rank := _number(config, "kv_lora_rank"):
        return 1, rank, _number(config, "qk_rope_head_dim")
    heads = _number(config, "num_attention_heads") or 1
    head_dim = _number(config, "head_dim") or _number(config, "hidden_size") // heads
    if getattr(config, "new_decoder_architecture", False):  # falcon's cache holds a copy for every head
        return heads, head_dim, head_dim
    kv_heads = 1 if getattr(config, "multi_query", False) else _number(config, "num_key_value_heads") or heads
    return kv_heads, head_dim, _number(config, "v_head_dim") or head_dim
