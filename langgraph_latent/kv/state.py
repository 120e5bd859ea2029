"""One sequence's KV cache as an immutable value, and the only door to transformers' `Cache`.

A `KVState` is a length over a `KVBuffer`; a `KVTail` is the right to write behind it, dressed as a `Cache` for one
model call after another; `packed_cache` dresses several of them for one call. None knows which model or tokens it is of.

Attention layers keep one entry per token and share storage. Every other kind of layer (recurrent and convolution
states, indexed and compressed attention, whatever comes) is kept whole, as transformers' own layer: copied where a
sequence goes on, and never cropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.kv.buffer import KVBuffer, LayerStore
from langgraph_latent.kv.opaque import copy_layer, move_layer, tensors_of

OPAQUE_KINDS: Mapping[type, str] = {
    DummyLayer: "none",
    DynamicIndexedLayer: "indexed",
    LinearAttentionLayer: "linear",
    LinearAttentionAndFullAttentionLayer: "hybrid",
    LinearAttentionAndSlidingWindowAttentionLayer: "hybrid sliding",
}


class LayerKind(NamedTuple):
    """What a cache layer keeps: "full", "sliding" or "chunked" attention, or one of a layer that is kept whole.

    `window` is in tokens, 0 where there is none.
    """

    name: str
    window: int = 0

    @property
    def has_tokens(self) -> bool:
        """Whether it keeps one key and value per token."""
        return self.name in ("full", "sliding", "chunked")

    def first_needed(self, length: int) -> int:
        """The first position that the next token of a sequence of `length` tokens may attend to."""
        return max(0, length - self.window + 1) if self.window else 0


def empty_layers(config: PreTrainedConfig) -> tuple[Any, ...]:
    """transformers' own empty cache layers for a model.

    Raises `UnsupportedLayerError` where transformers makes none for it before it is run.
    """
    layers = tuple(DynamicCache(config=config).layers)
    if not layers:
        raise UnsupportedLayerError(f"transformers knows no cache layers of {config.model_type!r}; use a text edge")
    return layers


def layer_kinds(config: PreTrainedConfig) -> tuple[LayerKind, ...]:
    """The kind of every cache layer of a model."""
    types = getattr(config.get_text_config(decoder=True), "layer_types", None) or ()
    layers = empty_layers(config)
    names = [types[index] if len(types) == len(layers) else "" for index in range(len(layers))]
    return tuple(_kind(layer, name) for layer, name in zip(layers, names, strict=True))


def _kind(layer: Any, configured: str) -> LayerKind:
    if type(layer) is DynamicSlidingWindowLayer:
        return LayerKind("chunked" if configured == "chunked_attention" else "sliding", layer.sliding_window)
    if type(layer) is DynamicLayer:
        return LayerKind("full")
    window = getattr(layer, "sliding_window", None) or 0
    return LayerKind(OPAQUE_KINDS.get(type(layer), type(layer).__name__), window)


class KVState:
    """The cache of a sequence's first `num_tokens` tokens. Never changes; cropping and forking share memory.

    Attention layers hold keys and values, `(1, kv_heads, seq, head_dim)`, keys after RoPE at positions 0 .. num_tokens.

    Attributes:
        opaque_layers: per layer transformers' own layer where it is kept whole, None where tokens are in the buffer.
        biases: per layer what is added to the scores of its first tokens in attention, (tokens,), float32; () for
            nothing anywhere.
    """

    __slots__ = ("biases", "buffer", "kinds", "num_tokens", "opaque_layers", "__weakref__")

    def __init__(
        self,
        buffer: KVBuffer,
        kinds: tuple[LayerKind, ...],
        num_tokens: int,
        opaque_layers: tuple[Any, ...] = (),
        biases: tuple[torch.Tensor, ...] = (),
    ) -> None:
        self.buffer = buffer
        self.kinds = kinds
        self.num_tokens = num_tokens
        self.opaque_layers = opaque_layers or (None,) * len(kinds)
        self.biases = biases
        buffer.add_view(self)

    @classmethod
    def empty(cls, kinds: tuple[LayerKind, ...], layers: Sequence[Any] = ()) -> KVState:
        """The state of no tokens; `layers` are `empty_layers` of the model where some are kept whole."""
        opaque_layers = tuple(
            None if kind.has_tokens else layer for kind, layer in zip(kinds, layers, strict=bool(layers))
        )
        return cls(KVBuffer.empty(len(kinds)), kinds, 0, opaque_layers)

    @classmethod
    def from_layers(cls, kinds: tuple[LayerKind, ...], layers: Sequence[Any], num_tokens: int) -> KVState:
        """A state over given layers, taken over without a copy.

        A layer is a pair of keys and values (of its last tokens where it is sliding), or one that is kept whole.
        """
        stores = [
            LayerStore(layer[0], layer[1], num_tokens - layer[0].shape[-2]) if kind.has_tokens else LayerStore()
            for kind, layer in zip(kinds, layers, strict=True)
        ]
        opaque_layers = tuple(None if kind.has_tokens else layer for kind, layer in zip(kinds, layers, strict=True))
        return cls(KVBuffer(stores), kinds, num_tokens, opaque_layers)

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor in it, spare capacity not included."""
        return sum(tensor.nbytes for tensors in self.layers() for tensor in tensors)

    @property
    def opaque_nbytes(self) -> int:
        """Bytes of the layers that are kept whole, which no other state shares."""
        return sum(tensor.nbytes for whole in self.opaque_layers if whole for tensor in tensors_of(whole).values())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first attention layer's keys, `(batch, kv_heads, seq, head_dim)`; () where there is none."""
        for kind, tensors in zip(self.kinds, self.layers(), strict=False):
            if kind.has_tokens:
                return tuple(tensors[0].shape)
        return ()

    def parts(self, index: int) -> dict[str, torch.Tensor]:
        """What the next token needs of a layer, by name; "keys" and "values" of an attention layer. Views."""
        kind = self.kinds[index]
        if not kind.has_tokens:
            return tensors_of(self.opaque_layers[index])
        keys, values = self.buffer.layers[index].view(kind.first_needed(self.num_tokens), self.num_tokens)
        return {"keys": keys, "values": values}

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors of `parts(index)`: keys and values of an attention layer."""
        return tuple(self.parts(index).values())

    def layers(self) -> list[tuple[torch.Tensor, ...]]:
        """`layer(i)` for every layer; empty for a state of no tokens."""
        return [self.layer(index) for index in range(len(self.kinds))] if self.num_tokens else []

    def can_crop(self, num_tokens: int) -> bool:
        """Whether the first `num_tokens` tokens alone are still complete in every layer."""
        if not 0 <= num_tokens <= self.num_tokens:
            return False
        if num_tokens == self.num_tokens:
            return True
        stores = zip(self.kinds, self.buffer.layers, strict=True)
        return all(
            store.start <= kind.first_needed(num_tokens) if kind.has_tokens else kind.name == "none"
            for kind, store in stores
        )

    def crop(self, num_tokens: int) -> KVState:
        """The state of the first `num_tokens` tokens, by view. Raises `ValueError` where `can_crop` is False."""
        if num_tokens == self.num_tokens:
            return self
        if not self.can_crop(num_tokens):
            raise ValueError(f"a state of {self.num_tokens} tokens can't be cropped to {num_tokens}")
        biases = tuple(bias[:num_tokens] for bias in self.biases)
        return KVState(self.buffer, self.kinds, num_tokens, self.opaque_layers, biases)

    def with_biases(self, biases: tuple[torch.Tensor, ...]) -> KVState:
        """The same state, its tokens seen with these biases."""
        return KVState(self.buffer, self.kinds, self.num_tokens, self.opaque_layers, biases)

    def has_tokens_from(self, begin: int) -> bool:
        """Whether every layer keeps one key and value for each token from `begin` on."""
        return all(
            store.start <= begin if kind.has_tokens else kind.name == "none"
            for kind, store in zip(self.kinds, self.buffer.layers, strict=True)
        )

    def bytes_elsewhere(self, devices: Sequence[torch.device | None]) -> int:
        """Bytes that are on other devices than each layer's. None: anywhere."""
        return sum(
            tensor.nbytes
            for tensors, device in zip(self.layers(), devices, strict=False)
            for tensor in tensors
            if device is not None and tensor.device != device
        )

    def to(self, devices: Sequence[torch.device | None]) -> KVState:
        """The state with each layer on the device it is used on; itself where it is there already. None: anywhere."""
        if not self.bytes_elsewhere(devices):
            return self
        moved = [
            tuple(tensor.to(device) for tensor in self.layer(index))
            if kind.has_tokens
            else move_layer(self.opaque_layers[index], device)
            for index, (kind, device) in enumerate(zip(self.kinds, devices, strict=True))
        ]
        places = zip(self.biases, devices, strict=bool(self.biases))
        biases = tuple(bias if device is None else bias.to(device) for bias, device in places)
        return KVState.from_layers(self.kinds, moved, self.num_tokens).with_biases(biases)

    def checksum(self) -> str:
        """SHA-256 over shape, dtype and bytes of every layer; reads all of it."""
        digest = hashlib.sha256()
        for tensors in self.layers():
            for tensor in tensors:
                digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
                digest.update(tensor_bytes(tensor))
        return digest.hexdigest()

    def equals(self, other: KVState) -> bool:
        """Whether kinds, length and every tensor are equal, bit for bit."""
        if (self.kinds, self.num_tokens) != (other.kinds, other.num_tokens):
            return False
        pairs = zip(self.layers(), other.layers(), strict=True)
        return all(
            len(mine) == len(theirs) and all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
            for mine, theirs in pairs
        )

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
        self._num_fed = state.num_tokens
        self._is_spoiled = False
        layers = [
            _TailLayer(growth, index, state.num_tokens) if whole is None else copy_layer(whole)
            for index, whole in enumerate(state.opaque_layers)
        ]
        self._layers = [layer for layer in layers if isinstance(layer, _TailLayer)]
        self._cache = Cache(layers=layers)

    @property
    def origin(self) -> KVState:
        """The state that the tail began behind."""
        return self._growth.origin

    @property
    def is_biased(self) -> bool:
        """Whether some tokens are seen with a bias."""
        return bool(self.origin.biases)

    @property
    def layers(self) -> Sequence[Any]:
        """The cache's layers."""
        return self._cache.layers

    @property
    def cache(self) -> Cache:
        """For the model's forward. Raises `RuntimeError` where a failed call spoiled a layer that is kept whole."""
        if self._is_spoiled:
            raise RuntimeError("a failed model call left this cache half-written, and its layers can't be cropped")
        return self._cache

    @property
    def num_tokens(self) -> int:
        """Tokens complete in every layer."""
        return min((layer.length for layer in self._layers), default=self._num_fed)

    def fed(self, num_tokens: int) -> None:
        """Note that a model call on `num_tokens` tokens succeeded: not every kind of layer can tell."""
        self._num_fed += num_tokens

    def seal(self) -> KVState:
        """The state of everything appended so far; of a spoiled tail only the one that it began behind is left."""
        origin, buffer, _ = self._growth
        if self.num_tokens == origin.num_tokens or self._is_spoiled:
            return origin
        opaque_layers = [
            None if kind.has_tokens else copy_layer(layer)
            for kind, layer in zip(origin.kinds, self._cache.layers, strict=True)
        ]
        return KVState(buffer, origin.kinds, self.num_tokens, tuple(opaque_layers), origin.biases)

    def rewind(self, num_tokens: int) -> None:
        """Forget what a failed model call wrote behind the first `num_tokens` tokens."""
        self._num_fed = num_tokens
        for layer in self._layers:
            layer.length = num_tokens
        self._is_spoiled = any(not kind.has_tokens and kind.name != "none" for kind in self.origin.kinds)

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

    def row(self, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        """Write new tokens; what they attend to."""
        num_new, begin = keys.shape[-2], self._kind.first_needed(self.length)
        return PackedSequence(num_new, *self.update(keys, values), self._bias(begin))

    def rewrite(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        """Write tokens at these positions, ascending, anew; what they attend to."""
        store, at = self._store, positions - self._store.start
        assert store.keys is not None, "only what was written can be written anew"
        assert store.values is not None
        store.keys.index_copy_(2, at, keys)
        store.values.index_copy_(2, at, values)
        begin = self._kind.first_needed(int(positions[0]))
        return PackedSequence(len(positions), *store.view(begin, self.length), self._bias(begin), positions - begin)

    def _bias(self, begin: int) -> torch.Tensor | None:
        """What is added to the scores of tokens `begin` to the last; None for nothing."""
        biases = self._growth.origin.biases
        if not biases:
            return None
        bias = biases[self._index][begin : self.length]
        return torch.nn.functional.pad(bias, (0, self.length - begin - len(bias)))

    def __deepcopy__(self, memo: dict[int, Any]) -> _TailLayer:
        raise NotImplementedError("its forward copies the cache it is given, so what it writes can't be kept")

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


def packed_cache(tails: Sequence[KVTail], sizes: Sequence[int]) -> Cache:
    """Several sequences' tails as one `Cache`, for a forward over their new tokens side by side, (1, seq).

    What a layer hands to attention are `PackedKeys`: only an attention function that knows them can use this cache.
    """
    shared_prefixes = _shared_prefixes(tails, sizes)
    layers = zip(*(tail.cache.layers for tail in tails), strict=True)
    return Cache(layers=[_PackedLayer(rows, sizes, shared_prefixes) for rows in layers])


class SharedPrefix(NamedTuple):
    """Rows of one new token whose sequences began as one: their first `num_shared` keys and values are equal."""

    rows: list[int]
    num_shared: int


def _shared_prefixes(tails: Sequence[KVTail], sizes: Sequence[int]) -> list[SharedPrefix]:
    families: dict[KVBuffer, list[int]] = {}
    for index, (tail, size) in enumerate(zip(tails, sizes, strict=True)):
        if size == 1:
            families.setdefault(tail.origin.buffer, []).append(index)
    return [
        SharedPrefix(rows, min(tails[index].origin.num_tokens for index in rows))
        for rows in families.values()
        if len(rows) > 1
    ]


class PackedSequence(NamedTuple):
    """What the new tokens of one sequence attend to.

    Attributes:
        num_new: how many they are.
        keys, values: (1, kv_heads, length, head_dim).
        bias: added to the scores of each key, (length,); None for nothing.
        positions: where the new tokens are among the keys, (num_new,); None for the end.
    """

    num_new: int
    keys: torch.Tensor
    values: torch.Tensor
    bias: torch.Tensor | None = None
    positions: torch.Tensor | None = None


class PackedKeys(torch.Tensor):
    """The new keys of several sequences, (1, kv_heads, seq, head_dim), that carry what each sequence attends to.

    Attributes:
        rows: per sequence what it attends to.
        shared_prefixes: rows that have their first keys and values in common.
        window: the layer's sliding window, 0 where it attends to everything.
    """

    rows: list[PackedSequence]
    shared_prefixes: list[SharedPrefix]
    window: int


class _PackedLayer(CacheLayerMixin):
    """One layer under several tails. To the model it looks empty: masks are made per row by the attention function."""

    is_croppable = False
    is_initialized = True
    is_sliding = False

    def __init__(self, rows: Sequence[Any], sizes: Sequence[int], shared_prefixes: list[SharedPrefix]) -> None:
        self._rows = rows
        self._sizes = list(sizes)
        self._shared_prefixes = shared_prefixes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = zip(
            self._rows, self._sizes, key_states.split(self._sizes, -2), value_states.split(self._sizes, -2), strict=True
        )
        keys = key_states.as_subclass(PackedKeys)
        keys.rows = [self._row(row, own_keys, own_values) for row, _, own_keys, own_values in parts]
        keys.shared_prefixes = self._shared_prefixes
        keys.window = self._rows[0].get_max_length() if self._rows[0].is_sliding else 0
        return keys, value_states

    def _row(self, layer: _TailLayer, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        return layer.row(keys, values)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: every row has its own storage."""


def repair_cache(tail: KVTail, positions: torch.Tensor) -> Cache:
    """A tail as a `Cache` for a forward over tokens at these positions, ascending: they are written anew.

    What a layer hands to attention are `PackedKeys`, as with `packed_cache`.
    """
    return Cache(layers=[_RepairLayer(layer, positions) for layer in tail.layers])


class _RepairLayer(_PackedLayer):
    """One layer under a tail whose tokens are computed anew."""

    def __init__(self, layer: _TailLayer, positions: torch.Tensor) -> None:
        super().__init__([layer], [len(positions)], [])
        self._positions = positions

    def _row(self, layer: _TailLayer, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        return layer.rewrite(self._positions, keys, values)


class ValuesReached(Exception):
    """Carries the new values of the layer that a forward over an `early_cache` was to reach."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.values = values


def early_cache(tail: KVTail, num_new: int, layer: int) -> Cache:
    """A tail as a `Cache` for a forward over `num_new` tokens, which raises `ValuesReached` at a layer's values."""
    before = [_PackedLayer([each], [num_new], []) for each in tail.layers[:layer]]
    return Cache(layers=[*before, *(_LastLayer([each], [num_new], []) for each in tail.layers[layer:])])


class _LastLayer(_PackedLayer):
    """The layer at which a forward ends."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        raise ValuesReached(value_states)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, on the CPU; no copy where it is contiguous there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    data: Any = flat.numpy()
    return memoryview(data)
