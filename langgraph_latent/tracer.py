"""What is done with events: counted, kept, written as JSON lines. Nothing depends on the tracer but the workspace."""

from __future__ import annotations

import json
import threading
from collections import Counter, deque
from pathlib import Path
from typing import NamedTuple

from langgraph_latent import public
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


@public
class LatentTracer:
    """Keeps the last `keep` events in memory and, with a path, appends each as one JSON line. Safe in threads.

    With `checksums=True` every produced cache is read once more to record its SHA-256; slow, for debugging.
    """

    def __init__(self, path: str | Path | None = None, *, keep: int = 10_000, checksums: bool = False) -> None:
        self.path = Path(path) if path is not None else None
        self.checksums = checksums
        if self.path is not None:
            try:
                self.path.open("a").close()
            except OSError as error:
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
                with self.path.open("a", encoding="utf-8") as file:
                    file.write(line)

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
