"""Append-only storage of one sequence's keys and values. It knows tensors and lengths; not what the tokens mean.

    position   0 ................ sealed ............ written ......... capacity
               | seen by some state |  the writer's own  |     spare      |
               |    never written   |                    |                |

A state is a length over a buffer. Whoever continues exactly at `sealed` claims the tail and writes in place; everyone
else copies into a new buffer on the first write. When storage is full it is replaced by a larger copy inside the same
buffer, so all states over it move along and the old storage is freed with its last reader.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

import torch

SPARE_RATIO = 1.25
SPARE_TOKENS = 64


def capacity_for(num_tokens: int) -> int:
    """Tokens of storage to allocate for `num_tokens`: a quarter more, at least `SPARE_TOKENS` more."""
    return max(int(num_tokens * SPARE_RATIO), num_tokens + SPARE_TOKENS)


class LayerStore:
    """Keys and values of one layer, `(batch, kv_heads, capacity, head_dim)`.

    Sequence position p sits at index p - start; start is above 0 only in a sliding-window layer that came without its
    distant past.
    """

    __slots__ = ("keys", "values", "start")

    def __init__(self, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, start: int = 0) -> None:
        self.keys = keys
        self.values = values
        self.start = start

    @property
    def nbytes(self) -> int:
        return 0 if self.keys is None or self.values is None else self.keys.nbytes + self.values.nbytes

    def view(self, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of positions begin to end, sharing memory."""
        keys, values = self.keys, self.values
        assert keys is not None, "a layer that was never written has no view"
        assert values is not None
        return keys[:, :, begin - self.start : end - self.start], values[:, :, begin - self.start : end - self.start]

    def write(self, at: int, keys: torch.Tensor, values: torch.Tensor, expected: int) -> int:
        """Put `keys` and `values` at position `at`, growing the storage for `expected` tokens where it is too small.

        Returns the bytes by which the storage grew.
        """
        end = at + keys.shape[-2]
        grown = 0
        if self.keys is None or end - self.start > self.keys.shape[-2]:
            grown = self._grow(at, capacity_for(max(end, expected) - self.start), keys, values)
        own_keys, own_values = self.view(at, end)
        own_keys.copy_(keys)
        own_values.copy_(values)
        return grown

    def copy_from(self, other: LayerStore, length: int, keys: torch.Tensor, values: torch.Tensor, expected: int) -> int:
        """Take over positions up to `length` of another store; `keys` and `values` give shape, dtype and device.

        Returns the bytes of the new storage.
        """
        copy = LayerStore(other.keys, other.values, other.start)
        copy._grow(length, capacity_for(max(length + keys.shape[-2], expected) - copy.start), keys, values)
        self.keys, self.values, self.start = copy.keys, copy.values, copy.start  # only now: memory may have run out
        return self.nbytes

    def _grow(self, length: int, capacity: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        before = self.nbytes
        kept = self.view(self.start, length) if self.keys is not None else None
        grown = [like.new_empty((*like.shape[:2], capacity, like.shape[-1])) for like in (keys, values)]
        if kept is not None:
            for new, old in zip(grown, kept, strict=True):
                new[:, :, : length - self.start].copy_(old)
        self.keys, self.values = grown
        return self.nbytes - before


class Sized(Protocol):
    """A view over a buffer: what `KVBuffer` needs to know of a state."""

    @property
    def num_tokens(self) -> int: ...


class KVBuffer:
    """Storage of one sequence over all layers, with at most one writer. Claiming is atomic; safe in threads.

    Attributes:
        nbytes: bytes of storage, spare capacity included; the writer keeps it up to date.
    """

    __slots__ = ("layers", "nbytes", "_views", "_is_claimed", "_lock", "__weakref__")

    def __init__(self, layers: list[LayerStore]) -> None:
        self.layers = layers
        self.nbytes = sum(layer.nbytes for layer in layers)
        self._views: weakref.WeakSet[Sized] = weakref.WeakSet()
        self._is_claimed = False
        self._lock = threading.RLock()  # a stream that is garbage-collected here gives its own claim back

    @classmethod
    def empty(cls, num_layers: int) -> KVBuffer:
        return cls([LayerStore() for _ in range(num_layers)])

    @property
    def sealed(self) -> int:
        """Positions below this may be seen by a live state."""
        return max((view.num_tokens for view in self._views), default=0)

    def add_view(self, view: Sized) -> None:
        with self._lock:
            self._views.add(view)

    def claim(self, length: int) -> bool:
        """Become the writer from position `length` on; False when another writes or a live state sees further."""
        with self._lock:
            sealed = self.sealed
            if self._is_claimed or length < sealed:
                return False
            self._is_claimed = True
            return True

    def release(self) -> None:
        """End the claim. States made of what was written must be added before."""
        with self._lock:
            self._is_claimed = False
