"""Models by name: found, loaded once per process, counted and given back. It knows no caches and no requests."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from langgraph_latent.engine import cpu_thread
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import LatentError, ModelLoadError
from langgraph_latent.spec.digest import digests


class ModelKey(NamedTuple):
    """What two requests for one model agree on: folder or hub id, revision, dtype, device ("auto" where open)."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    def canonical(self) -> ModelKey:
        """The key with a folder's one true name, whatever path led to it."""
        folder = Path(self.name).expanduser()
        return self._replace(name=str(folder.resolve())) if self.name and folder.is_dir() else self


_resident: dict[ModelKey, ResidentModel] = {}
_users: dict[ModelKey, int] = {}
_load_lock = threading.Lock()


def acquire(key: ModelKey, *, probe: bool = True) -> ResidentModel:
    """The one resident model for `key`, loaded on first use, and probed where `probe` is True.

    Every call needs a `release`. Parallel callers wait for one load. Raises `ModelLoadError` for a name or folder that
    holds no usable model.
    """
    with _load_lock:
        if key not in _resident:
            _resident[key] = cpu_thread.run(lambda: _load(key, probe))
        _users[key] = _users.get(key, 0) + 1
        return _resident[key]


def release(key: ModelKey) -> None:
    """Give a model back; its weights are freed with the last user."""
    with _load_lock:
        _users[key] -= 1
        if not _users[key]:
            del _users[key], _resident[key]


def num_resident() -> int:
    """How many models this process holds."""
    return len(_resident)


def _load(key: ModelKey, probe: bool) -> ResidentModel:
    folder = _folder_of(key)
    device = _default_device() if key.device == "auto" else key.device
    dtype = _default_dtype(device) if key.dtype == "auto" else key.dtype
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, device_map=device, use_safetensors=True, output_loading_info=True
        )
        model, report = loaded
        if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
            raise ModelLoadError(f"the weights in {key.name!r} lack {len(missing)} tensors, first {missing[0]!r}")
    except LatentError:
        raise
    except Exception as error:  # the one place where loading errors, of whatever kind, become ours
        raise ModelLoadError(f"{key.name!r} can't be loaded as a causal language model: {error}") from error
    weights, sketch = digests(folder)
    return ResidentModel(model.eval(), tokenizer, key.name, weights, sketch=sketch, probe=probe)


def _folder_of(key: ModelKey) -> Path:
    """The local folder of a model: the name itself, or the snapshot of a hub id (fetched if the hub is reachable)."""
    folder = Path(key.name)
    if key.name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(
                f"the folder {key.name!r} holds no config.json; pass a folder made by save_pretrained()"
            )
        return folder
    if key.name.startswith((".", "/", "~")) or key.name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {key.name!r}; check the path, or pass a hub id (owner/name)")
    try:
        config = cached_file(key.name, "config.json", revision=key.revision)
    except Exception as error:
        raise ModelLoadError(
            f"{key.name!r} is neither a local folder nor a model on the hub or in its cache. Check the spelling, pass "
            f"a folder, or download it first with `hf download`. ({error})"
        ) from error
    return Path(str(config)).parent


def _default_device() -> str:
    if torch.cuda.is_available():
        return "auto" if torch.cuda.device_count() > 1 else "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _default_dtype(device: str) -> str:
    """The checkpoint's own dtype on an accelerator; float32 on a CPU, where narrower types are slower."""
    return "float32" if device == "cpu" else "auto"
