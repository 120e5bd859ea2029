"""Which caches to drop first. Policies see sizes and times, never tensors; a new one is a class with one method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Candidate(NamedTuple):
    """What can be evicted at once: caches that share one storage and can only be freed together."""

    key: int
    nbytes: int
    last_used: int


class EvictionPolicy(Protocol):
    """Decides the order of eviction."""

    def order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        """The candidates, first to go first."""
        ...


class LRU:
    """Least recently used first."""

    def order(self, candidates: Iterable[Candidate]) -> list[Candidate]:
        return sorted(candidates, key=lambda candidate: candidate.last_used)
