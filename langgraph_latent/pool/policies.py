"""Which caches to drop first. Policies see sizes and times, never tensors; a new one is a class with one method."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol


class Block(NamedTuple):
    """Caches that share one storage and so can only be freed together."""

    key: int
    nbytes: int
    last_used: float


class EvictionPolicy(Protocol):
    """Decides the order of eviction."""

    def order(self, blocks: Iterable[Block]) -> list[Block]:
        """The evictable blocks, first to go first."""
        ...


class LRU:
    """Least recently used first."""

    def order(self, blocks: Iterable[Block]) -> list[Block]:
        return sorted(blocks, key=lambda block: block.last_used)
