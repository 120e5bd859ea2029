"""What is done with events: counted, kept, written as JSON lines. Nothing depends on the tracer but the workspace."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import warnings
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from langgraph_latent import public
from langgraph_latent.checks import check_whole_number
from langgraph_latent.disk_cache import home_expanded
from langgraph_latent.errors import ConfigError
from langgraph_latent.events import Decoded, Event, Prefilled, Routed


class TraceSummary(NamedTuple):
    """Totals over every event so far, also those no longer kept."""

    events: dict[str, int]
    routes: dict[str, int]
    tokens_prefilled: int
    tokens_decoded: int
    tokens_reused: int
    prefill_s: float
    decode_s: float


def _opened(path: Path) -> int:
    """A trace file to append to, made where it is not there; a special file is not waited for."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o600)


def _wait_for_other_writers(file: int) -> None:
    """A line that another process has written by half is not a torn one. Ends as the file is closed."""
    with contextlib.suppress(ImportError, OSError):  # no such locks on this system, or on this file
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


@public
class LatentTracer:
    """Keeps the last `keep` events in memory and, with a path, appends each as one JSON line. Safe in threads.

    Several processes may write one file, which its owner alone can read. What can't be written later on (a full disk, a
    removed folder) is warned of once and ends no call. With `checksums=True` every produced cache is read once more to
    record its SHA-256; slow, for debugging. Raises `ConfigError` for a file that can't be written.
    """

    def __init__(self, path: str | Path | None = None, *, keep: int = 10_000, checksums: bool = False) -> None:
        check_whole_number("keep", keep)
        self.path = home_expanded(path).absolute() if path is not None else None  # whatever becomes of the cwd
        self.checksums = checksums
        self._has_warned = False
        if self.path is not None:
            try:
                os.close(_opened(self.path))
            except (OSError, ValueError) as error:
                raise ConfigError(f"the trace file {str(self.path)!r} can't be written: {error}") from error
        self._events: deque[Event] = deque(maxlen=keep)
        self._counts: Counter[str] = Counter()
        self._routes: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._seconds: dict[str, float] = {"prefill": 0.0, "decode": 0.0}
        self._lock = threading.RLock()

    @property
    def events(self) -> tuple[Event, ...]:
        """The kept events, oldest first."""
        with self._lock:
            return tuple(self._events)

    def emit(self, event: Event) -> None:
        """Take note of an event."""
        line = json.dumps(event.to_dict()) + "\n" if self.path is not None else ""
        with self._lock:
            self._events.append(event)
            self._count(event)
            if self.path is not None:
                self._write(self.path, line)

    def _write(self, path: Path, line: str) -> None:
        """Append a line, all of it in one go; after one that was cut off, on a line of its own."""
        try:
            file = _opened(path)
            try:
                _wait_for_other_writers(file)
                size = os.fstat(file).st_size
                is_torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
                whole = ("\n" * is_torn + line).encode("utf-8", "backslashreplace")
                if os.write(file, whole) < len(whole):
                    raise OSError("the line was written in part")
            finally:
                os.close(file)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"events are not written to {str(path)!r}: {error}; they are kept in memory", stacklevel=2
                )

    def summary(self) -> TraceSummary:
        """Totals so far."""
        with self._lock:
            return TraceSummary(
                dict(self._counts),
                dict(self._routes),
                self._totals["prefilled"],
                self._totals["decoded"],
                self._totals["reused"],
                self._seconds["prefill"],
                self._seconds["decode"],
            )

    def _count(self, event: Event) -> None:
        self._counts[type(event).__name__.lower()] += 1
        match event:
            case Prefilled():
                self._totals["prefilled"] += event.num_tokens
                self._totals["reused"] += event.cache_read
                self._seconds["prefill"] += event.duration_s
            case Decoded():
                self._totals["decoded"] += event.num_tokens
                self._seconds["decode"] += event.duration_s
            case Routed():
                self._routes[event.route] += 1
