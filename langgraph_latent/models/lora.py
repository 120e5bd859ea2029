"""The LoRA adapters that shape a model's answers right now, told by their content and not by their name."""

from __future__ import annotations

import hashlib
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
        self._seen: object = None
        self._digests: tuple[str, ...] = ()

    def active(self) -> tuple[str, ...]:
        """A digest per active adapter; () where there is none, or all are disabled.

        Read again only after an adapter was loaded, switched, scaled or written to.
        """
        if not getattr(self._model, "_hf_peft_config_loaded", False):
            return ()
        layers = dict(_adapted_layers(self._model))
        now = [
            (name, adapter, _scaling(layer, adapter), [(id(part), part._version) for _, part in _parts(layer, adapter)])
            for name, (layer, adapters) in layers.items()
            for adapter in adapters
        ]
        if now != self._seen:
            self._seen, self._digests = now, _digests(layers)
        return self._digests


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
