"""The cache pool: KV states under token prefixes, within a byte budget.

It keeps tensors and finds them by model, tenant and token ids. It knows nothing about text, routes or LangGraph.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from langgraph_latent.errors import CacheBudgetError, IntegrityError
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.buffer import KVBuffer
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.policies import LRU, Candidate, EvictionPolicy
from langgraph_latent.pool.prefix import Node, PrefixIndex


class Namespace(NamedTuple):
    """Reuse never crosses it: the model's identity, the tenant, the provenance digest ("" for plain), and the ids of
    the handles whose tensors came from outside and are not proven (() where there are none)."""

    model: str
    tenant: str
    provenance_digest: str = ""
    outside: tuple[str, ...] = ()


class PoolInfo(NamedTuple):
    """Sizes of a pool. `used_bytes` counts every storage once, spare capacity included."""

    budget_bytes: int
    used_bytes: int
    num_entries: int
    num_buffers: int
    num_pinned: int


@dataclass(eq=False)
class Entry:
    """One kept state. `handles` are the ids of its handles, `owners` the threads and scopes that made it.

    `opaque_nbytes` are the bytes of its opaque layers, which it shares with no other entry.
    """

    namespace: Namespace
    state: KVState
    node: Node[Entry]
    handles: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    opaque_nbytes: int = 0
    last_used: int = 0


@dataclass
class Pin:
    """How often a handle is pinned, and until when at least. It outlives the entry: a rebuilt cache is pinned again."""

    count: int = 0
    until: float = 0.0

    def is_active(self, now: float) -> bool:
        return self.count > 0 or self.until > now


class CachePool:
    """Keeps states within `budget_bytes` of unique storage; `clock` tells the seconds that pins last.

    Every method is safe in threads.
    """

    def __init__(
        self, budget_bytes: int, policy: EvictionPolicy | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.budget_bytes = budget_bytes
        self._policy = policy or LRU()
        self._clock = clock
        self._lock = threading.RLock()
        self._indexes: dict[Namespace, PrefixIndex[Entry]] = {}
        self._buffers: dict[int, set[Entry]] = {}
        self._handles: dict[str, Entry] = {}
        self._owners: dict[str, set[Entry]] = {}
        self._pins: dict[str, Pin] = {}
        self._is_closed = False
        self._uses = itertools.count(1)
        self._opaque_nbytes = 0

    def put(self, namespace: Namespace, tokens: bytes, state: KVState, handle: str, owner: str = "") -> list[str]:
        """Keep `state`, the cache of packed `tokens`, for a handle id; returns the ids that lost their tensors for it.

        `owner`, where given, can `release` it. Raises `CacheBudgetError`, and changes nothing, where the state's
        storage alone is larger than the budget.
        """
        assert state.num_tokens * TOKEN_BYTES == len(tokens)
        if not tokens:
            return []
        self.check_fits(state.buffer.nbytes + state.opaque_nbytes)
        with self._lock:
            if self._is_closed:
                return [handle]
            entry = self._entry(namespace, tokens, state)
            entry.last_used = next(self._uses)
            if (known := self._handles.get(handle)) is not None:
                known.handles.discard(handle)
            entry.handles.add(handle)
            self._handles[handle] = entry
            entry.owners.add(owner)  # "" owns what was made outside of any thread or scope; nobody releases it
            self._owners.setdefault(owner, set()).add(entry)
            return self._shrink(keep=entry)

    def longest_prefix(self, namespace: Namespace, tokens: bytes, limit: int) -> KVState | None:
        """The state that shares the longest prefix with packed `tokens`, cropped to it and to `limit` tokens."""
        with self._lock:
            index = self._indexes.get(namespace)
            for num_tokens, entry in index.matches(tokens) if index else ():
                length = min(num_tokens, limit)
                if length and entry.state.can_crop(length):
                    entry.last_used = next(self._uses)
                    return entry.state.crop(length)
        return None

    def check_fits(self, nbytes: int) -> None:
        """Raise `CacheBudgetError` where one cache of `nbytes` is more than the whole budget."""
        if nbytes > self.budget_bytes:
            raise CacheBudgetError(
                f"one cache of {nbytes:,} bytes does not fit the pool's budget of {self.budget_bytes:,} bytes; raise "
                "it with LatentWorkspace(memory=...), or shorten the prompt. What is kept already stays."
            )

    def namespace_of(self, handle: str) -> Namespace | None:
        """Where the tensors of a handle id are kept; None where they are gone."""
        entry = self._handles.get(handle)
        return entry.namespace if entry else None

    def has(self, handle: str) -> bool:
        """Whether tensors are kept for a handle id."""
        return handle in self._handles

    def pin(self, handle: str, ttl_s: float | None = None) -> bool:
        """Keep a handle's tensors from eviction, for `ttl_s` seconds or until `unpin`; False when they are gone."""
        with self._lock:
            if handle not in self._handles:
                return False
            pin = self._pins.setdefault(handle, Pin())
            if ttl_s is None:
                pin.count += 1
            else:
                pin.until = max(pin.until, self._clock() + ttl_s)
            return True

    def unpin(self, handle: str) -> list[str]:
        """Undo one `pin` without a time limit, and all with one; returns the ids that then lost their tensors."""
        with self._lock:
            pin, entry = self._pins.get(handle), self._handles.get(handle)
            if pin is None:
                return []
            pin.count, pin.until = max(0, pin.count - 1), 0.0
            if not pin.is_active(self._clock()):
                del self._pins[handle]
            return self._shrink(keep=entry) if entry else []

    def _is_pinned(self, entry: Entry) -> bool:
        pins = [self._pins[handle] for handle in entry.handles if handle in self._pins] if self._pins else []
        return any(pin.is_active(self._clock()) for pin in pins)

    def drop(self, handle: str) -> list[str]:
        """Let go of a handle's tensors and pins; returns every handle id that lost its tensors."""
        with self._lock:
            self._pins.pop(handle, None)
            entry = self._handles.get(handle)
            return self._remove(entry) if entry else []

    def drop_storage(self, state: KVState) -> list[str]:
        """Let go of everything that shares a state's storage; returns every handle id that lost its tensors."""
        with self._lock:
            entries = list(self._buffers.get(id(state.buffer), ()))
            return [lost for entry in entries for lost in self._remove(entry)]

    def release(self, owner: str) -> list[str]:
        """End an ownership; what has no other owner and no pin is dropped. Returns the handle ids that lost tensors."""
        with self._lock:
            lost: list[str] = []
            for entry in self._owners.pop(owner, ()):
                entry.owners.discard(owner)
                if not entry.owners and not self._is_pinned(entry):
                    lost += self._remove(entry)
            return lost

    def clear(self) -> list[str]:
        """Drop everything, pinned or not; returns every handle id that lost its tensors."""
        with self._lock:
            lost = list(self._handles)
            for entry in self._entries():  # one by one: entries and their nodes refer to each other
                self._remove(entry)
            self._indexes.clear()
            self._pins.clear()
            return lost

    def close(self) -> list[str]:
        """`clear`, and keep nothing from now on."""
        with self._lock:
            self._is_closed = True
            return self.clear()

    def size_info(self) -> PoolInfo:
        with self._lock:
            entries = self._entries()
            pinned = sum(self._is_pinned(entry) for entry in entries)
            return PoolInfo(self.budget_bytes, self._used_bytes(), len(entries), len(self._buffers), pinned)

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where index, buffers, handles, owners or budget contradict one another."""
        with self._lock:
            paths = {id(entry): path for index in self._indexes.values() for path, entry in index}
            entries = self._entries()
            truths = {
                "index and buffers hold the same entries": set(paths) == {id(entry) for entry in entries},
                "an entry's state and tokens are equally long": all(
                    len(paths.get(id(entry), b"")) == entry.state.num_tokens * TOKEN_BYTES for entry in entries
                ),
                "an entry is filed under its own buffer": all(
                    id(entry.state.buffer) == key for key, group in self._buffers.items() for entry in group
                ),
                "handles and entries name each other": all(
                    self._handles.get(handle) is entry for entry in entries for handle in entry.handles
                )
                and sum(len(entry.handles) for entry in entries) == len(self._handles),
                "owners and entries name each other": all(
                    entry in self._owners.get(owner, ()) for entry in entries for owner in entry.owners
                )
                and sum(len(entry.owners) for entry in entries) == sum(map(len, self._owners.values())),
                "storage covers what its states see": all(
                    layer.keys is not None and layer.start + layer.keys.shape[-2] >= entry.state.num_tokens
                    for entry in entries
                    for kind, layer in zip(entry.state.kinds, entry.state.buffer.layers, strict=True)
                    if kind.has_tokens
                ),
                "opaque layers are counted": self._opaque_nbytes == sum(entry.state.opaque_nbytes for entry in entries),
                "a buffer's size is that of its layers": all(
                    entry.state.buffer.nbytes == sum(layer.nbytes for layer in entry.state.buffer.layers)
                    for entry in entries
                ),
            }
            for truth, holds in truths.items():
                if not holds:
                    raise IntegrityError(f"the pool broke its own rule: {truth}")

    def _entries(self) -> list[Entry]:
        return [entry for group in self._buffers.values() for entry in group]

    def _entry(self, namespace: Namespace, tokens: bytes, state: KVState) -> Entry:
        """The entry for these tokens: the one there, or a new one."""
        node = self._indexes.setdefault(namespace, PrefixIndex()).insert(tokens)
        if node.value is None:
            node.value = Entry(namespace, state, node, opaque_nbytes=state.opaque_nbytes)
            self._opaque_nbytes += node.value.opaque_nbytes
            self._buffers.setdefault(id(state.buffer), set()).add(node.value)
        return node.value

    def _used_bytes(self) -> int:
        """Bytes of every storage once; it grows while it is written."""
        return sum(_buffer(group).nbytes for group in self._buffers.values()) + self._opaque_nbytes

    def _shrink(self, keep: Entry) -> list[str]:
        """Evict by policy until the budget holds. Pins stay; where they leave no room for `keep`, its storage goes."""
        lost: list[str] = []
        if self._used_bytes() <= self.budget_bytes:
            return lost
        candidates = [
            Candidate(key, _nbytes(group), max(entry.last_used for entry in group))
            for key, group in self._buffers.items()
            if keep not in group and not any(self._is_pinned(entry) for entry in group)
        ]
        for candidate in self._policy.order(candidates):
            if self._used_bytes() <= self.budget_bytes:
                break
            for entry in list(self._buffers[candidate.key]):
                lost += self._remove(entry)
        group = self._buffers[id(keep.state.buffer)]
        if self._used_bytes() > self.budget_bytes and not any(self._is_pinned(entry) for entry in group):
            for entry in list(group):
                lost += self._remove(entry)
        return lost

    def _remove(self, entry: Entry) -> list[str]:
        self._indexes[entry.namespace].remove(entry.node)
        self._opaque_nbytes -= entry.opaque_nbytes
        key = id(entry.state.buffer)
        self._buffers[key].discard(entry)
        if not self._buffers[key]:
            del self._buffers[key]
        for handle in entry.handles:
            del self._handles[handle]
            if handle in self._pins and not self._pins[handle].is_active(self._clock()):
                del self._pins[handle]
        for owner in entry.owners:
            self._owners[owner].discard(entry)
            if not self._owners[owner]:
                del self._owners[owner]
        return sorted(entry.handles)


def _buffer(group: set[Entry]) -> KVBuffer:
    """The storage that a group of entries shares."""
    return next(iter(group)).state.buffer


def _nbytes(group: set[Entry]) -> int:
    """Bytes of a group's storage, and of the opaque layers of each entry."""
    return _buffer(group).nbytes + sum(entry.opaque_nbytes for entry in group)
