"""Toys: a tiny random model of every causal language model type that the installed transformers ships. No download.

The catalogue knows sizes and layer patterns. It knows nothing about caches, text or what is tested on a toy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from langgraph_latent.errors import ConfigError
from langgraph_latent.testing.tiny import tiny_tokenizer

NUM_LAYERS, NUM_HEADS, WIDTH, HEAD_DIM, INNER = 4, 4, 64, 16, 96
VOCABULARY, POSITIONS, WINDOW = 320, 1024, 20

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "embedding_size", "embedding_dim"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), NUM_HEADS),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads"), NUM_HEADS // 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "swa_head_dim"), HEAD_DIM),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ffn_hidden_size"), INNER),
    **dict.fromkeys(("dense_intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim"), INNER),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length"), POSITIONS),
    **dict.fromkeys(("sliding_window", "window_size", "sliding_window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), WINDOW),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "swa_num_attention_heads": NUM_HEADS,
    # Mixture of experts.
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_experts_intermediate_size"), 32),
    "moe_shared_expert_intermediate_size": 32,
    "router_hidden_size": 16,
    # Latent attention (MLA) and the indexer of sparse attention. With few index heads many scores are exactly zero, and
    # which of equal scores is among the best differs from one call to the next.
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "o_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": HEAD_DIM,
    "rotary_dim": 8,
    "index_n_heads": 16,
    "index_head_dim": HEAD_DIM,
    "index_topk": 12,
    # Linear attention, state space and recurrent layers.
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads", "n_mamba_heads"), 4),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), HEAD_DIM),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_chunk_size", "chunk_size"), 16),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank"), 4),
    "mamba_d_ssm": 2 * WIDTH,
    "lru_width": WIDTH,
    # Inputs per layer, and what makes logits too alike.
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "logit_scale": 1.0,
    # The towers beside a decoder that also sees or hears.
    "image_size": 28,
    "patch_size": 14,
    "depth": 2,
}
"""Field of a config -> its value in a toy. A config takes those that it has a field for."""

PATTERNS = ("layer_types", "mlp_layer_types")
"""Fields with one kind of layer for each layer. A toy alternates the kinds that the stock config has."""


def alternating(*kinds: str) -> list[str]:
    """One kind for each layer of a toy, in turn."""
    return [kinds[index % len(kinds)] for index in range(NUM_LAYERS)]


DECODER = {"is_decoder": True}
CONV_AND_FULL = {"layer_types": alternating("conv", "full_attention")}
FULL_AND_SLIDING = {"layer_types": alternating("full_attention", "sliding_attention")}
OPTIONAL_WINDOW = {**FULL_AND_SLIDING, "use_sliding_window": True}
SOFT_ATTENTION = {"attention_multiplier": 0.25}  # the stock 1.0 with random weights amplifies rounding
GENTLE = {"initializer_range": 0.1}  # likewise the delta rule, which computes in float32 whatever the dtype
DELTA_INDEXED = {
    **GENTLE,
    "hc_lowrank": 8,
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": HEAD_DIM,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
SHARED_KV = {"num_kv_shared_layers": 2, "layer_types": alternating("sliding_attention", "full_attention")}
GEMMA4 = {**SHARED_KV, "global_head_dim": 32}
LLAMA4 = {"no_rope_layers": [1, 0, 1, 0], "interleave_moe_layer_step": 2, "intermediate_size_mlp": INNER}
DOTS3 = {f"swa_{name}": NUM_HEADS for name in ("num_attention_heads", "num_key_value_heads")} | {
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": HEAD_DIM,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": HEAD_DIM,
}
INKLING = {"rel_extent": 64}
QUARTER_ROTARY = {"partial_rotary_factor": 0.25}

OVERRIDES: dict[str, dict[str, Any]] = {
    # Encoders that are decoders by a switch.
    **dict.fromkeys(("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie"), DECODER),
    **dict.fromkeys(("megatron-bert", "roberta", "roberta-prelayernorm", "roformer"), DECODER),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), DECODER),
    "big_bird": {**DECODER, "attention_type": "original_full"},
    "rembert": {**DECODER, "input_embedding_size": WIDTH, "output_embedding_size": WIDTH},
    "roc_bert": {
        **DECODER,
        **dict.fromkeys(("pronunciation_vocab_size", "pronunciation_embed_dim", "shape_vocab_size"), 8),
        "shape_embed_dim": 8,
    },
    "xmod": {**DECODER, "languages": ["en_XX"], "default_language": "en_XX"},
    # Windows.
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3"), OPTIONAL_WINDOW),
    **dict.fromkeys(("dots1", "laguna", "mellum"), FULL_AND_SLIDING),
    "cohere_compass_text": {
        "layer_types": alternating("sliding_attention", "full_attention"),
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "zaya": {"layer_types": alternating("hybrid", "hybrid_sliding"), "num_experts_per_tok": 1},
    # Layers that read another layer's keys and values, or run several times.
    "gemma3n_text": SHARED_KV,
    "gemma4": {"text_config": GEMMA4},
    "gemma4_unified": {"text_config": GEMMA4},
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), GEMMA4),
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "hrm_text": {"num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 1},
    "longcat_flash": {"num_layers": 2, "head_dim": 8, "zero_expert_num": 2},
    # Sparse and compressed attention.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
        "num_key_value_heads": 1,
        "o_groups": 2,
    },
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": WIDTH, "adapter_out_dim": WIDTH},
        "audio_config": {"adapter_input_size": WIDTH, "adapter_out_dim": WIDTH, "downsample_hidden_size": 8},
    },
    "dots3_note_text": DOTS3,
    "minimax_m3_vl_text": {
        "layer_types": alternating("full_attention", "minimax_m3_sparse"),
        "index_n_heads": NUM_HEADS // 2,
        "index_block_size": 4,
        "index_topk_blocks": 4,
    },
    "qwen4_exp": {"text_config": DELTA_INDEXED},
    "qwen4_exp_text": DELTA_INDEXED,
    # Convolutions, state spaces, recurrences.
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**SOFT_ATTENTION, "layer_types": alternating("linear_attention", "full_attention")},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": CONV_AND_FULL,
    "lfm2_moe": {**CONV_AND_FULL, "num_dense_layers": 1},
    **dict.fromkeys(("lara_mini", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "zamba"), GENTLE),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), {"text_config": GENTLE} | GENTLE),
    "mamba2": {"num_heads": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "w_init_variance_scale": 1.0},
    "xlstm": {"qk_dim_factor": 1.0},  # its cache and its layers round a smaller one differently
    # The rest.
    **dict.fromkeys(("granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared"), SOFT_ATTENTION),
    "hyperclovax": SOFT_ATTENTION,
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 8.0},  # without the last two it fails
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "got_ocr2": {"vision_config": {"output_channels": 16, "mlp_dim": INNER}},
    **dict.fromkeys(("inkling_text", "inkling2_text", "inkling2_loop_text"), INKLING),
    "inkling_text": {**INKLING, "logits_mup_width_multiplier": 1.0},
    "phi4_multimodal": {
        "vision_config": {"crop_size": 28},
        "audio_config": {
            "num_blocks": 2,
            "nemo_conv_channels": 16,
            "ext_pw_out_channel": WIDTH,
            "depthwise_separable_out_channel": WIDTH,
        },
    },
    **dict.fromkeys(("gpt_neox", "stablelm"), QUARTER_ROTARY),
}
"""Model type -> what its toy needs beyond `SIZES` and `PATTERNS`; a dict for a nested config overrides fields of it."""

BASE = {"rope_theta": 10_000.0}
SHORT = 64
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-alibi": ("falcon", {"alibi": True}),
    "llama-dynamic": (
        "llama",
        {"max_position_embeddings": 512, "rope_parameters": {**BASE, "rope_type": "dynamic", "factor": 4.0}},
    ),
    "llama-linear": ("llama", {"rope_parameters": {**BASE, "rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": (
        "llama",
        {
            "rope_parameters": {
                **BASE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": SHORT,
            }
        },
    ),
    "llama-yarn": (
        "llama",
        {
            "rope_parameters": {
                **BASE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": SHORT,
            }
        },
    ),
    "phi3-longrope": (
        "phi3",
        {
            "original_max_position_embeddings": SHORT,  # from here on the long factors hold
            "rope_parameters": {
                **BASE,
                "rope_type": "longrope",
                "short_factor": [1.0 + step / 8 for step in range(HEAD_DIM // 2)],
                "long_factor": [1.0 + step for step in range(HEAD_DIM // 2)],
                "original_max_position_embeddings": SHORT,
            },
        },
    ),
}
"""Name -> a model type with other positions than its toy has."""

HALF = "the decoder half of an encoder-decoder"
UNKNOWN = "AutoModelForCausalLM builds its text part, and does not know that part's model type when it loads it again"
DRAFTER = "a drafter: it reads the keys and values of another model and has none of its own"
LEFT_OUT: dict[str, str] = {
    **dict.fromkeys(("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp"), HALF),
    **dict.fromkeys(("musicgen", "musicgen_melody", "pegasus", "plbart", "prophetnet", "trocr", "whisper"), HALF),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTER),
    **dict.fromkeys(("emu3", "mllama"), UNKNOWN),
    "blt": "its stock forward with a cache fails: the config has no number of layers",
    "cpmant": "not causal: tokens of one segment see each other in both directions",
    "gemma3n": "its vision tower needs the package timm; gemma3n_text is the same decoder",
    "reformer": "not causal and not deterministic: it sorts the whole sequence into random buckets",
    "xlm": "not causal: transformers has its encoder only",
    "xlnet": "not causal: a permutation language model sees both directions",
}
"""Causal types of transformers that are no toys -> why."""


@dataclass(frozen=True)
class Toy:
    """A tiny random decoder model: its name in the catalogue, its model type, and what differs from `SIZES`."""

    name: str
    model_type: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> PreTrainedConfig:
        """A config of its own for each call."""
        make = CONFIG_MAPPING[self.model_type]
        return make(**toy_fields(make, self.overrides))

    def model(self, seed: int = 0) -> PreTrainedModel:
        """The model in float32 on the CPU, for inference; equal seeds give equal weights."""
        build: Callable[..., PreTrainedModel] = AutoModelForCausalLM.from_config
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = build(self.config(), dtype=torch.float32)
        model.train(False)
        return model


def catalogue() -> dict[str, Toy]:
    """Every toy by its name: the model types of the installed transformers but those `LEFT_OUT`, then `VARIANTS`."""
    types = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in LEFT_OUT]
    toys = {name: Toy(name, name, OVERRIDES.get(name, {})) for name in types}
    variants = {name: Toy(name, base, {**OVERRIDES.get(base, {}), **extra}) for name, (base, extra) in VARIANTS.items()}
    return toys | variants


def save_toy(folder: Path, name: str, seed: int = 0) -> Path:
    """Save a toy and the tiny tokenizer into `folder` as `from_pretrained` reads them; returns the folder."""
    toys = catalogue()
    if name not in toys:
        raise ConfigError(LEFT_OUT.get(name) or f"no toy is called {name!r}; there are: {', '.join(toys)}")
    toys[name].model(seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def toy_fields(make: type[PreTrainedConfig], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """What a config class is called with for a toy, nested configs as dicts."""
    names = {one.name for one in fields(make)}
    chosen = {name: value for name, value in SIZES.items() if name in names}
    if {"kv_lora_rank", "num_key_value_heads"} <= names:
        chosen["num_key_value_heads"] = NUM_HEADS  # latent attention expands to one pair for each head
    stock = make()
    for kind in PATTERNS:
        name = make.attribute_map.get(kind, kind)
        if name in names and getattr(stock, name, None):
            chosen[name] = alternating(*dict.fromkeys(getattr(stock, name)))
    return chosen | dict(overrides) | nested_fields(stock, overrides)


def nested_fields(stock: PreTrainedConfig, overrides: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What the configs inside a config are made from: the text part, and towers beside it."""
    nested = {}
    for name in type(stock).sub_configs_defaults:
        part = getattr(stock, name, None)
        if isinstance(part, PreTrainedConfig):
            nested[name] = {"model_type": part.model_type, **toy_fields(type(part), overrides.get(name, {}))}
    return nested
