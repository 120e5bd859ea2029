"""What a cache layer keeps, read off transformers' own layers, and the layer through which a model writes to a buffer.

Nothing here knows which model, sequence or tokens a layer is of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
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
from langgraph_latent.kv.claim import Claim

OPAQUE_KINDS: Mapping[type, str] = {
    DummyLayer: "none",
    DynamicIndexedLayer: "indexed",
    LinearAttentionLayer: "linear",
    LinearAttentionAndFullAttentionLayer: "hybrid",
    LinearAttentionAndSlidingWindowAttentionLayer: "hybrid sliding",
}


class LayerKind(NamedTuple):
    """What a cache layer keeps: "full", "sliding" or "chunked" attention; any other name is an opaque layer's.

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


class Inherited(Protocol):
    """What a tail continues, as its layers see it: a `KVState`, which they keep alive, so that nobody overwrites it."""

    kinds: tuple[LayerKind, ...]
    buffer: KVBuffer
    biases: tuple[torch.Tensor, ...]


class Growth(NamedTuple):
    """What the layers of a tail share: what it continues, the claim on its storage, the length to make room for."""

    origin: Inherited
    claim: Claim
    expected: int

    @property
    def buffer(self) -> KVBuffer:
        """The storage that is written to."""
        return self.claim.buffer


class TailLayer(CacheLayerMixin):
    """transformers' view of one layer of a tail. Built once per layer and hand-over, so it does next to nothing."""

    is_croppable = False
    is_initialized = True

    def __init__(self, growth: Growth, index: int, length: int) -> None:
        self.length = length
        self._growth = growth
        self._index = index

    @property
    def is_sliding(self) -> bool:
        return self.kind.window > 0

    @property
    def kind(self) -> LayerKind:
        return self._growth.origin.kinds[self._index]

    @property
    def _store(self) -> LayerStore:
        return self._growth.buffer.layers[self._index]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._growth.claim.check()  # a call that nobody waits for ends at the next layer
        return self.append(key_states, value_states)

    @property
    def is_given_back(self) -> bool:
        """Whether nobody waits for what is appended."""
        return self._growth.claim.is_given_back

    def append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values after the others; those that the new tokens attend to, views."""
        growth, store, at = self._growth, self._store, self.length
        if store.keys is None and at:  # a fork's first write
            inherited = growth.origin.buffer.layers[self._index]
            growth.buffer.nbytes += store.copy_from(inherited, at, key_states, value_states, growth.expected)
        growth.buffer.nbytes += store.write(at, key_states, value_states, growth.expected)
        self.length += key_states.shape[-2]
        return store.view(self.kind.first_needed(at), self.length)

    def overwrite(self, positions: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values in place of those at these positions, ascending; only where the tail wrote itself."""
        store, at = self._store, positions - self._store.start
        assert store.keys is not None, "only what was written can be overwritten"
        assert store.values is not None
        store.keys.index_copy_(2, at, keys)
        store.values.index_copy_(2, at, values)

    def written(self, begin: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values from position `begin` to the end; views."""
        return self._store.view(begin, self.length)

    def bias(self, begin: int) -> torch.Tensor | None:
        """What is added to the scores of tokens `begin` to the last; None for nothing."""
        biases = self._growth.origin.biases
        if not biases:
            return None
        bias = biases[self._index][begin : self.length]
        return torch.nn.functional.pad(bias, (0, self.length - begin - len(bias)))

    def __deepcopy__(self, memo: dict[int, Any]) -> TailLayer:
        raise NotImplementedError("its forward copies the cache it is given, so what it writes can't be kept")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        begin = self.kind.first_needed(self.length)
        return self.length - begin + query_length, begin

    def get_seq_length(self) -> int:
        return self.length

    def get_max_length(self) -> int:
        return self.kind.window or -1

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
        return store.view(self.kind.first_needed(self.length), self.length) if self.length else (None, None)
