"""Several sequences in one model call, a packed batch: attention is given the keys of each where they lie.

In the same way one tail is given to calls that overwrite tokens or that end early. Nothing here knows models or text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from langgraph_latent.errors import RequestCancelledError
from langgraph_latent.kv.buffer import KVBuffer
from langgraph_latent.kv.layers import TailLayer
from langgraph_latent.kv.state import KVTail


class PackedSequence(NamedTuple):
    """One sequence of a packed batch: what its new tokens attend to.

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


class SharedPrefix(NamedTuple):
    """Sequences of a packed batch, by index, that began as one and have one new token each.

    Their first `num_tokens` keys and values are equal.
    """

    sequences: list[int]
    num_tokens: int


class PackedKeys(torch.Tensor):
    """The new keys of a packed batch, (1, kv_heads, seq, head_dim), that carry what each sequence attends to.

    Attributes:
        sequences: the batch, in the order of the new keys.
        shared_prefixes: which of them have their first keys and values in common.
        window: the layer's sliding window, 0 where it attends to everything.
    """

    sequences: list[PackedSequence]
    shared_prefixes: list[SharedPrefix]
    window: int


def packed_cache(tails: Sequence[KVTail], sizes: Sequence[int]) -> Cache:
    """Several sequences' tails as one `Cache`, for a forward over their new tokens side by side, (1, seq).

    What a layer hands to attention are `PackedKeys`: only an attention function that knows them can use this cache.
    """
    shared_prefixes = _shared_prefixes(tails, sizes)
    layers = zip(*(tail.cache.layers for tail in tails), strict=True)
    return Cache(layers=[_PackedLayer(each, sizes, shared_prefixes) for each in layers])


def _shared_prefixes(tails: Sequence[KVTail], sizes: Sequence[int]) -> list[SharedPrefix]:
    by_buffer: dict[KVBuffer, list[int]] = {}
    for index, (tail, size) in enumerate(zip(tails, sizes, strict=True)):
        if size == 1:
            by_buffer.setdefault(tail.origin.buffer, []).append(index)
    return [
        SharedPrefix(sequences, min(tails[index].origin.num_tokens for index in sequences))
        for sequences in by_buffer.values()
        if len(sequences) > 1
    ]


class _PackedLayer(CacheLayerMixin):
    """One layer of several tails. To the model it looks empty: the attention function makes each sequence's mask."""

    is_croppable = False
    is_initialized = True
    is_sliding = False

    def __init__(self, layers: Sequence[Any], sizes: Sequence[int], shared_prefixes: list[SharedPrefix]) -> None:
        self._layers = layers
        self._sizes = list(sizes)
        self._shared_prefixes = shared_prefixes

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if all(layer.is_given_back for layer in self._layers):
            raise RequestCancelledError("whoever asked has gone")
        new_keys, new_values = key_states.split(self._sizes, -2), value_states.split(self._sizes, -2)
        packed = key_states.as_subclass(PackedKeys)
        packed.sequences = [self._write(*each) for each in zip(self._layers, new_keys, new_values, strict=True)]
        packed.shared_prefixes = self._shared_prefixes
        packed.window = self._layers[0].get_max_length() if self._layers[0].is_sliding else 0
        return packed, value_states

    def _write(self, layer: TailLayer, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        """Append one sequence's new tokens; what they attend to."""
        begin = layer.kind.first_needed(layer.length)
        return PackedSequence(keys.shape[-2], *layer.append(keys, values), layer.bias(begin))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to prepare: every sequence has its own storage."""


def repair_cache(tail: KVTail, positions: torch.Tensor) -> Cache:
    """A tail as a `Cache` for a forward that recomputes the tokens at these positions, ascending, and overwrites them.

    What a layer hands to attention are `PackedKeys`, as with `packed_cache`.
    """
    return Cache(layers=[_RepairLayer(layer, positions) for layer in tail.layers])


class _RepairLayer(_PackedLayer):
    """One layer of a tail whose tokens are recomputed."""

    def __init__(self, layer: TailLayer, positions: torch.Tensor) -> None:
        super().__init__([layer], [len(positions)], [])
        self._positions = positions

    def _write(self, layer: TailLayer, keys: torch.Tensor, values: torch.Tensor) -> PackedSequence:
        layer.overwrite(self._positions, keys, values)
        begin = layer.kind.first_needed(int(self._positions[0]))
        return PackedSequence(len(self._positions), *layer.written(begin), layer.bias(begin), self._positions - begin)


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
