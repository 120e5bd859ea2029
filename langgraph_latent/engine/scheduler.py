"""Which requests share the next model call. It knows token ids, tails and clocks; not what an answer is.

There is no loop of its own: every request brings a thread and blocks in `RequestSlot.feed` until its logits are there.
Whoever finds the model idle starts the next call for everyone who waits, oldest request first. So requests join and
leave between any two tokens, and one whose reader has stopped reading holds nobody up.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import NamedTuple

import torch

from langgraph_latent.engine import cpu_thread
from langgraph_latent.engine.limits import Limits
from langgraph_latent.errors import ConfigError, QueueFullError
from langgraph_latent.kv.state import KVTail

MAX_BATCH = 16
"""Requests in one model call."""
PATIENCE_RATIO = 0.25
"""How long a call waits for requests that have just got a token, as a part of the last call's time."""
ALONE_CHUNK_TOKENS, SHARED_CHUNK_TOKENS = 2048, 128
"""Tokens of a prompt in one call, for a request alone on the model and beside others, who wait as long for a token."""
RETRY_S = 1.0
"""How long a request waits for room in the queue, per retry."""
RESTART_S = 0.1
"""After how long a call that was started and has not begun is started again; a second start does nothing."""


class NewTokens(NamedTuple):
    """New tokens of one sequence, and the tail that they are appended to."""

    ids: Sequence[int]
    tail: KVTail


class Scheduler:
    """Batches the new tokens of concurrent requests on one model. Safe in threads.

    Args:
        run: one model call on a packed batch; logits after the last token of each sequence, (sequences, vocab).
        max_batch: sequences in one call; 1 where the model can't take more.
        start: has work done where model calls run: in the compute thread, or at once.

    Attributes:
        patience_s: how long the next call waits for requests that have just got a token.
    """

    def __init__(
        self,
        run: Callable[[Sequence[NewTokens]], torch.Tensor],
        max_batch: int = MAX_BATCH,
        start: Callable[[Callable[[], None]], object] = cpu_thread.submit,
    ) -> None:
        self.max_batch = max_batch
        self._run = run
        self._start = start
        self._begin()
        _schedulers.add(self)

    def _begin(self) -> None:
        """With nothing under way; in a forked process again, which has none of its parent's threads."""
        self._lock = threading.RLock()  # taken by itself: an interrupt can come within `with condition`
        self._changed = threading.Condition(self._lock)
        self._slots: list[RequestSlot] = []
        self._waiting: list[_Step] = []
        self._running: list[_Step] = []
        self._began_at = 0.0
        self._started_at = -math.inf
        self.patience_s = 0.0

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._slots)

    def slot(self, limits: Limits | None = None) -> RequestSlot:
        """A slot for one request, to be closed. Raises `QueueFullError` where too many are under way for its limits."""
        slot = RequestSlot(self, limits or Limits())
        deadline = time.monotonic() + slot.limits.max_retries * RETRY_S
        with self._lock:
            while not self._has_room(slot):
                slot.limits.check()
                seconds_left = deadline - time.monotonic()
                if seconds_left <= 0:
                    raise QueueFullError(
                        f"{len(self._slots)} requests are under way on this model and max_queue is "
                        f"{slot.limits.max_queue}; ask again later, or raise max_queue"
                    )
                self._changed.wait(min(seconds_left, slot.limits.pause_s))
            self._slots.append(slot)
            return slot

    def _has_room(self, slot: RequestSlot) -> bool:
        return slot.limits.max_queue is None or len(self._slots) < slot.limits.max_queue

    def leave(self, slot: RequestSlot) -> None:
        """End a slot; nobody waits for it any more."""
        with self._lock:
            if slot in self._slots:
                self._slots.remove(slot)
                self._changed.notify_all()

    def feed(self, step: _Step) -> torch.Tensor:
        """Wait until a step is done, starting model calls while the model is idle; its logits, (vocab,).

        Whoever is interrupted, or has no time left, leaves at once, also within a call: that ends without it.
        """
        if cpu_thread.is_here():
            raise ConfigError(
                "a chat model was asked from within a model call (by a forward hook); ask it before or after the call, "
                "or from a logits processor"
            )
        try:
            with self._lock:
                self._waiting.append(step)
                self._changed.notify_all()
            while self._has_to_start(step):
                self._start(self._run_next)
            return step.result()
        except BaseException:
            self._withdraw(step)
            raise

    def _has_to_start(self, step: _Step) -> bool:
        """Wait until it is the caller's turn to start the next call; False when its step is done."""
        with self._lock:
            while not step.is_done:
                pause = self._pause()
                if pause <= 0:
                    self._started_at = time.monotonic()
                    return True
                step.slot.limits.check()
                self._changed.wait(min(pause, step.slot.limits.pause_s))
            return False

    def _pause(self) -> float:
        """Seconds until the next call can be started: none runs, and those that have just got a token were waited for.

        One that was started and does not begin is started again: who started it may have been interrupted.
        """
        if self._running:
            return math.inf
        now = time.monotonic()
        is_full = len(self._waiting) >= self.max_batch
        here = {step.slot for step in self._waiting}
        ends = (slot.served_at + self.patience_s for slot in self._slots if slot.is_brisk and slot not in here)
        return max(self._started_at + RESTART_S, now if is_full else max(ends, default=0.0)) - now

    def _run_next(self) -> None:
        """One model call on the oldest steps that wait; none where a call is under way, or nobody waits.

        It begins and ends where nothing interrupts it.
        """
        if not self._take():
            return
        try:
            self._run_steps(self._running)
        finally:
            self._conclude()

    def _take(self) -> bool:
        """Begin a call on the oldest steps that wait; whether there is one to run."""
        with self._lock:
            self._started_at = -math.inf
            if self._running or not self._waiting:
                return False
            waiting = sorted(self._waiting, key=lambda each: each.slot.number)
            self._running, self._waiting = waiting[: self.max_batch], waiting[self.max_batch :]
            self._began_at = time.monotonic()
            return True

    def _conclude(self) -> None:
        """End the call that is under way, and keep nothing of it."""
        with self._lock:
            now = time.monotonic()
            self.patience_s = PATIENCE_RATIO * (now - self._began_at)
            while self._running:
                self._running.pop().conclude(now)
            self._changed.notify_all()

    def _withdraw(self, step: _Step) -> None:
        """Take a step back that no call has begun to run."""
        with self._lock:
            if step in self._waiting:
                self._waiting.remove(step)

    def _run_steps(self, steps: Sequence[_Step]) -> None:
        """Give each step its logits, or the error that its call raises alone too."""
        try:
            for step, logits in zip(steps, self._run([step.new for step in steps]), strict=True):
                step.outcome = logits
            return
        except BaseException as error:  # noqa: BLE001 - raised in the thread whose step it is
            for step in steps:
                step.new.tail.rewind(step.begin)
            if len(steps) == 1:
                steps[0].outcome = error
                return
        for step in steps:
            self._run_steps([step])


