"""What a model's config says, as canonical text and digests: fields, rope, longest sequence, quantisation.

Defaults and spellings are those of transformers' own config classes, which are imported when a config is read. This
module knows no weights and no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langgraph_latent.checks import is_whole_number
from langgraph_latent.errors import ModelLoadError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

LEARNED_POSITIONS = {"gpt2", "gpt_neo", "opt", "gpt_bigcode", "xglm", "biogpt", "ctrl", "openai-gpt"}
ALIBI = {"bloom", "mpt"}
NO_ATTENTION = {"mamba", "mamba2", "falcon_mamba", "rwkv"}
NO_ROPE_PARAMETERS = {*LEARNED_POSITIONS, *ALIBI, *NO_ATTENTION, "gptj", "codegen", "jamba"}
"""Model types whose rope is "". Any other type without rope parameters is written with the default ones: identities
that are stored in checkpoints were made so."""

NOT_COMPUTED = re.compile(
    r"_.*|transformers_version|architectures|auto_map|(torch_)?dtype|use_cache|cache_implementation|.*_token_(id|index)"
    r"|output_.*|return_dict.*|id2label|label2id|problem_type|initializer_.*|pretraining_tp|torchscript|task_specific_.*"
    r"|.*dropout.*|.*pdrop|quantization_config|chunk_size_feed_forward|router_aux_loss_coef|summary_.*"
)
"""Config fields that do not shape what a model computes from tokens, or are in a spec by another name."""
IN_OTHER_FIELDS = {
    *("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "multi_query_group_num"),
    *("head_dim", "kv_channels", "attention_head_dim"),
    *("vocab_size", "padded_vocab_size"),
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("full_attention_interval", "attention_chunk_size", "num_kv_shared_layers", "kv_sharing_modes"),
    *("rope_parameters", "rope_scaling", "rope_theta", "rope_type", "rope_local_base_freq", "rotary_emb_base"),
    *("partial_rotary_factor", "rotary_pct", "rotary_percent", "rope_pct", "rope_base"),
    *("original_max_position_embeddings", "default_theta"),
}
"""Fields that a spec holds as geometry and rope, by every name they have had: stored identities leave them out."""
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
"""Names of one field; stored identities have it under the first."""
MAX_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Names under which stored identities found the longest sequence."""


def read_config(file: Path, model_type: str) -> PreTrainedConfig:
    """The config that transformers makes of a config file of a model type. No code that the file names is run.

    Raises `ModelLoadError` for a type that transformers does not know, and for fields that it refuses.
    """
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        of_type = f"is of the model type {model_type!r}, which is" if model_type else "names no model type, so it is"
        raise ModelLoadError(
            f"{file} {of_type} unknown to the installed transformers {__version__}. Nothing can be said about its "
            "cache: install a transformers that knows the type (code that comes with a model is never run)"
        )
    try:
        return CONFIG_MAPPING[model_type].from_json_file(file)
    except Exception as error:  # the one place where transformers' refusals of a config, of whatever kind, become ours
        raise ModelLoadError(
            f"{file} is not a config of the model type {model_type!r}: {type(error).__name__}: {error}"
        ) from error


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a config that describes the language model."""
    return config.get_text_config(decoder=True)


def config_digest(config: PreTrainedConfig) -> str:
    """SHA-256 of `config_fields`."""
    return hashlib.sha256(config_fields(config).encode()).hexdigest()


def config_fields(config: PreTrainedConfig) -> str:
    """What shapes a text model's numbers and is in no other field of a spec, as canonical JSON.

    Absent, null, empty and a switch at its class's default are the same: transformers of different times write one or
    the other.
    """
    found = {name: value for name, value in config.to_dict().items() if value is not None}
    heads = [found.pop(name) for name in HEADS if name in found]
    if heads:
        found[HEADS[0]] = heads[0]
    switches = _default_switches(config)
    shaping = {
        name: value
        for name, value in found.items()
        if name not in IN_OTHER_FIELDS
        and not NOT_COMPUTED.fullmatch(name)
        and not (value is switches.get(name, False) if isinstance(value, bool) else value in ({}, []))
    }
    return json.dumps(plain(shaping), sort_keys=True, default=str)


def _default_switches(config: PreTrainedConfig) -> dict[str, bool]:
    """What a config's class turns on or off where a file is silent, by the names that files have."""
    switches = {
        config.attribute_map.get(one.name, one.name): one.default
        for one in fields(config)
        if isinstance(one.default, bool)
    }
    return {**switches, "tie_word_embeddings": True}  # stored identities name an untied head, whatever a class assumes


def rope_of(config: PreTrainedConfig) -> str:
    """Rope parameters as canonical JSON, one entry for each kind of layer where they differ; "" for no rope."""
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if getattr(config, "alibi", False) or (config.model_type in NO_ROPE_PARAMETERS and not given):
        return ""
    by_kind = {kind: _rope(value, config) for kind, value in given.items() if isinstance(value, dict)}
    return json.dumps(plain(by_kind or _rope(given, config)), sort_keys=True)


def _rope(given: Mapping[str, Any], config: PreTrainedConfig) -> dict[str, Any]:
    rope = {name: value for name, value in given.items() if value is not None and name != "type"}
    rope.setdefault("rope_type", given.get("type") or "default")
    rope.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10_000.0)
    if (partial := getattr(config, "partial_rotary_factor", None)) is not None:
        rope.setdefault("partial_rotary_factor", partial)
    if rope["rope_type"] in ("llama3", "yarn", "longrope"):
        original = getattr(config, "original_max_position_embeddings", None)
        original = original or rope.get("original_max_position_embeddings")
        rope["original_max_position_embeddings"] = original or getattr(config, "max_position_embeddings", None)
    return rope


def max_positions_of(config: PreTrainedConfig) -> int:
    """The longest sequence over which a cache stays valid; 0 where a config names none.

    With longrope and dynamic scaling, keys written below the original maximum are wrong above it: the frequencies
    change there. Rope parameters may be given per layer type.
    """
    named = config.to_dict()
    longest = next((int(named[name]) for name in MAX_POSITIONS if named.get(name)), 0)
    original = getattr(config, "original_max_position_embeddings", None) or longest
    given = json.loads(rope_of(config) or "{}")
    originals = (
        int(rope.get("original_max_position_embeddings") or original)
        for rope in (given, *given.values())
        if isinstance(rope, dict) and rope.get("rope_type") in ("longrope", "dynamic")
    )
    return min(filter(None, (longest, *originals)), default=0)


def quantization_of(settings: Mapping[str, Any]) -> str:
    """How weights are quantised: the method, and a digest of all its settings; "" where they are not."""
    if not settings:
        return ""
    named = {name: value for name, value in settings.items() if not name.startswith("_")}
    digest = hashlib.sha256(json.dumps(plain(named), sort_keys=True, default=str).encode()).hexdigest()
    return f"{settings.get('quant_method') or 'unnamed'} {digest[:8]}"


def plain(value: Any) -> Any:
    """Data in which 1 and 1.0 are written alike."""
    if isinstance(value, Mapping):
        if value.keys() == {"__float__"}:  # how transformers writes an infinite number
            return float(value["__float__"])
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return float(value) if is_whole_number(value) else value
