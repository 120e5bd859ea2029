"""A `ModelSpec` from files alone: a saved folder, a hub id's snapshot on disk, or just a config.json.

Imports neither torch nor transformers and loads no weights; what transformers would make of a config file is known here
only as far as it shapes the cache. A spec from files is compared with other specs from files: how a model will be run
(its attention implementation, the dtype it is loaded in) is not in them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from langgraph_latent.errors import ModelLoadError
from langgraph_latent.spec.digest import (
    DTYPES,
    Digests,
    StoredTensor,
    Watch,
    digests,
    remembered,
    stored_tensors,
    weight_files,
)
from langgraph_latent.spec.spec import Capabilities, LayerSpec, ModelSpec

Config = Mapping[str, Any]

SPELLINGS = {
    "hidden_size": ("n_embd", "n_embed", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("kv_channels", "attention_head_dim"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    "vocab_size": ("padded_vocab_size",),
    "partial_rotary_factor": ("rotary_pct", "rotary_percent", "rope_pct"),
    "rope_theta": ("rotary_emb_base", "rope_base"),
    "dtype": ("torch_dtype",),
}
"""The names under which configs of different times and makers hold the same."""
TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""Where a config of several modalities keeps its language model."""
SILU: Config = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
SILU_WIDER: Config = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
GELU: Config = {"hidden_act": "gelu", "layer_norm_eps": 1e-5}
GELU_NEW: Config = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
GEMMA: Config = {"hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6}
GEMMA3: Config = {
    **GEMMA,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
DEFAULTS: dict[str, Config] = {
    **dict.fromkeys(("deepseek_v3", "llama", "qwen2", "qwen2_moe", "qwen3_moe", "smollm3"), SILU),
    **dict.fromkeys(("olmo2", "olmo3", "phi3"), SILU_WIDER),
    **dict.fromkeys(("codegen", "gpt2", "gpt_neo", "gptj"), GELU_NEW),
    "cohere2": {"hidden_act": "silu", "layer_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4},
    "falcon": {"multi_query": True},
    "gemma": {"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "head_dim": 256},
    "gemma2": {**GEMMA, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3": GEMMA3,
    "gemma3_text": GEMMA3,
    "gpt_bigcode": {"multi_query": True},
    "gpt_neox": {**GELU, "partial_rotary_factor": 0.25},
    "gpt_oss": {
        **SILU_WIDER,
        "head_dim": 64,
        "sliding_window": 128,
        "sliding_window_pattern": 2,
        "rope_theta": 150_000.0,
    },
    "mistral": {**SILU, "sliding_window": 4096},
    "mixtral": {**SILU_WIDER, "rope_theta": 1e6},
    "phi": {"hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "qwen3": {**SILU, "head_dim": 128},
    "qwen3_next": {**SILU, "full_attention_interval": 4, "partial_rotary_factor": 0.25, "head_dim": 256},
    "stablelm": {"hidden_act": "silu", "layer_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
}
"""What transformers assumes where a config file of a model type is silent: what shapes the cache, and what is often
left out."""
LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt", "gpt_bigcode", "xglm", "biogpt", "ctrl", "openai-gpt"}
ALIBI = {"bloom", "mpt"}
NO_ATTENTION = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
NO_ROPE_PARAMETERS = {*LEARNED_POSITIONS, *ALIBI, *NO_ATTENTION, "gptj", "codegen", "jamba"}

LAYER_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "conv": "linear",
    "mamba": "linear",
    "indexed_attention": "indexed",
    "hybrid": "hybrid",
    "hybrid_sliding": "hybrid sliding",
    "moe": "none",
    "mlp": "none",
}
NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
"""What the letters of nemotron_h's pattern stand for."""
WINDOWS = {"sliding": "sliding_window", "hybrid sliding": "sliding_window", "chunked": "attention_chunk_size"}
KEYS_AND_VALUES = ("full", "sliding", "chunked")

NOT_COMPUTED = re.compile(
    r"_.*|transformers_version|architectures|auto_map|(torch_)?dtype|use_cache|cache_implementation|.*_token_(id|index)"
    r"|output_.*|return_dict.*|id2label|label2id|problem_type|initializer_.*|pretraining_tp|torchscript|task_specific_.*"
    r"|.*dropout.*|.*pdrop|quantization_config|chunk_size_feed_forward|router_aux_loss_coef|embd_pdrop|summary_.*"
)
"""Config fields that do not shape what a model computes from tokens, or are in a spec by another name."""
IN_OTHER_FIELDS = {
    *("hidden_size", "num_hidden_layers", "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("full_attention_interval", "attention_chunk_size", "num_kv_shared_layers", "kv_sharing_modes"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_type", "partial_rotary_factor", "rope_local_base_freq"),
    *("original_max_position_embeddings", "default_theta"),
}
"""Fields that a spec holds as geometry and rope."""


ON_BY_DEFAULT = frozenset(
    [
        "adapter_reuse_layer_norm",
        "add_out_norm",
        "altup_correct_scale",
        "attention_softmax_in_fp32",
        "attn_temperature_tuning",
        "axial_pos_embds",
        "block_auto_adjust_ff_dim",
        "concat_input",
        "decoder_bias",
        "do_layer_norm_before",
        "enable_bias",
        "enable_moe_fp32_combine",
        "enable_pronunciation",
        "enable_shape",
        "gating",
        "gelu_activation",
        "is_encoder",
        "kda_safe_gate",
        "layer_norm_elementwise_affine",
        "layernorm_embedding",
        "learned_pos_emb",
        "linear_allow_neg_eigval",
        "ln_before_adapter",
        "mamba_conv_bias",
        "mamba_norm_before_gate",
        "moe_renormalize",
        "moe_shared_expert_overlap",
        "mtp_hidden_states_first",
        "multi_query",
        "no_bias",
        "norm_reduction_force_float32",
        "parallel_attn",
        "patch_in_forward",
        "prefix_lm",
        "qkv_bias",
        "return_last_states",
        "rope_interleave",
        "scale_attention_softmax_in_fp32",
        "scale_attn_weights",
        "share_encoder_decoder_embeddings",
        "shared_expert_sink",
        "use_associative_scan",
        "use_attention_gate",
        "use_conv_bias",
        "use_expert_bias",
        "use_lang_emb",
        "use_learned_position_embeddings",
        "use_mamba_kernels",
        "use_mems_eval",
        "use_post_norm",
        "use_sandwich_norm",
    ]
)
"""Switches that every model type of transformers which has them turns on where a config is silent."""
ON_BY_DEFAULT_IN: Mapping[str, frozenset[str]] = {
    "attention_bias": frozenset(["glm", "glm4", "gpt_neox", "gpt_oss", "jais2", "seed_oss"]),
    "mlp_bias": frozenset(["jais2"]),
    "norm_topk_prob": frozenset(
        [
            "axk1",
            "axk2",
            "beam",
            "cohere2_moe",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note_text",
            "exaone_moe",
            "flint",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "hy_v4",
            "lara_mini",
            "lfm2_moe",
            "mellum",
            "mimo_v2_flash",
            "nemotron_h",
            "qwen3_next",
            "qwen4_exp_text",
            "sarvam_mla",
            "sarvam_moe",
            "solar_open",
        ]
    ),
    "qk_layernorm": frozenset(["persimmon"]),
    "rescale_prenorm_residual": frozenset(["nemotron_h"]),
    "residual_in_fp32": frozenset(["falcon_mamba", "mamba", "mamba2"]),
    "scale_embedding": frozenset(["bigbird_pegasus", "biogpt", "plbart", "xglm"]),
    "use_bias": frozenset(["big_bird", "starcoder2"]),
    "use_parallel_residual": frozenset(["gpt_neox"]),
    "use_qk_norm": frozenset(["llama4_text", "sarvam_moe"]),
}
"""The same for switches that only some types turn on: name -> those types."""

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError, OSError)
"""What a config raises whose fields are not what they are in any config."""


def folder_spec(name: str | Path, watch: Watch | None = None) -> ModelSpec:
    """The spec of a folder made by save_pretrained(), of a hub id that is on disk, or of a config file.

    `watch` is told how far the hashing of weights is. What the files don't tell is "": a config file alone leaves
    weights, tokenizer and template unknown. Raises `ModelLoadError` where there is no such model, or a damaged one.
    """
    try:
        return _spec(str(name), watch)
    except UNREADABLE as error:
        raise ModelLoadError(
            f"{str(name)[:200]!r} can't be read as a model: {type(error).__name__}: {error}"
        ) from error


def _spec(name: str, watch: Watch | None) -> ModelSpec:
    path = find(name)
    folder = path.parent
    is_alone = Path(name).expanduser().is_file()
    outer = _read_json(path)
    config = text_config(outer)
    _check_decoder(path, outer, config)
    files = [] if is_alone else weight_files(folder)
    _check_complete(folder, files)
    stored = [tensor for file in files for tensor in stored_tensors(file)]
    quantization = outer.get("quantization_config") or config.get("quantization_config") or {}
    dtype = _dtype(config, outer, [] if quantization else stored)
    layers = layers_of(config, stored)
    rope = rope_of(config)
    weights = digests(folder, watch) if files else Digests("", "")
    return ModelSpec(
        name=name,
        architecture=str((outer.get("architectures") or [outer.get("model_type") or "unknown"])[0]),
        hidden_size=int(config["hidden_size"]),
        vocab_size=int(config.get("vocab_size") or 0),
        layers=layers,
        rope=rope,
        config=config_digest(config),
        config_fields=config_fields(config),
        weights=weights.weights,
        tokenizer="" if is_alone else _tokenizer_of(folder),
        template="" if is_alone else _template_of(folder),
        adapters=(),
        dtype=dtype,
        quantization=quantization_of(quantization),
        attention="",
        max_positions=max_positions_of(config),
        bytes_per_token=sum(layer.kv_heads * (layer.key_dim + layer.value_dim) for layer in layers) * _itemsize(dtype),
        capabilities=_capabilities(config, layers, rope),
        sketch=weights.sketch,
    )


# -- where the files are ---------------------------------------------------------------------------------------------


def find(name: str) -> Path:
    """The config file of a folder, of a hub id or by itself."""
    path = Path(name).expanduser()
    if name and path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        adapter = " (it holds a LoRA adapter: pass its base model)" if (path / "adapter_config.json").is_file() else ""
        raise ModelLoadError(f"the folder {name!r} holds no config.json{adapter}")
    if path.is_file():
        return path
    if name.count("/") <= 1 and not name.startswith((".", "/", "~")) and not name.endswith(".json"):
        for config in _snapshots(name):
            if config.is_file():
                return config
        raise ModelLoadError(
            f"{name!r} is neither a folder, a config file nor a model in the hub's cache on this machine. Check the "
            "spelling, or download it first with `hf download`"
        )
    raise ModelLoadError(f"there is no folder or file {name!r}; check the path, or pass a hub id (owner/name)")


def _snapshots(name: str) -> Iterable[Path]:
    """Config files of a hub id in the hub's cache; what its main branch points to first."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    hub = os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or home) / "hub"
    repository = Path(hub).expanduser() / f"models--{name.replace('/', '--')}"
    main = repository / "refs" / "main"
    if main.is_file():
        yield repository / "snapshots" / main.read_text().strip() / "config.json"
    yield from sorted(repository.glob("snapshots/*/config.json"))


def _check_decoder(path: Path, outer: Config, config: Config) -> None:
    """Raise `ModelLoadError` for a config that is not a decoder's, or lacks what a cache's shape is read from."""
    if outer.get("is_encoder_decoder") or config.get("is_encoder_decoder"):
        raise ModelLoadError(
            f"{path} is an encoder-decoder ({config.get('model_type') or 'of unknown type'}), whose caches also hold "
            "what its encoder read; only decoder-only language models can be compared"
        )
    missing = [field for field in ("hidden_size", "num_hidden_layers") if not config.get(field)]
    if len(missing) == 2:
        raise ModelLoadError(f"{path} is no config of a language model: it has no {' and no '.join(missing)}")
    for field in missing:
        names = ", ".join((field, *SPELLINGS[field]))
        raise ModelLoadError(f"{path} lacks {field!r}, from which the shape of its cache is read; add it (or {names})")


def _check_complete(folder: Path, files: list[Path]) -> None:
    """Raise `ModelLoadError` where an index names weight files that are not there."""
    index = folder / "model.safetensors.index.json"
    if files and index.is_file():
        named = set((_read_json(index).get("weight_map") or {}).values())
        if missing := sorted(named - {file.name for file in files}):
            raise ModelLoadError(f"{folder} lacks {len(missing)} of {len(named)} weight files, first {missing[0]!r}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} holds no JSON object")
    return content


# -- the config ------------------------------------------------------------------------------------------------------


def text_config(config: Config) -> dict[str, Any]:
    """The part of a config that describes the language model, its fields by one spelling and with their defaults."""
    part = next((config[name] for name in TEXT_PARTS if isinstance(config.get(name), dict)), config)
    found = {name: value for name, value in part.items() if value is not None}
    for name, others in SPELLINGS.items():
        values = [found.pop(other) for other in others if other in found]
        if values and name not in found:
            found[name] = values[0]
    if found.get("model_type") == "nemotron_h":
        found.update(_nemotron_layers(found))
    explicit_none = {name for name, value in part.items() if value is None and name == "sliding_window"}
    defaults = DEFAULTS.get(str(found.get("model_type")), {})
    return {**{name: value for name, value in defaults.items() if name not in explicit_none}, **found}


def _nemotron_layers(config: dict[str, Any]) -> Config:
    """nemotron_h's list of layers, which its number follows from; older files spell it as one letter per layer."""
    pattern = str(config.pop("hybrid_override_pattern", ""))
    types = config.get("layer_types") or config.get("layers_block_type") or [NEMOTRON[letter] for letter in pattern]
    config.pop("layer_types", None)
    return {"layers_block_type": types, "num_hidden_layers": len(types)} if types else {}


def config_digest(config: Config) -> str:
    """SHA-256 of `config_fields`.

    Equal for a config file and for the config that transformers makes of it,
    `config_digest(text_config(config.to_dict()))`, where the file is silent only of what `DEFAULTS` knows.
    """
    return _sha256(config_fields(config))


def config_fields(config: Config) -> str:
    """What shapes the model's numbers and is in no other field of a spec, as canonical JSON.

    What is absent, null, empty or a switch at its default is the same: transformers of different times write one or
    the other. So a switch that one config alone names is a difference; any other field that one config alone names may
    differ, as its default is not known here.
    """
    fields = {
        name: value
        for name, value in config.items()
        if name not in IN_OTHER_FIELDS
        and not NOT_COMPUTED.fullmatch(name)
        and not _is_nothing(name, value, str(config.get("model_type")))
    }
    return json.dumps(_plain(fields), sort_keys=True, default=str)


def _is_nothing(name: str, value: object, model_type: str) -> bool:
    """Whether a field says no more than a config without it."""
    if isinstance(value, bool):
        is_on = name == "tie_word_embeddings" or name in ON_BY_DEFAULT or model_type in ON_BY_DEFAULT_IN.get(name, ())
        return value is is_on
    return value is None or value == {} or value == []


def rope_of(config: Config) -> str:
    """Rope parameters as canonical JSON, be they spelled `rope_parameters` or `rope_theta` and `rope_scaling`."""
    model_type = str(config.get("model_type"))
    given = config.get("rope_parameters") or config.get("rope_scaling")
    if config.get("alibi") or (model_type in NO_ROPE_PARAMETERS and not given):
        return ""
    given = given or {}
    if any(isinstance(value, dict) for value in given.values()):
        by_type = {name: _rope(value, config) for name, value in given.items() if isinstance(value, dict)}
        return json.dumps(_plain(by_type), sort_keys=True)
    if "rope_local_base_freq" in config:  # one for each kind of layer
        near = _rope({}, {**config, "rope_theta": config["rope_local_base_freq"]})
        return json.dumps(_plain({"full_attention": _rope(given, config), "sliding_attention": near}), sort_keys=True)
    return json.dumps(_plain(_rope(given, config)), sort_keys=True)


def _rope(given: Config, config: Config) -> dict[str, Any]:
    rope = {name: value for name, value in given.items() if value is not None and name != "type"}
    rope.setdefault("rope_type", given.get("type") or "default")
    if rope["rope_type"] == "su":  # longrope's first name
        rope["rope_type"] = "longrope"
    rope.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    if "partial_rotary_factor" in config:
        rope.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or config.get("max_position_embeddings")
    return rope


def quantization_of(settings: Config) -> str:
    """How weights are quantised: the method, and a digest of all its settings; "" where they are not."""
    if not settings:
        return ""
    told = {name: value for name, value in settings.items() if not name.startswith("_")}
    digest = _sha256(json.dumps(_plain(told), sort_keys=True, default=str))
    return f"{settings.get('quant_method') or 'unnamed'} {digest[:8]}"


def max_positions_of(config: Config) -> int:
    """The longest sequence over which a cache stays valid; 0 where a config names none.

    With longrope and dynamic scaling, keys written below the original maximum are wrong above it: the frequencies
    change there. Rope parameters may be given per layer type.
    """
    longest = int(config.get("max_position_embeddings") or 0)
    given = json.loads(rope_of(config) or "{}")
    originals = (
        int(rope.get("original_max_position_embeddings") or config.get("original_max_position_embeddings") or longest)
        for rope in (given, *given.values())
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic")
    )
    return min(filter(None, (longest, *originals)), default=0)


def _plain(value: Any) -> Any:
    """Data in which 1 and 1.0 are written alike."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:  # how transformers writes an infinite number
            return float(value["__float__"])
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


# -- geometry --------------------------------------------------------------------------------------------------------


def layers_of(config: Config, stored: list[StoredTensor]) -> tuple[LayerSpec, ...]:
    """What each layer's cache holds: by the shapes of its projections where they are there, else by the config."""
    kinds = _kinds(config)
    projections = _projections(stored, len(kinds))
    has_attention = any(_geometry(config, found) for found in projections)
    layers = []
    for (kind, window), found in zip(kinds, projections, strict=True):
        geometry = _geometry(config, found)
        if geometry is None and has_attention and kind in KEYS_AND_VALUES:
            kind, window = "linear", 0  # attention elsewhere, none here: the layer keeps something else
        if kind in KEYS_AND_VALUES:
            layers.append(LayerSpec(kind, window, *(geometry or _configured_geometry(config))))
        else:
            layers.append(LayerSpec(kind, window))
    return tuple(layers)


def _kinds(config: Config) -> list[tuple[str, int]]:
    """Kind and window of every layer, as transformers infers them."""
    count = int(config["num_hidden_layers"])
    types = config.get("layer_types") or config.get("layers_block_type") or _inferred_types(config, count)
    shared = int(config.get("num_kv_shared_layers") or 0)
    kinds = []
    for index, name in enumerate(types[:count]):
        kind = "none" if index >= count - shared else LAYER_KINDS.get(str(name), str(name))
        kinds.append((kind, int(config.get(WINDOWS.get(kind, "")) or 0)))
    return kinds


def _inferred_types(config: Config, count: int) -> list[str]:
    model_type = str(config.get("model_type"))
    if model_type in NO_ATTENTION:
        return ["linear_attention"] * count
    if model_type == "falcon_h1":
        return ["hybrid"] * count
    if period := config.get("attn_layer_period"):  # jamba
        offset = int(config.get("attn_layer_offset") or 0)
        return ["full_attention" if index % period == offset else "linear_attention" for index in range(count)]
    if model_type.startswith("llama4"):
        rope = config.get("no_rope_layers") or [(index + 1) % 4 for index in range(count)]
        return ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    if interval := config.get("full_attention_interval"):
        return ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    window = config.get("sliding_window")
    if window and "qwen" in model_type:
        first = int(config.get("max_window_layers") or 0) if config.get("use_sliding_window") else count
        return ["sliding_attention" if index >= first else "full_attention" for index in range(count)]
    if window and (pattern := config.get("sliding_window_pattern")):
        return ["sliding_attention" if (index + 1) % pattern else "full_attention" for index in range(count)]
    if window and config.get("use_sliding_window", True):
        return ["sliding_attention"] * count
    return ["chunked_attention" if config.get("attention_chunk_size") else "full_attention"] * count


LAYER_TENSOR = re.compile(r"(?:.*\.)?(?:layers|h|blocks|block)\.(\d+)\.(?:.*\.)?(\w+)\.weight")
OTHER_TOWERS = re.compile(r"vision|visual|audio|speech|encoder|cross_attn|crossattention|\bmtp\b|indexer")
FUSED = ("qkv_proj", "query_key_value", "Wqkv", "wqkv", "c_attn", "W_pack")
SPLIT = (("k_proj", "v_proj", "q_proj"), ("wk", "wv", "wq"), ("key", "value", "query"))


def _projections(stored: list[StoredTensor], count: int) -> list[dict[str, tuple[int, ...]]]:
    """Per layer, the shapes of its unquantised tensors by the last part of their names."""
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(count)]
    for tensor in stored:
        match = LAYER_TENSOR.fullmatch(tensor.name)
        if match and "float" in tensor.dtype and not OTHER_TOWERS.search(tensor.name) and int(match[1]) < count:
            found[int(match[1])][match[2]] = tensor.shape
    return found


def _geometry(config: Config, found: Mapping[str, tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Heads, key and value channels by the shapes of a layer's projections; None where it has none that is known."""
    if "kv_a_proj_with_mqa" in found:  # MLA keeps the latent as keys and the rotated part as values, one head each
        width = found["kv_a_proj_with_mqa"][0]
        (rank,) = found.get("kv_a_layernorm") or (int(config["kv_lora_rank"]),)
        return 1, rank, width - rank
    heads = int(config.get("num_attention_heads") or 0)
    for key, value, query in SPLIT:
        if key in found and len(found[key]) == 2:
            width = found[key][0]
            head_dim = _head_dim(config, width, found.get("k_norm", ()), found.get(query, (0,))[0])
            num_heads = width // head_dim
            return num_heads, head_dim, found.get(value, found[key])[0] // num_heads
    for name in FUSED:
        if name in found and heads:
            head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
            num_heads = (max(found[name]) // head_dim - heads) // 2  # the output is the longer side
            return (heads if config.get("new_decoder_architecture") else num_heads), head_dim, head_dim
    return None


def _head_dim(config: Config, width: int, norm: tuple[int, ...], query_width: int) -> int:
    heads = int(config.get("num_attention_heads") or 1)
    normed = norm[0] if len(norm) == 1 and norm[0] < width else 0
    for head_dim in (
        normed,
        int(config.get("head_dim") or 0),
        query_width // heads,
        int(config["hidden_size"]) // heads,
    ):
        if head_dim and width % head_dim == 0:
            return head_dim
    return width


def _configured_geometry(config: Config) -> tuple[int, int, int]:
    """Heads, key and value channels by the config's fields."""
    if config.get("kv_lora_rank"):
        return 1, int(config["kv_lora_rank"]), int(config.get("qk_rope_head_dim") or 0)
    heads = int(config.get("num_attention_heads") or 1)
    head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    if config.get("new_decoder_architecture"):  # falcon's cache holds a copy for every head
        return heads, head_dim, head_dim
    kv_heads = 1 if config.get("multi_query") else int(config.get("num_key_value_heads") or heads)
    return kv_heads, head_dim, int(config.get("v_head_dim") or head_dim)


def _dtype(config: Config, outer: Config, stored: list[StoredTensor]) -> str:
    """The dtype of most stored numbers; that of the config where there are none, or packed ones."""
    sizes: Counter[str] = Counter()
    for tensor in stored:
        sizes[tensor.dtype] += tensor.end - tensor.begin
    for dtype, _ in sizes.most_common(1):
        if dtype in ("float64", "float32", "float16", "bfloat16"):
            return dtype
    named = config.get("dtype") or outer.get("dtype") or outer.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


def _itemsize(dtype: str) -> int:
    return dict(DTYPES.values()).get(dtype, 4)


def _capabilities(config: Config, layers: tuple[LayerSpec, ...], rope: str) -> Capabilities:
    """What the files prove can't be done; only a probe on the loaded model can promise more."""
    model_type = str(config.get("model_type"))
    whole = sorted({layer.kind for layer in layers} - {*KEYS_AND_VALUES, "none"})
    refusals = []
    if whole:
        reason = f"{' and '.join(whole)} layers keep a running state, in which no single token can be found again"
        refusals += [("crop", reason), ("move", reason)]
    elif model_type in LEARNED_POSITIONS:
        refusals.append(("move", "positions are learned, and are in everything the layers compute"))
    has_alibi = bool(config.get("alibi")) or model_type in ALIBI
    positions = "alibi" if has_alibi else "learned" if model_type in LEARNED_POSITIONS else "rope" if rope else ""
    return Capabilities(tuple(refusals), positions)


# -- tokenizer and template ------------------------------------------------------------------------------------------


def tokenizer_digest(content: str) -> str:
    """SHA-256 of what a tokenizer.json's ids stand for: its vocabulary, merges and added tokens, however formatted.

    Normalizer, pre-tokenizer, decoder and post-processor are not in it: transformers makes them anew by the tokenizer's
    class, so that a file and what is loaded from it differ in them; and a cache is valid by its ids.
    """
    rules = json.loads(content)
    if not isinstance(rules.get("model"), dict):  # a plain vocabulary
        return _sha256(json.dumps(rules, sort_keys=True))
    model = rules["model"]
    told = {
        "vocab": model.get("vocab"),
        # written as pairs or as texts with a space
        "merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model.get("merges") or ()],
        "added_tokens": sorted(rules.get("added_tokens") or (), key=lambda token: int(token["id"])),
    }
    return _sha256(json.dumps(told, sort_keys=True))


def template_digest(template: object) -> str:
    """SHA-256 of a chat template, or of several by name."""
    return _sha256(str(template or ""))


def _tokenizer_of(folder: Path) -> str:
    file = folder / "tokenizer.json"
    if file.is_file():
        try:
            (digest,) = remembered(
                "token ids", [file], 1, lambda: (tokenizer_digest(file.read_text(encoding="utf-8")),)
            )
            return digest
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ModelLoadError(f"{file} is no tokenizer: {error}") from error
    names = ("tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
    parts = [
        f"{name}:{hashlib.sha256((folder / name).read_bytes()).hexdigest()}" for name in names if _has(folder, name)
    ]
    return _sha256("|".join(parts)) if parts else ""


def _template_of(folder: Path) -> str:
    """As transformers finds it: a file of its own comes before the tokenizer's config."""
    if _has(folder, "chat_template.jinja"):
        return template_digest((folder / "chat_template.jinja").read_text(encoding="utf-8"))
    for name in ("chat_template.json", "tokenizer_config.json"):
        if _has(folder, name) and (template := _read_json(folder / name).get("chat_template")):
            if isinstance(template, list):
                template = {entry["name"]: entry["template"] for entry in template}
            return template_digest(template)
    return template_digest("") if _has(folder, "tokenizer_config.json") else ""


def _has(folder: Path, name: str) -> bool:
    return (folder / name).is_file()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
