"""The LoRA adapters that shape a model's answers right now, known by their content and not by their name."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

from langgraph_latent.kv.state import tensor_bytes

Layers = dict[str, tuple[Any, list[str]]]
"""Modules that an adapter is in, by name, with the names of the adapters that are active there."""


class AdapterWatch:
    """Watches the adapters of one model, through whichever of transformers' and PEFT's calls they change."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._known: tuple[list[Any], tuple[str, ...]] = ([], ())

    def active(self) -> tuple[str, ...]:
        """A digest per active adapter; () where there is none, or all are disabled.

        Read again only after an adapter was loaded, switched, scaled or written to.
        """
        if "peft" not in sys.modules:  # whoever adapts a model has imported it
            return ()
        layers = dict(_adapted_layers(self._model))
        now = [
            (name, adapter, _scaling(layer, adapter), _Same(part), part._version)
            for name, (layer, adapters) in layers.items()
            for adapter in adapters
            for _, part in _parts(layer, adapter)
        ]
        seen, digests = self._known
        if now != seen:
            digests = _digests(layers)
            self._known = (now, digests)
        return digests


class _Same:
    """Equal for one and the same tensor only, whatever it holds; keeps it, so that no other takes its place."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._tensor is self._tensor

    __hash__ = None  # type: ignore[assignment]


def _adapted_layers(model: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, list[str]]]]:
    for name, module in model.named_modules():
        layer: Any = module
        if hasattr(layer, "active_adapters") and hasattr(layer, "base_layer") and not layer.disable_adapters:
            yield name, (layer, [*layer.active_adapters])


def _digests(layers: Layers) -> tuple[str, ...]:
    by_adapter: dict[str, Any] = {}
    for name, (layer, adapters) in layers.items():
        for adapter in adapters:
            digest = by_adapter.setdefault(adapter, hashlib.sha256())
            for part, tensor in _parts(layer, adapter):
                digest.update(f"{name}.{part}{tuple(tensor.shape)}{tensor.dtype}{_scaling(layer, adapter)}".encode())
                digest.update(tensor_bytes(tensor))
    return tuple(sorted(digest.hexdigest() for digest in by_adapter.values()))


def _parts(layer: Any, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """An adapter's own tensors in a layer, without its name."""
    for name, tensor in layer.named_parameters():
        path = name.split(".")
        if adapter in path and path[0] != "base_layer":
            yield ".".join(part for part in path if part != adapter), tensor


def _scaling(layer: Any, adapter: str) -> Any:
    return getattr(layer, "scaling", {}).get(adapter)
