"""Models by name: found, loaded once per process, counted and given back. It knows no caches and no requests.

A model is loaded in a thread of its own, beside the requests on others; only its calls, as all calls on a CPU, run in
the compute thread.
"""

from __future__ import annotations

import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import cached_file

from langgraph_latent.disk_cache import home_expanded
from langgraph_latent.engine import cpu_thread
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, LatentError, ModelLoadError
from langgraph_latent.spec.digest import digests


class ModelKey(NamedTuple):
    """What two requests for one model agree on: folder or hub id, revision, dtype, device ("auto" where open)."""

    name: str
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"

    def canonical(self) -> ModelKey:
        """The one key of the same model: a folder's true name, and what is meant by "auto" and by other spellings."""
        folder = home_expanded(self.name)
        is_folder = bool(self.name) and folder.is_dir()
        device = _default_device() if self.device == "auto" else self.device
        return ModelKey(
            str(folder.resolve()) if is_folder else self.name,
            None if is_folder or self.revision == "main" else self.revision,
            _default_dtype(device) if self.dtype == "auto" else _dtype_name(self.dtype),
            device,
        )


def as_text(value: object) -> object:
    """A folder, dtype or device as the text that a `ModelKey` has for it; anything else as it is."""
    return str(value) if isinstance(value, Path | torch.dtype | torch.device) else value


class _Residents:
    """The models of the process and how many users each has.

    A user that is garbage-collected gives its models back wherever that happens, so it waits for no lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.reading = threading.Lock()
        self.models: dict[ModelKey, ResidentModel] = {}
        self.users: Counter[ModelKey] = Counter()
        self.loads: dict[ModelKey, Future[None]] = {}
        self.abandoned: deque[ModelKey] = deque()

    def join(self, key: ModelKey, probe: bool) -> Future[None] | None:
        """Count one more user; the load to wait for, which is begun here where nobody did."""
        with self.lock:
            self.users[key] += 1
            if key in self.models:
                return None
            if key not in self.loads:
                self.loads[key] = _in_own_thread(lambda: self._load(key, probe))
            return self.loads[key]

    def _load(self, key: ModelKey, probe: bool) -> None:
        try:
            model = _load(key, probe)
        except BaseException:
            with self.lock:
                del self.loads[key]
            raise
        with self.lock:
            del self.loads[key]
            if self.users[key]:  # whoever asked for it may have gone
                self.models[key] = model

    def leave(self, key: ModelKey) -> None:
        self.abandoned.append(key)
        self.sweep()

    def sweep(self) -> None:
        """Uncount who has left. Where another holds the lock, or this thread itself does, it is swept by them."""
        while self.abandoned and self.lock.acquire(blocking=False):
            gone: list[ResidentModel] = []  # freed when the lock is free
            try:
                while self.abandoned:
                    key = self.abandoned.popleft()
                    self.users[key] -= 1
                    if self.users[key] <= 0:
                        del self.users[key]
                        gone += [self.models.pop(key)] if key in self.models else []
            finally:
                self.lock.release()


_residents = _Residents()


def acquire(key: ModelKey, *, probe: bool = True) -> ResidentModel:
    """The one resident model for `key`, loaded on first use, and probed where `probe` is True.

    Every call needs a `release`. Parallel callers wait for one load. Raises `ModelLoadError` for a name or folder that
    holds no usable model.
    """
    if cpu_thread.is_here():
        raise ConfigError("a chat model was loaded from within a model call (by a forward hook); load it before")
    residents = _residents
    load = residents.join(key, probe)
    try:
        if load is not None:
            load.result()
        residents.sweep()
        return residents.models[key]
    except BaseException:
        residents.leave(key)
        raise


def release(key: ModelKey) -> None:
    """Give a model back; its weights are freed with the last user."""
    _residents.leave(key)


def num_resident() -> int:
    """How many models this process holds."""
    _residents.sweep()
    return len(_residents.models)


def _in_own_thread(work: Callable[[], None]) -> Future[None]:
    """`work` begun in a new thread, which ends with it: its OpenMP team must not outlive it."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="langgraph-latent-load", daemon=True).start()
    return future


def _begin_again() -> None:
    """In a forked process, which has no thread that loads: what is loaded stays, loads are begun anew."""
    _residents.lock, _residents.reading = threading.Lock(), threading.Lock()
    _residents.loads.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def _load(key: ModelKey, probe: bool) -> ResidentModel:
    folder = _folder_of(key)
    key = key.canonical()
    weights, sketch = digests(folder)

    def read() -> Any:
        with _residents.reading:  # transformers can't do it in two threads at once
            return AutoModelForCausalLM.from_pretrained(
                folder, dtype=key.dtype, device_map=key.device, use_safetensors=True, output_loading_info=True
            )

    # transformers sets the whole process's default dtype for a moment, which no model call on the CPU may meet
    is_default = key.dtype == _dtype_name(torch.get_default_dtype())
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model, report = read() if is_default else cpu_thread.run(read)
        if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
            raise ModelLoadError(f"the weights in {key.name!r} lack {len(missing)} tensors, first {missing[0]!r}")
    except LatentError:
        raise
    except Exception as error:  # the one place where loading errors, of whatever kind, become ours
        raise ModelLoadError(f"{key.name!r} can't be loaded as a causal language model: {error}") from error
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


def _dtype_name(dtype: str | torch.dtype) -> str:
    """The one name of a dtype that torch knows by several ("torch.float32", "float"); of another, the name itself."""
    known = getattr(torch, str(dtype).removeprefix("torch."), None)
    return str(known).removeprefix("torch.") if isinstance(known, torch.dtype) else str(dtype)
