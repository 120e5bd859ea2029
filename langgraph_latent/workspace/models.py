"""The models that one workspace uses: who uses which, what is known of their specs, how fast they are.

It knows specs and resident models; not handles and not caches.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable

from langgraph_latent.engine import loader
from langgraph_latent.engine.loader import ModelKey
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ClosedError
from langgraph_latent.events import Event, Loaded
from langgraph_latent.router.rates import RateMeter, Rates
from langgraph_latent.spec.compat import Compatibility, compare
from langgraph_latent.spec.spec import ModelSpec


class ModelsInUse:
    """Counts the users of each model, loads with the first and gives back with the last. Safe in threads."""

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self._models: dict[ModelKey, ResidentModel] = {}
        self._users: Counter[ModelKey] = Counter()
        self._specs: dict[str, ModelSpec] = {}
        self._compared: dict[tuple[str, str], Compatibility] = {}
        self._twins: set[str] = set()  # weights that were loaded here more than once, maybe on several devices
        self._meters: weakref.WeakKeyDictionary[ResidentModel, RateMeter] = weakref.WeakKeyDictionary()
        self._lock = threading.RLock()
        self._is_closed = False
        self._held: list[ModelKey] = []
        self._give_back = weakref.finalize(self, _release_all, self._held)
        self._give_back.atexit = False

    def __len__(self) -> int:
        return len(self._models)

    def use(self, key: ModelKey, *, probe: bool) -> None:
        """Note one more user of a model and make it resident. Raises `ClosedError` and `ModelLoadError`."""
        begin = time.perf_counter()
        self.check_open()
        model = loader.acquire(key, probe=probe)
        with self._lock:
            is_new = not self._is_closed and key not in self._models
            if is_new:
                self._models[key] = model
                self._held.append(key)
                self._note_loaded(model, time.perf_counter() - begin)
            self._users[key] += 1
        if not is_new:
            loader.release(key)
        self.check_open()

    def _note_loaded(self, model: ResidentModel, seconds: float) -> None:
        if any(spec.weights == model.spec.weights for spec in self._specs.values()):
            self._twins.add(model.spec.weights)
        spec = self.note(model)
        self._meters.setdefault(model, RateMeter())
        device = str(model.device)
        self._emit(Loaded(model=spec.identity, name=spec.name, duration_s=seconds, device=device, dtype=spec.dtype))

    def get(self, key: ModelKey) -> ResidentModel:
        """A model that `use` made resident. Raises `ClosedError` when the workspace was closed since."""
        if (model := self._models.get(key)) is None:
            raise _closed()
        return model

    def leave(self, key: ModelKey) -> None:
        """Undo one `use`; the last user frees the weights, unless another workspace uses them."""
        with self._lock:
            if key not in self._models:
                return
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key], self._models[key]
                self._held.remove(key)
                loader.release(key)

    def close(self) -> None:
        """Give every model back. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            self._give_back()
            self._models.clear()
            self._users.clear()

    def check_open(self) -> None:
        """Raise `ClosedError` where the workspace was closed."""
        if self._is_closed:
            raise _closed()

    def note(self, model: ResidentModel) -> ModelSpec:
        """A model's spec with the adapters that are active now, known from now on by its identity."""
        spec = model.spec
        self._specs.setdefault(spec.identity, spec)
        return spec

    def spec(self, identity: str) -> ModelSpec | None:
        """The spec with an identity; None where no such model was seen here."""
        return self._specs.get(identity)

    def find(self, identity: str) -> ResidentModel | None:
        """A model in use with an identity."""
        return next((model for model in self._models.values() if model.spec.identity == identity), None)

    def compatibility(self, sender: ModelSpec, receiver: ModelSpec) -> Compatibility:
        """`compare`, once for each pair of models."""
        pair = (sender.identity, receiver.identity)
        if pair not in self._compared:
            self._compared[pair] = compare(sender, receiver)
        return self._compared[pair]

    def has_twins(self, spec: ModelSpec) -> bool:
        """Whether these weights were loaded more than once, so that a cache of theirs may be on another device."""
        return spec.weights in self._twins

    def rates(self, model: ResidentModel) -> Rates:
        """What was measured of a model in this workspace."""
        meter = self._meters.get(model)
        return meter.rates if meter else Rates()

    def note_prefill(self, model: ResidentModel, num_tokens: int, seconds: float) -> None:
        """Take note of how long a prefill took."""
        if meter := self._meters.get(model):
            meter.add_prefill(num_tokens, seconds)

    def note_move(self, model: ResidentModel, nbytes: int, seconds: float) -> None:
        """Take note of how long it took to move a cache to the model's device."""
        if meter := self._meters.get(model):
            meter.add_move(nbytes, seconds)


def _release_all(keys: list[ModelKey]) -> None:
    """Give models back, once: at the end, or when whoever used them is garbage-collected."""
    while keys:
        loader.release(keys.pop())


def _closed() -> ClosedError:
    return ClosedError("this workspace was closed; make a new LatentWorkspace()")
