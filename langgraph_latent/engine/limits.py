"""What a request puts up with: how long a queue, how many seconds, and whether its caller is still there."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass, field, replace

from langgraph_latent.checks import as_number, check_whole_number, is_number, is_whole_number
from langgraph_latent.errors import ConfigError, RequestCancelledError, RequestTimeoutError

POLL_S = 0.1
"""How often a request that waits looks whether its caller has gone."""


@dataclass(frozen=True)
class Limits:
    """What a request puts up with, from now on. Raises `ConfigError` for impossible values.

    Attributes:
        max_queue: requests under way before it; None for any number.
        max_retries: how many seconds it waits for one of them to end.
        timeout: seconds until it must be done, in all.
        cancelled: set when its caller has gone.
    """

    max_queue: int | None = None
    max_retries: int = 0
    timeout: float | None = None
    cancelled: threading.Event | None = None
    began_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_retries", "timeout"):
            object.__setattr__(self, name, as_number(getattr(self, name)))
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

    @property
    def pause_s(self) -> float:
        """Seconds to wait, at most, before `check` is asked again."""
        longest = threading.TIMEOUT_MAX if self.cancelled is None else POLL_S
        return max(0.0, min(longest, self.seconds_left))

    def check(self) -> None:
        """Raise `RequestTimeoutError` where the request's time is over, `RequestCancelledError` where nobody waits."""
        if self.is_cancelled:
            raise RequestCancelledError("whoever asked has gone")
        if self.seconds_left <= 0:
            raise RequestTimeoutError(
                f"the request was not done after {self.timeout} s; raise `timeout`, ask for fewer tokens, or run fewer "
                "requests at a time"
            )

    def of_a_part(self) -> Limits:
        """Those of a part of the request, which has its place in the queue already."""
        return replace(self, max_queue=None, max_retries=0)


NO_LIMITS = Limits()
"""Of work that nobody can end."""
