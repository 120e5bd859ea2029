"""The tensors of a handle: found in the pool, moved to the receiver, composed or computed again.

It knows handles, states, one model at a time and where states are kept; not routes and not messages.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from langgraph_latent.engine.limits import Limits
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import HandleError, ModelMismatchError, UnsupportedLayerError
from langgraph_latent.events import Composed, Moved, Rebuilt
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.segment import Composition, LatentSteps, handles_in
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens
from langgraph_latent.kv.state import KVState
from langgraph_latent.router.choice import facts_of
from langgraph_latent.router.rates import Cost
from langgraph_latent.spec.spec import ModelSpec
from langgraph_latent.workspace.assemble import Assembled, append_blocks, append_latent_steps, biases_of
from langgraph_latent.workspace.keeper import CacheKeeper
from langgraph_latent.workspace.models import ModelsInUse
from langgraph_latent.workspace.request import NOBODY, Caller


class Availability(NamedTuple):
    """How many of a handle's tokens need not be computed, and the bytes of these that a receiver would have to move.

    `num_unproven` counts those of which the tensors came from outside with this handle and are not proven.
    """

    num_tokens: int
    move_bytes: int = 0
    num_unproven: int = 0


class Materializer:
    """Gives the state of a handle where a model is, whatever became of its tensors."""

    def __init__(self, keeper: CacheKeeper, models: ModelsInUse) -> None:
        self._keeper = keeper
        self._models = models
        self._lock = threading.Lock()
        self._composing: dict[tuple[str, bytes], threading.RLock] = {}

    def state_of(self, handle: KVHandle, receiver: ResidentModel, caller: Caller = NOBODY) -> KVState:
        """A handle's state, the pending token's included.

        Raises `ModelMismatchError` for a handle of another model, and `HandleError`.
        """
        self._check_for(handle, receiver)
        return self._state(handle, handle.num_tokens, receiver, caller)

    def whole_state_of(self, handle: KVHandle, receiver: ResidentModel, caller: Caller) -> KVState:
        """The same with every token in every layer, also those that the windows of an ingested cache have left."""
        self._check_for(handle, receiver)
        return self._whole_state(handle, receiver, caller)

    def availability(self, handle: KVHandle, spec: ModelSpec, receiver: ResidentModel | None) -> Availability:
        """What of a handle is in the pool, for a receiver of this spec; None where it is not in memory.

        Of a cache that is still to be composed, these are the tokens of blocks in the pool that need no repair.
        """
        if self._keeper.is_proven(handle) and not self._models.has_twins(spec):  # usual: needs no search
            return Availability(handle.num_tokens - handle.num_pending)
        unproven = self._keeper.find_unproven(handle, handle.tokens, handle.num_tokens)
        num_unproven = unproven.num_tokens if unproven else 0
        found = self._keeper.find(handle, handle.tokens, handle.num_tokens)
        if found is None or found.num_tokens < handle.num_composed:
            return Availability(self._num_at_hand(handle), num_unproven=num_unproven)
        return Availability(found.num_tokens, self.bytes_elsewhere(found, receiver) if receiver else 0, num_unproven)

    def _num_at_hand(self, handle: KVHandle) -> int:
        """How many of a handle's tokens would not be computed if it were composed now."""
        found = self._keeper.find(handle.first(0), handle.tokens, handle.num_plain)
        num_tokens = found.num_tokens if found else 0
        for segment in handle.segments:
            if isinstance(provenance := segment.provenance, Composition):
                blocks = provenance.blocks
                at_hand = sum(block.num_tokens for block in blocks if self._keeper.pool.has(block.handle.id))
                num_tokens += int(at_hand * (1 - provenance.repair.ratio)) if provenance.repair else at_hand
        return num_tokens

    def longest_state(
        self, handle: KVHandle, tokens: bytes, limit: int, receiver: ResidentModel, caller: Caller
    ) -> KVState | None:
        """The state that covers most of the first `limit` packed `tokens`, which continue a handle.

        What is composed in it is made where it is not in the pool; what is plain is not.
        """
        num_composed = min(handle.num_composed, limit)
        found = self._found(handle, tokens, limit, caller)
        if (found and found.num_tokens >= num_composed) or not num_composed:
            return found
        key = (handle.provenance_digest, handle.tokens[: handle.num_composed * TOKEN_BYTES])
        with self._lock:
            composing = self._composing.setdefault(key, threading.RLock())
        with _holding(composing, caller.limits):  # branches that need the same cache make it once
            found = self._found(handle, tokens, limit, caller)
            if found and found.num_tokens >= num_composed:
                return found
            made = self._composed(handle, receiver, caller)
            self._composing.pop(key, None)
        return made.crop(limit) if limit < made.num_tokens else made

    def _found(self, handle: KVHandle, tokens: bytes, limit: int, caller: Caller) -> KVState | None:
        """The kept state that covers most; one that is not proven only where the caller takes it and it covers more."""
        found = self._keeper.find(handle, tokens, limit)
        unproven = self._keeper.find_unproven(handle, tokens, limit) if caller.takes_unproven else None
        if unproven is None or (found is not None and found.num_tokens >= unproven.num_tokens):
            return found
        return unproven

    def bytes_elsewhere(self, state: KVState, receiver: ResidentModel) -> int:
        """Bytes of a kept state that are on other devices than the receiver's."""
        return state.bytes_elsewhere(receiver.devices) if self._models.has_twins(receiver.spec) else 0

    def move(self, state: KVState, receiver: ResidentModel, caller: Caller) -> tuple[KVState, Cost | None]:
        """The state where the receiver is, and what that took; None where it is there already."""
        if not (nbytes := state.bytes_elsewhere(receiver.devices)):
            return state, None
        begin = time.perf_counter()
        state = state.to(receiver.devices)
        for tensor in {tensor.device: tensor for layer in state.layers() for tensor in layer}.values():
            tensor[..., :1].cpu()  # waits for the device
        seconds = time.perf_counter() - begin
        self._models.note_move(receiver, nbytes, seconds)
        self._keeper.emit(
            Moved(
                call_site=caller.call_site,
                model=receiver.spec.identity,
                num_tokens=state.num_tokens,
                nbytes=nbytes,
                duration_s=seconds,
                device=str(receiver.device),
            )
        )
        return state, Cost(0, seconds, nbytes)

    def _check_for(self, handle: KVHandle, receiver: ResidentModel) -> None:
        """Raise `HandleError` where a handle is not sound, or not of the receiver's model."""
        self._keeper.check(handle)
        if handle.model != receiver.spec.identity:
            raise ModelMismatchError(
                f"handle {handle.id} belongs to model {handle.model}, not to {receiver.spec.name!r} "
                f"({receiver.spec.identity}); pass it to a chat model of the same weights"
            )
        receiver.check_vocabulary(handle)
        if not handle.tokens:
            raise HandleError("a handle of no tokens has no cache; read something first")

    def _state(self, handle: KVHandle, num_tokens: int, receiver: ResidentModel, caller: Caller) -> KVState:
        """The state of a handle's first `num_tokens` tokens where the receiver is, what is missing computed."""
        found = self.longest_state(handle, handle.tokens, num_tokens, receiver, caller)
        state, _ = self.move(found or receiver.empty_state(), receiver, caller)
        missing = handle.tokens[state.num_tokens * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
        if len(missing) // TOKEN_BYTES > handle.num_pending:
            self._report_rebuilt(handle, missing, "not in the pool")
        return _prefilled(state, missing, receiver, caller.limits)

    def _whole_state(self, handle: KVHandle, receiver: ResidentModel, caller: Caller) -> KVState:
        """The state of a handle with every token in every layer, as moving needs it.

        An ingested one may lack tokens that its windows have left; it is computed again.
        """
        state = self._state(handle, handle.num_tokens, receiver, caller)
        return state if state.has_tokens_from(0) else self._rebuilt_whole(handle, receiver, caller)

    def _rebuilt_whole(self, handle: KVHandle, receiver: ResidentModel, caller: Caller) -> KVState:
        made = self._composed(handle, receiver, caller) if handle.num_composed else receiver.empty_state()
        missing = handle.tokens[made.num_tokens * TOKEN_BYTES :]
        self._report_rebuilt(handle, missing, "past its windows")
        return _prefilled(made, missing, receiver, caller.limits)

    def _report_rebuilt(self, handle: KVHandle, missing: bytes, reason: str) -> None:
        num_tokens = len(missing) // TOKEN_BYTES
        self._keeper.emit(Rebuilt(handle=handle.id, model=handle.model, num_tokens=num_tokens, reason=reason))

    def _composed(self, handle: KVHandle, receiver: ResidentModel, caller: Caller) -> KVState:
        """The state up to the last of a handle's segments that was not read in its place, kept for others.

        It has every token in every layer that keeps one for each.
        """
        if refusal := facts_of(handle, receiver.spec).move_refusal:
            raise UnsupportedLayerError(f"the caches of {receiver.spec.name!r} can't be composed: {refusal}; re-read")
        receiver.check_length(handle.num_composed)
        begin = time.perf_counter()
        number = max(index for index, segment in enumerate(handle.segments) if segment.provenance)
        made_handle = handle.first(number + 1)
        made = self._add_last_segment(made_handle, handle.first(number), receiver, caller)
        state = made.state.with_biases(biases_of(made_handle, receiver))
        segment = made_handle.segments[-1]
        self._keeper.emit(
            Composed.of(
                made_handle,
                caller.call_site,
                num_tokens=segment.num_tokens,
                nbytes=state.nbytes,
                duration_s=time.perf_counter() - begin,
                kind=segment.kind,
                num_repaired=made.num_repaired,
            )
        )
        self._keeper.restore(made_handle, state, caller.call_site)
        return state

    def _add_last_segment(
        self, handle: KVHandle, before: KVHandle, receiver: ResidentModel, caller: Caller
    ) -> Assembled:
        """The state of a handle whose last segment has a provenance; `before` is the handle without that segment."""
        provenance = handle.segments[-1].provenance
        if isinstance(provenance, LatentSteps):
            if not before.tokens:
                raise HandleError(f"handle {handle.id} has latent steps after nothing; read something first")
            start = self._start(before, before.num_tokens - 1, receiver, caller)
            return append_latent_steps(provenance, unpack_tokens(before.tokens)[-1], start, receiver, caller.limits)
        assert isinstance(provenance, Composition)
        start = self._start(before, before.num_tokens, receiver, caller)
        ids = unpack_tokens(handle.tokens[before.num_tokens * TOKEN_BYTES :])
        sources: Mapping[str, KVState] = {
            each.id: self._whole_state(each, receiver, caller) for each in handles_in(provenance)
        }
        return append_blocks(provenance, ids, start, receiver, sources, caller.limits)

    def _start(self, handle: KVHandle, num_tokens: int, receiver: ResidentModel, caller: Caller) -> KVState:
        """The state of a handle's first tokens, of which the windows of an ingested one have left none behind."""
        state = self._state(handle, num_tokens, receiver, caller)
        if state.has_tokens_from(0) or not all(kind.has_tokens for kind in state.kinds):
            return state
        return self._rebuilt_whole(handle, receiver, caller).crop(num_tokens)


@contextlib.contextmanager
def _holding(lock: threading.RLock, limits: Limits) -> Iterator[None]:
    """Hold a lock; whoever waits for it leaves when its limits say so."""
    while not lock.acquire(timeout=limits.pause_s):
        limits.check()
    try:
        yield
    finally:
        lock.release()


def _prefilled(state: KVState, missing: bytes, receiver: ResidentModel, limits: Limits) -> KVState:
    """A state with packed tokens appended."""
    if not missing:
        return state
    ids = unpack_tokens(missing)
    with receiver.scheduler.slot(limits.of_a_part()) as slot, state.append(state.num_tokens + len(ids)) as tail:
        receiver.prefill(ids, tail, slot)
        return tail.seal()
