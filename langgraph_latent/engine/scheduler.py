"""Which requests share the next model call. It knows token ids, tails and clocks; not what an answer is.

There is no thread of its own: every request brings one and blocks in `RequestSlot.feed` until its logits are there.
Whoever finds the model idle runs the next call for everyone who waits, oldest request first. So requests join and leave
between any two tokens, and one whose reader has stopped reading holds nobody up.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import torch

from langgraph_latent.checks import check_whole_number, is_number, is_whole_number
from langgraph_latent.errors import ConfigError, QueueFullError, RequestCancelledError, RequestTimeoutError
from langgraph_latent.kv.state import KVTail

MAX_BATCH = 16
"""Requests in one model call."""
PATIENCE_RATIO = 0.25
"""How long a call waits for requests that have just got a token, as a part of the last call's time."""
ALONE_CHUNK_TOKENS, SHARED_CHUNK_TOKENS = 2048, 128
"""Tokens of a prompt in one call, for a request alone on the model and beside others, who wait as long for a token."""
RETRY_S = 1.0
"""How long a request waits for room in the queue, per retry."""
POLL_S = 0.1
"""How often a request that waits looks whether its caller has gone."""


@dataclass(frozen=True)
class Limits:
    """What a request puts up with, from now on. Raises `ConfigError` for impossible values.

    Attributes:
        max_queue: requests under way before it; None for any number.
        max_retries: how many times it waits `RETRY_S` seconds for one of them to end.
        timeout: seconds until it must be done, in all.
        cancelled: set when its caller has gone.
    """

    max_queue: int | None = None
    max_retries: int = 0
    timeout: float | None = None
    cancelled: threading.Event | None = None
    began_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.max_queue is not None and not is_whole_number(self.max_queue, 1):
            raise ConfigError(f"max_queue={self.max_queue!r} is impossible; it must be a whole number above 0, or None")
        check_whole_number("max_retries", self.max_retries)
        if self.timeout is not None and not (is_number(self.timeout) and self.timeout > 0):
            raise ConfigError(
                f"timeout={self.timeout!r} is impossible; it must be a number of seconds above 0, or None"
            )

    @property
    def seconds_left(self) -> float:
        return math.inf if self.timeout is None else self.began_at + self.timeout - time.monotonic()

    @property
    def is_cancelled(self) -> bool:
        return self.cancelled is not None and self.cancelled.is_set()


class NewTokens(NamedTuple):
    """New tokens of one sequence, and the tail that they are appended to."""

    ids: Sequence[int]
    tail: KVTail


