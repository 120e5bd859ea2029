"""A `ModelSpec` from files alone: a saved folder, a hub id's snapshot on disk, or just a config.json.

No weights are loaded and no torch is needed. A spec from files is compared with other specs from files: how a model
will be run (its attention implementation, the dtype it is loaded in) is not in them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from langgraph_latent.disk_cache import home_expanded
from langgraph_latent.errors import ModelLoadError
from langgraph_latent.spec.config import (
    ALIBI,
    LEARNED_POSITIONS,
    config_digest,
    config_fields,
    max_positions_of,
    quantization_of,
    read_config,
    rope_of,
    text_config,
)
from langgraph_latent.spec.digest import (
    DTYPES,
    Digests,
    StoredTensor,
    Watch,
    digests,
    read_json,
    stored_tensors,
    weight_files,
)
from langgraph_latent.spec.geometry import KEYS_AND_VALUES, layers_of
from langgraph_latent.spec.spec import Capabilities, LayerSpec, ModelSpec
from langgraph_latent.spec.tokenizer import template_of, tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, IndexError, OverflowError, RecursionError, OSError)
"""What a config raises whose fields are not what they are in any config."""


def folder_spec(name: str | Path, watch: Watch | None = None) -> ModelSpec:
    """The spec of a folder made by save_pretrained(), of a hub id that is on disk, or of a config file.

    `watch` is called with how far the hashing of weights is. What the files don't tell is "": a config file alone
    leaves weights, tokenizer and template unknown. Raises `ModelLoadError` where there is no such model, a damaged one,
    or one of a type that transformers does not know.
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
    is_alone = home_expanded(name).is_file()
    content = read_json(path)
    config = _decoder_config(path, content)
    files = [] if is_alone else weight_files(folder)
    _check_complete(folder, files)
    stored = [tensor for file in files for tensor in stored_tensors(file)]
    quantization = content.get("quantization_config") or getattr(config, "quantization_config", None) or {}
    dtype = _dtype(config, content, [] if quantization else stored)
    layers = layers_of(config, stored)
    rope = rope_of(config)
    weights = digests(folder, watch) if files else Digests("", "")
    return ModelSpec(
        name=name,
        architecture=str((content.get("architectures") or [config.model_type])[0]),
        hidden_size=int(config.hidden_size),
        vocab_size=int(getattr(config, "vocab_size", None) or 0),
        layers=layers,
        rope=rope,
        config=config_digest(config),
        config_fields=config_fields(config),
        weights=weights.weights,
        tokenizer="" if is_alone else tokenizer_of(folder),
        template="" if is_alone else template_of(folder),
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
    path = home_expanded(name)
    if name and path.is_dir():
        if (path / "config.json").is_file():
            return path / "config.json"
        adapter = " (it holds a LoRA adapter: pass its base model)" if (path / "adapter_config.json").is_file() else ""
        raise ModelLoadError(f"the folder {name!r} holds no config.json{adapter}")
    if path.is_file():
        return path
    if name.count("/") > 1 or name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise ModelLoadError(f"there is no folder or file {name!r}; check the path, or pass a hub id (owner/name)")
    if found := _find_in_hub_cache(name):
        return found
    raise ModelLoadError(
        f"{name!r} is neither a folder, a config file nor a model in the hub's cache on this machine. Check the "
        "spelling, or download it first with `hf download`"
    )


def _find_in_hub_cache(name: str) -> Path | None:
    """The config file of a hub id: of its main branch, else of any snapshot that is there."""
    from huggingface_hub import constants, scan_cache_dir, try_to_load_from_cache
    from huggingface_hub.errors import CacheNotFound, HFValidationError

    try:
        if isinstance(main := try_to_load_from_cache(name, "config.json"), str):
            return Path(main)
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except (CacheNotFound, HFValidationError):
        return None
    snapshots = [
        revision.snapshot_path / "config.json"
        for repository in repositories
        if (repository.repo_type, repository.repo_id) == ("model", name)
        for revision in repository.revisions
    ]
    return next((config for config in sorted(snapshots) if config.is_file()), None)


# -- what is in them -------------------------------------------------------------------------------------------------


def _decoder_config(path: Path, content: Mapping[str, Any]) -> PreTrainedConfig:
    """The config of a decoder's language model. Raises `ModelLoadError` for any other, or one that lacks its sizes."""
    whole = read_config(path, str(content.get("model_type") or ""))
    if whole.is_encoder_decoder:
        raise ModelLoadError(
            f"{path} is an encoder-decoder ({whole.model_type}), whose caches also hold what its encoder read; only "
            "decoder-only language models can be compared"
        )
    config = text_config(whole)
    sizes = ("hidden_size", "num_hidden_layers")
    if missing := [size for size in sizes if not getattr(config, size, None)]:
        raise ModelLoadError(f"{path} is not a config of a language model: it has no {' and no '.join(missing)}")
    if config is whole:  # of a part, transformers leaves out what is at its default
        names = {one.name for one in fields(config)}
        for size in sizes:
            own = config.attribute_map.get(size, size)
            if own in names and not {size, own} & content.keys():
                raise ModelLoadError(
                    f"{path} lacks {size!r}, from which the shape of its cache is read; add it"
                    + (f" (or {own})" if own != size else "")
                )
    return config


def _check_complete(folder: Path, files: list[Path]) -> None:
    """Raise `ModelLoadError` where an index names weight files that are not there."""
    index = folder / "model.safetensors.index.json"
    if files and index.is_file():
        named = set((read_json(index).get("weight_map") or {}).values())
        if missing := sorted(named - {file.name for file in files}):
            raise ModelLoadError(f"{folder} lacks {len(missing)} of {len(named)} weight files, first {missing[0]!r}")


def _dtype(config: PreTrainedConfig, content: Mapping[str, Any], stored: list[StoredTensor]) -> str:
    """The dtype of most stored numbers; that of the config where there are none, or packed ones."""
    sizes: Counter[str] = Counter()
    for tensor in stored:
        sizes[tensor.dtype] += tensor.end - tensor.begin
    for dtype, _ in sizes.most_common(1):
        if dtype in ("float64", "float32", "float16", "bfloat16"):
            return dtype
    named = config.dtype or content.get("dtype") or content.get("torch_dtype") or "float32"
    return str(named).removeprefix("torch.")


def _itemsize(dtype: str) -> int:
    return dict(DTYPES.values()).get(dtype, 4)


def _capabilities(config: PreTrainedConfig, layers: tuple[LayerSpec, ...], rope: str) -> Capabilities:
    """What the files prove can't be done; only a probe on the loaded model can promise more."""
    opaque = sorted({layer.kind for layer in layers} - {*KEYS_AND_VALUES, "none"})
    is_learned = config.model_type in LEARNED_POSITIONS
    refusals = []
    if opaque:
        reason = f"{' and '.join(opaque)} layers keep a running state, in which no single token can be found again"
        refusals += [("crop", reason), ("move", reason)]
    elif is_learned:
        refusals.append(("move", "positions are learned, and are in everything the layers compute"))
    has_alibi = bool(getattr(config, "alibi", False)) or config.model_type in ALIBI
    positions = "alibi" if has_alibi else "learned" if is_learned else "rope" if rope else ""
    return Capabilities(tuple(refusals), positions)
