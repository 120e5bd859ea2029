"""The right to write to a buffer. It knows whether a model call writes now, and whether its owner has left."""

from __future__ import annotations

import threading
from types import TracebackType

from langgraph_latent.errors import RequestCancelledError
from langgraph_latent.kv.buffer import KVBuffer


class Claim:
    """A claimed buffer, and as a context manager one model call that writes to it. Safe in threads.

    Its owner may leave while a call is under way: the buffer is then free when the call has ended, and not before.

    Attributes:
        buffer: what is written to; claimed by whoever makes this.
        is_given_back: whether its owner has left; nothing that is written from then on is of use.
    """

    def __init__(self, buffer: KVBuffer) -> None:
        self.buffer = buffer
        self.is_given_back = False
        self._is_writing = False
        self._lock = threading.RLock()  # a stream that is garbage-collected here gives its own claim back

    @property
    def is_writing(self) -> bool:
        """Whether a model call is under way."""
        return self._is_writing

    def check(self) -> None:
        """Raise `RequestCancelledError` where the claim was given back."""
        if self.is_given_back:
            raise RequestCancelledError("whoever asked has gone")

    def give_back(self) -> None:
        """End the claim, now or with the call that is under way. Twice is fine."""
        with self._lock:
            if self.is_given_back:
                return
            self.is_given_back = True
            if not self._is_writing:
                self.buffer.release()

    def __enter__(self) -> Claim:
        with self._lock:
            self.check()
            self._is_writing = True
            return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_writing = False
            if self.is_given_back:
                self.buffer.release()