class Scheduler:
    """Batches the new tokens of concurrent requests on one model. Safe in threads.

    Args:
        run: one model call on a packed batch; logits after the last token of each sequence, (sequences, vocab).
        max_batch: sequences in one call; 1 where the model can't take more.

    Attributes:
        patience_s: how long the next call waits for requests that have just got a token.
    """

    def __init__(self, run: Callable[[Sequence[NewTokens]], torch.Tensor], max_batch: int = MAX_BATCH) -> None:
        self.max_batch = max_batch
        self._run = run
        self._lock = threading.RLock()  # taken by itself: an interrupt can come within `with condition`
        self._changed = threading.Condition(self._lock)
        self._slots: list[RequestSlot] = []
        self._waiting: list[_Step] = []
        self._leader: _Step | None = None
        self._batch: list[_Step] = []
        self._began_at = 0.0
        self.patience_s = 0.0

    @property
    def num_requests(self) -> int:
        """Requests under way."""
        return len(self._slots)

    def slot(self, limits: Limits | None = None) -> RequestSlot:
        """A slot for one request, to be closed. Raises `QueueFullError` where too many are under way for its limits."""
        slot = RequestSlot(self, limits or Limits())
        max_wait_s = slot.limits.max_retries * RETRY_S
        with self._lock:
            if not self._changed.wait_for(
                lambda: self._has_room(slot), min(max_wait_s, slot.limits.seconds_left, threading.TIMEOUT_MAX)
            ):
                slot.check()
                raise QueueFullError(
                    f"{len(self._slots)} requests are under way on this model and max_queue is "
                    f"{slot.limits.max_queue}; ask again later, or raise max_queue"
                )
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
        """Wait until a step is done, leading model calls while the model is idle; its logits, (vocab,)."""
        try:
            with self._lock:
                self._waiting.append(step)
                self._changed.notify_all()
            while batch := self._next_batch(step):
                self._run_steps(batch)
                self._conclude(step)
        except BaseException:
            self._conclude(step)
            self._withdraw(step)
            raise
        return step.result()

    def _next_batch(self, step: _Step) -> list[_Step]:
        """The steps that the caller is to run next, as soon as it is its turn to lead; none when `step` is done."""
        with self._lock:
            while not step.is_done:
                pause = math.inf if self._leader else self._pause()
                if pause <= 0:
                    return self._lead(step)
                if step in self._waiting:
                    step.slot.check()
                    pause = min(pause, step.slot.limits.seconds_left)
                    if step.slot.limits.cancelled is not None:
                        pause = min(pause, POLL_S)
                self._changed.wait(min(pause, threading.TIMEOUT_MAX))
            return []

    def _pause(self) -> float:
        """Seconds that the next call should still wait for requests that have just got a token."""
        if len(self._waiting) >= self.max_batch:
            return 0
        here = {step.slot for step in self._waiting}
        ends = (slot.served_at + self.patience_s for slot in self._slots if slot.is_brisk and slot not in here)
        return max(ends, default=0) - time.monotonic()

    def _lead(self, step: _Step) -> list[_Step]:
        """Make a step's thread the leader of the next call; the oldest steps, which it is to run."""
        waiting = sorted(self._waiting, key=lambda each: each.slot.number)
        self._batch, self._began_at = waiting[: self.max_batch], time.monotonic()
        self._leader = step
        self._waiting = waiting[self.max_batch :]
        return self._batch

    def _conclude(self, step: _Step) -> None:
        """End the call that a step's thread leads, if any, however it went."""
        with self._lock:
            if self._leader is not step:
                return
            now = time.monotonic()
            self.patience_s = PATIENCE_RATIO * (now - self._began_at)
            for each in self._batch:
                each.slot.served_at = now
                each.is_done = each.outcome is not None
                if not each.is_done:  # this thread was interrupted: somebody else runs it
                    each.new.tail.rewind(each.begin)
                    if each not in self._waiting:
                        self._waiting.append(each)
            self._batch, self._leader = [], None
            self._changed.notify_all()

    def _withdraw(self, step: _Step) -> None:
        """Take a step back. One that somebody else is running comes to its end first: it writes to the tail."""
        with self._lock:
            self._changed.wait_for(lambda: step not in self._batch)
            if step in self._waiting:
                self._waiting.remove(step)

    def _run_steps(self, steps: Sequence[_Step]) -> None:
        """Give each step its logits, or the error that its call raises alone too."""
        try:
            for step, logits in zip(steps, self._run([step.new for step in steps]), strict=True):
                step.outcome = logits
            return
        except Exception as error:  # noqa: BLE001 - raised in the thread whose step it is
            for step in steps:
                step.new.tail.rewind(step.begin)
            if len(steps) == 1:
                steps[0].outcome = error
                return
        for step in steps:
            self._run_steps([step])


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

    def check(self) -> None:
        """Raise `RequestTimeoutError` where the request's time is over, `RequestCancelledError` where nobody waits."""
        if self.limits.is_cancelled:
            raise RequestCancelledError("whoever asked has gone")
        if self.limits.seconds_left <= 0:
            raise RequestTimeoutError(
                f"the request was not done after {self.limits.timeout} s, with {self._scheduler.num_requests} under way"
                " on this model; raise `timeout`, ask for fewer tokens, or run fewer requests at a time"
            )

    def feed(self, ids: Sequence[int], tail: KVTail) -> torch.Tensor:
        """Append `ids` to a tail; the logits after them, (vocab,). Raises what the call and what `check` raise."""
        self.check()
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
        self.outcome: torch.Tensor | Exception | None = None
        self.is_done = False

    def result(self) -> torch.Tensor:
        """The outcome, once: an error's traceback leads back to its step and would keep the tail alive."""
        outcome, self.outcome = self.outcome, None
        try:
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome is not None
            return outcome
        finally:
            del outcome
