"""One sequence's KV cache as an immutable value, and the only door to transformers' `Cache`.

A `KVState` is a length over a `KVBuffer`; a `KVTail` is the right to write behind it, dressed as a `Cache` for one
model call after another; `rows_cache` dresses several of them for one call. None knows which model or tokens it is of.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.kv.buffer import KVBuffer, LayerStore


class LayerKind(NamedTuple):
    """What a cache layer keeps: "full" or "sliding", and the window in tokens (0 for full)."""

    name: str
    window: int = 0

    def first_needed(self, length: int) -> int:
        """The first position that the next token of a sequence of `length` tokens may attend to."""
        return max(0, length - self.window + 1) if self.window else 0


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """The kind of every cache layer of a model. Raises `UnsupportedLayerError` for one that `KVState` can't hold."""
    kinds = []
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is DynamicSlidingWindowLayer:
            kinds.append(LayerKind("sliding", layer.sliding_window))
        elif type(layer) is DynamicLayer:
            kinds.append(LayerKind("full"))
        else:
            raise UnsupportedLayerError(
                f"layer {index} of {config.model_type!r} keeps a {type(layer).__name__}; only full and sliding-window "
                "attention can be handed over yet. Use a text edge for this model."
            )
    return tuple(kinds)


class KVState:
    """The keys and values of a sequence's first `num_tokens` tokens, per layer `(1, kv_heads, seq, head_dim)`.

    Keys are after RoPE at positions 0 .. num_tokens. Never changes; cropping and forking share memory.
    """

    __slots__ = ("buffer", "kinds", "num_tokens", "__weakref__")

    def __init__(self, buffer: KVBuffer, kinds: tuple[LayerKind, ...], num_tokens: int) -> None:
        self.buffer = buffer
        self.kinds = kinds
        self.num_tokens = num_tokens
        buffer.add_view(self)

    @classmethod
    def empty(cls, kinds: tuple[LayerKind, ...]) -> KVState:
        """The state of no tokens."""
        return cls(KVBuffer.empty(len(kinds)), kinds, 0)

    @classmethod
    def from_tensors(
        cls, kinds: tuple[LayerKind, ...], layers: list[tuple[torch.Tensor, torch.Tensor]], num_tokens: int
    ) -> KVState:
        """A state over given keys and values, taken over without a copy; sliding layers hold their last tokens."""
        stores = [LayerStore(keys, values, num_tokens - keys.shape[-2]) for keys, values in layers]
        return cls(KVBuffer(stores), kinds, num_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values in it, spare capacity not included."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first layer's keys: `(batch, kv_heads, seq, head_dim)`; () for a state of no tokens."""
        keys = self.buffer.layers[0].keys
        if keys is None:
            return ()
        return (*keys.shape[:2], self.num_tokens - self.kinds[0].first_needed(self.num_tokens), keys.shape[-1])

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values that the next token may attend to; views."""
        begin = self.kinds[index].first_needed(self.num_tokens)
        return self.buffer.layers[index].view(begin, self.num_tokens)

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """`layer(i)` for every layer; empty for a state of no tokens."""
        return [self.layer(index) for index in range(len(self.kinds))] if self.num_tokens else []

    def can_crop(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens alone are still complete in every layer."""
        if not 0 <= num_tokens <= self.num_tokens:
            return False
        if num_tokens == self.num_tokens:
            return True
        stores = zip(self.kinds, self.buffer.layers, strict=True)
        return all(store.start <= kind.first_needed(num_tokens) for kind, store in stores)

    def crop(self, num_tokens: int) -> KVState:
        """The state of the first `num_tokens` tokens, by view. Raises `ValueError` where `can_crop` is False."""
        if num_tokens == self.num_tokens:
            return self
        if not self.can_crop(num_tokens):
            raise ValueError(f"a state of {self.num_tokens} tokens can't be cropped to {num_tokens}")
        return KVState(self.buffer, self.kinds, num_tokens)

    def to(self, devices: Sequence[torch.device]) -> KVState:
        """The state with each layer on the device it is used on; itself where it is there already."""
        pairs = list(zip(self.layers(), devices, strict=True))
        if all(keys.device == device for (keys, _), device in pairs):
            return self
        moved = [(keys.to(device), values.to(device)) for (keys, values), device in pairs]
        return KVState.from_tensors(self.kinds, moved, self.num_tokens)

    def checksum(self) -> str:
        """SHA-256 over shape, dtype and bytes of every layer; reads all of it."""
        digest = hashlib.sha256()
        for pair in self.layers():
            for tensor in pair:
                digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def equals(self, other: KVState) -> bool:
        """Whether kinds, length and every key and value are equal, bit for bit."""
        if (self.kinds, self.num_tokens) != (other.kinds, other.num_tokens):
            return False
        pairs = zip(self.layers(), other.layers(), strict=True)
        return all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))

    def append(self, expected: int = 0) -> KVTail:
        """Begin to write behind this state; `expected` is the length to make room for, where it is known."""
        return KVTail(self, expected)


