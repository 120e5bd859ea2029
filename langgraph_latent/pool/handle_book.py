"""Handles by id, remembered after their tensors are gone. It knows no tensors and no models; safe in threads."""

from __future__ import annotations

import threading
from collections import OrderedDict

from langgraph_latent.handle.handle import KVHandle

BUDGET_BYTES = 64 << 20


class HandleBook:
    """The most recently used handles by id, up to `budget_bytes`, counted as twice the bytes of their token ids."""

    def __init__(self, budget_bytes: int = BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._handles: OrderedDict[str, KVHandle] = OrderedDict()
        self._used_bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._handles)

    def remember(self, handle: KVHandle) -> None:
        """Keep a handle; the least recently used ones are forgotten to make room."""
        with self._lock:
            if handle.id not in self._handles:
                self._used_bytes += 2 * len(handle.tokens)
            self._handles[handle.id] = handle
            self._handles.move_to_end(handle.id)
            while self._used_bytes > self.budget_bytes and len(self._handles) > 1:
                self._used_bytes -= 2 * len(self._handles.popitem(last=False)[1].tokens)

    def find(self, handle_id: str) -> KVHandle | None:
        """The handle with this id; None where it was forgotten or never known."""
        with self._lock:
            if handle_id in self._handles:
                self._handles.move_to_end(handle_id)
            return self._handles.get(handle_id)

    def clear(self) -> None:
        with self._lock:
            self._handles.clear()
            self._used_bytes = 0
