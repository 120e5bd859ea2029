"""One sequence's KV cache as an immutable value, and the right to append to it.

A `KVState` is a length over a `KVBuffer`; a `KVTail` writes after it, dressed as transformers' `Cache` for one model
call after another. Neither knows which model or tokens it is of.

Attention layers keep one entry per token and share storage. Every other kind of layer (recurrent and convolution
states, indexed and compressed attention, whatever comes) is opaque: transformers' own layer, copied where a sequence
goes on, and never cropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
from transformers.cache_utils import Cache

from langgraph_latent.kv.buffer import KVBuffer, LayerStore
from langgraph_latent.kv.claim import Claim
from langgraph_latent.kv.layers import Growth, LayerKind, TailLayer
from langgraph_latent.kv.opaque import copy_layer, move_layer, tensors_of


class KVState:
    """The cache of a sequence's first `num_tokens` tokens. Never changes; cropping and forking share memory.

    Attention layers hold keys and values, `(1, kv_heads, seq, head_dim)`, keys after RoPE at positions 0 .. num_tokens.

    Attributes:
        opaque_layers: per layer transformers' own layer where it is opaque, None where tokens are in the buffer.
        biases: per layer what is added to the scores of its first tokens in attention, (tokens,), float32; () for
            nothing anywhere.
        outside: ids of the handles whose tensors came from outside and are not proven, which it holds or was computed
            from; () where all of it was computed here.
    """

    __slots__ = ("biases", "buffer", "kinds", "num_tokens", "opaque_layers", "outside", "__weakref__")

    def __init__(
        self,
        buffer: KVBuffer,
        kinds: tuple[LayerKind, ...],
        num_tokens: int,
        opaque_layers: tuple[Any, ...] = (),
        biases: tuple[torch.Tensor, ...] = (),
        outside: tuple[str, ...] = (),
    ) -> None:
        self.buffer = buffer
        self.kinds = kinds
        self.num_tokens = num_tokens
        self.opaque_layers = opaque_layers or (None,) * len(kinds)
        self.biases = biases
        self.outside = outside
        buffer.add_view(self)

    @classmethod
    def empty(cls, kinds: tuple[LayerKind, ...], layers: Sequence[Any] = ()) -> KVState:
        """The state of no tokens; `layers` are `empty_layers` of the model where some are opaque."""
        opaque_layers = tuple(
            None if kind.has_tokens else layer for kind, layer in zip(kinds, layers, strict=bool(layers))
        )
        return cls(KVBuffer.empty(len(kinds)), kinds, 0, opaque_layers)

    @classmethod
    def from_layers(cls, kinds: tuple[LayerKind, ...], layers: Sequence[Any], num_tokens: int) -> KVState:
        """A state over given layers, taken over without a copy.

        A layer is a pair of keys and values (of its last tokens where it is sliding), or an opaque one.
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
        """Bytes of the opaque layers, which no other state shares."""
        return sum(tensor.nbytes for layer in self.opaque_layers if layer for tensor in tensors_of(layer).values())

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first attention layer's keys, `(batch, kv_heads, seq, head_dim)`; () where there is none."""
        for kind, tensors in zip(self.kinds, self.layers(), strict=False):
            if kind.has_tokens:
                return tuple(tensors[0].shape)
        return ()

    def tensors(self, index: int) -> dict[str, torch.Tensor]:
        """What the next token needs of a layer, by name; "keys" and "values" of an attention layer. Views."""
        kind = self.kinds[index]
        if not kind.has_tokens:
            return tensors_of(self.opaque_layers[index])
        keys, values = self.buffer.layers[index].view(kind.first_needed(self.num_tokens), self.num_tokens)
        return {"keys": keys, "values": values}

    def layer(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors alone of `tensors(index)`: keys and values of an attention layer."""
        return tuple(self.tensors(index).values())

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
        return KVState(self.buffer, self.kinds, num_tokens, self.opaque_layers, biases, self.outside)

    def with_biases(self, biases: tuple[torch.Tensor, ...]) -> KVState:
        """The same state, its tokens seen with these biases."""
        return KVState(self.buffer, self.kinds, self.num_tokens, self.opaque_layers, biases, self.outside)

    def with_outside(self, handles: Iterable[str]) -> KVState:
        """The same state, with tensors of more handles that are not proven in it."""
        outside = tuple(sorted({*self.outside, *handles}))
        return KVState(self.buffer, self.kinds, self.num_tokens, self.opaque_layers, self.biases, outside)

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
        return KVState.from_layers(self.kinds, moved, self.num_tokens).with_biases(biases).with_outside(self.outside)

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
        """Begin to append to this state; `expected` is the length to make room for, where it is known."""
        return KVTail(self, expected)


class KVTail:
    """The right to append to a state, as a context manager; `cache` goes to the model's forward.

    In place where the state ends its buffer and nobody else writes, otherwise in a copy made on the first write.

    Attributes:
        origin: the state that it continues.
        claim: on the buffer that is written to; a model call holds it while it writes.
    """

    def __init__(self, state: KVState, expected: int) -> None:
        buffer = state.buffer
        if not buffer.claim(state.num_tokens):
            buffer = KVBuffer.empty(len(state.kinds))
            buffer.claim(0)
        self.origin = state
        self.claim = Claim(buffer)
        growth = Growth(state, self.claim, expected)
        self._num_fed = state.num_tokens
        self._is_spoiled = False
        layers = [
            TailLayer(growth, index, state.num_tokens) if opaque is None else copy_layer(opaque)
            for index, opaque in enumerate(state.opaque_layers)
        ]
        self._layers = [layer for layer in layers if isinstance(layer, TailLayer)]
        self._cache = Cache(layers=layers)

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
        """For the model's forward. Raises `RuntimeError` where a failed call spoiled an opaque layer."""
        if self._is_spoiled:
            raise RuntimeError("a failed model call left this cache half-written, and its layers can't be cropped")
        return self._cache

    @property
    def num_tokens(self) -> int:
        """Tokens complete in every layer."""
        return min((layer.length for layer in self._layers), default=self._num_fed)

    def fed(self, num_tokens: int) -> None:
        """Note that a model call on `num_tokens` tokens succeeded: not every kind of layer counts them."""
        self._num_fed += num_tokens

    def seal(self) -> KVState:
        """The state of everything appended so far; of a spoiled tail only the one that it continues is left.

        Within a model call, of what was complete before it; nothing of it where a layer is opaque.
        """
        origin, buffer = self.origin, self.claim.buffer
        is_half_written = self._is_spoiled or (self.claim.is_writing and any(origin.opaque_layers))
        if self.num_tokens == origin.num_tokens or is_half_written:
            return origin
        opaque_layers = [
            None if kind.has_tokens else copy_layer(layer)
            for kind, layer in zip(origin.kinds, self._cache.layers, strict=True)
        ]
        return KVState(buffer, origin.kinds, self.num_tokens, tuple(opaque_layers), origin.biases, origin.outside)

    def rewind(self, num_tokens: int) -> None:
        """Forget what a failed model call wrote after the first `num_tokens` tokens."""
        self._num_fed = num_tokens
        for layer in self._layers:
            layer.length = num_tokens
        self._is_spoiled = any(not kind.has_tokens and kind.name != "none" for kind in self.origin.kinds)

    def close(self) -> None:
        """Give the tail back; what was not sealed is forgotten. Nothing may be appended after it."""
        self.claim.give_back()

    def __enter__(self) -> KVTail:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order, on the CPU; no copy where it is contiguous there already."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    data: Any = flat.numpy()
    return memoryview(data)