class KVTail:
    """The right to append behind a state, as a context manager; `cache` goes to the model's forward.

    In place where the state ends its buffer and nobody else writes, otherwise in a copy made on the first write.
    """

    def __init__(self, state: KVState, expected: int) -> None:
        buffer = state.buffer
        if not buffer.claim(state.num_tokens):
            buffer = KVBuffer.empty(len(state.kinds))
            buffer.claim(0)
        self._growth = growth = _Growth(state, buffer, expected)
        self._is_open = True
        self._layers = [_TailLayer(growth, index, state.num_tokens) for index in range(len(state.kinds))]
        self.cache = Cache(layers=[*self._layers])

    @property
    def origin(self) -> KVState:
        """The state that the tail began behind."""
        return self._growth.origin

    @property
    def num_tokens(self) -> int:
        """Tokens complete in every layer."""
        return min(layer.length for layer in self._layers)

    def seal(self) -> KVState:
        """The state of everything appended so far."""
        origin, buffer, _ = self._growth
        if self.num_tokens == origin.num_tokens:
            return origin
        return KVState(buffer, origin.kinds, self.num_tokens)

    def rewind(self, num_tokens: int) -> None:
        """Forget what a failed model call wrote behind the first `num_tokens` tokens."""
        for layer in self._layers:
            layer.length = num_tokens

    def close(self) -> None:
        """Give the tail back; what was not sealed is forgotten. Nothing may be appended after it."""
        if self._is_open:
            self._is_open = False
            self._growth.buffer.release()

    def __enter__(self) -> KVTail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Growth(NamedTuple):
    """What the layers of a tail share: where it begins, the storage it writes to, and the length to make room for."""

    origin: KVState
    buffer: KVBuffer
    expected: int


class _TailLayer(CacheLayerMixin):
    """transformers' view of one layer under a tail. Built once per layer and hand-over, so it does next to nothing."""

    is_croppable = False
    is_initialized = True

    def __init__(self, growth: _Growth, index: int, length: int) -> None:
        self.length = length
        self._growth = growth
        self._index = index

    @property
    def is_sliding(self) -> bool:
        return self._kind.window > 0

    @property
    def _kind(self) -> LayerKind:
        return self._growth.origin.kinds[self._index]

    @property
    def _store(self) -> LayerStore:
        return self._growth.buffer.layers[self._index]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        growth, store, at = self._growth, self._store, self.length
        if store.keys is None and at:  # a fork's first write
            origin = growth.origin.buffer.layers[self._index]
            growth.buffer.nbytes += store.copy_from(origin, at, key_states, value_states, growth.expected)
        growth.buffer.nbytes += store.write(at, key_states, value_states, growth.expected)
        self.length += key_states.shape[-2]
        return store.view(self._kind.first_needed(at), self.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        begin = self._kind.first_needed(self.length)
        return self.length - begin + query_length, begin

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self._kind.window or -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: storage is allocated on the first write."""

    @property
    def keys(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._view()[0]

    @property
    def values(self) -> torch.Tensor | None:  # type: ignore[override]
        return self._view()[1]

    def _view(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        store = self._store if self._store.keys is not None else self._growth.origin.buffer.layers[self._index]
        return store.view(self._kind.first_needed(self.length), self.length) if self.length else (None, None)


def rows_cache(tails: Sequence[KVTail], sizes: Sequence[int]) -> Cache:
    """Several sequences' tails as one `Cache`, for a forward over their new tokens side by side, (1, seq).

    What a layer hands to attention are `RowKeys`: only an attention function that knows them can use this cache.
    """
    siblings = _siblings(tails, sizes)
    layers = zip(*(tail.cache.layers for tail in tails), strict=True)
    return Cache(layers=[_RowsLayer(rows, sizes, siblings) for rows in layers])


class Siblings(NamedTuple):
    """Rows of one new token whose sequences began as one: their first `num_shared` keys and values are equal."""

    rows: list[int]
    num_shared: int


def _siblings(tails: Sequence[KVTail], sizes: Sequence[int]) -> list[Siblings]:
    families: dict[KVBuffer, list[int]] = {}
    for index, (tail, size) in enumerate(zip(tails, sizes, strict=True)):
        if size == 1:
            families.setdefault(tail.origin.buffer, []).append(index)
    return [
        Siblings(rows, min(tails[index].origin.num_tokens for index in rows))
        for rows in families.values()
        if len(rows) > 1
    ]


class RowKeys(torch.Tensor):
    """The new keys of several sequences, (1, kv_heads, seq, head_dim), that carry what each sequence attends to.

    Attributes:
        rows: per sequence its number of new tokens, its keys and its values, (1, kv_heads, length, head_dim).
        siblings: rows that have their first keys and values in common.
        window: the layer's sliding window, 0 where it attends to everything.
    """

    rows: list[tuple[int, torch.Tensor, torch.Tensor]]
    siblings: list[Siblings]
    window: int


class _RowsLayer(CacheLayerMixin):
    """One layer under several tails. To the model it looks empty: masks are made per row by the attention function."""

    is_croppable = False
    is_initialized = True
    is_sliding = False

    def __init__(self, rows: Sequence[Any], sizes: Sequence[int], siblings: list[Siblings]) -> None:
        self._rows = rows
        self._sizes = list(sizes)
        self._siblings = siblings

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(
            self._rows, self._sizes, key_states.split(self._sizes, -2), value_states.split(self._sizes, -2), strict=True
        )
        keys = key_states.as_subclass(RowKeys)
        keys.rows = [(size, *row.update(own_keys, own_values)) for row, size, own_keys, own_values in parts]
        keys.siblings = self._siblings
        keys.window = self._rows[0].get_max_length() if self._rows[0].is_sliding else 0
        return keys, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: every row has its own storage."""


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, on the CPU; no copy where it is contiguous there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    data: Any = flat.numpy()
    return memoryview(data)