_schedulers: weakref.WeakSet[Scheduler] = weakref.WeakSet()


def _begin_again() -> None:
    for scheduler in _schedulers:
        scheduler._begin()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


class RequestSlot:
    """One request's place among those under way, and its way to the model, as a context manager.

    Attributes:
        served_at: when its last logits were there; for the scheduler.
        is_brisk: whether it came back at once after them; for the scheduler.
    """

    _numbers = itertools.count()

    def __init__(self, scheduler: Scheduler, limits: Limits) -> None:
        self.limits = limits
        self.number = next(self._numbers)
        self.served_at = -math.inf
        self.is_brisk = True
        self._scheduler = scheduler

    @property
    def chunk_tokens(self) -> int:
        """How many tokens to feed in one call."""
        return ALONE_CHUNK_TOKENS if self._scheduler.num_requests < 2 else SHARED_CHUNK_TOKENS

    def feed(self, ids: Sequence[int], tail: KVTail) -> torch.Tensor:
        """Append `ids` to a tail; the logits after them, (vocab,). Raises what the call and the limits raise."""
        self.limits.check()
        self.is_brisk = time.monotonic() - self.served_at <= self._scheduler.patience_s
        return self._scheduler.feed(_Step(self, NewTokens(ids, tail)))

    def close(self) -> None:
        self._scheduler.leave(self)

    def __enter__(self) -> RequestSlot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Step:
    """New tokens that wait for their model call; then its logits, or why there are none."""

    __slots__ = ("slot", "new", "begin", "outcome", "is_done")

    def __init__(self, slot: RequestSlot, new: NewTokens) -> None:
        self.slot = slot
        self.new = new
        self.begin = new.tail.num_tokens
        self.outcome: torch.Tensor | BaseException | None = None
        self.is_done = False

    def conclude(self, now: float) -> None:
        """Note that its call has ended, at a time of the monotonic clock."""
        self.slot.served_at = now
        self.is_done = True

    def result(self) -> torch.Tensor:
        """The outcome, once. An error's traceback leads back to its step: whoever keeps it must keep no cache."""
        outcome, self.outcome = self.outcome, None
        try:
            if isinstance(outcome, BaseException):
                traceback.clear_frames(outcome.__traceback__)
                raise outcome
            assert outcome is not None
            return outcome
        finally:
            del outcome
