"""transformers' own cache layers as values: copied, moved and taken apart by name, whatever they hold.

For the layers of a `KVState` that are opaque. Nothing here knows what a layer means.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

Leaf = Any
"""What a layer holds in the end: a tensor, a number, text, None, a dtype or a device."""


def copy_layer(layer: Any) -> Any:
    """A layer with copies of its tensors; nothing that is written to one is seen in the other."""
    return _mapped(layer, lambda _, leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf)


def move_layer(layer: Any, device: torch.device | None) -> Any:
    """A layer with its tensors on a device; itself for None, which is any."""
    if device is None:
        return layer

    def moved(_: str, leaf: Leaf) -> Leaf:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        return device if isinstance(leaf, torch.device) else leaf

    return _mapped(layer, moved)


def fill_layer(layer: Any, leaves: dict[str, Leaf]) -> Any:
    """A layer like the given one with these leaves in place of its own; other ones stay."""
    return _mapped(layer, leaves.get)


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    """A layer's tensors by path, for example "conv_states.0"."""
    return {path: leaf for path, leaf in _leaves(vars(layer)) if isinstance(leaf, torch.Tensor)}


def plain_of(layer: Any) -> dict[str, bool | int | float | str | None]:
    """A layer's numbers, texts and None by path; dtypes and devices left out."""
    return {
        path: leaf for path, leaf in _leaves(vars(layer)) if leaf is None or isinstance(leaf, bool | int | float | str)
    }


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Leaf]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        yield from _leaves(dict(enumerate(value)), path)
    else:
        yield path, value


def _mapped(layer: Any, change: Callable[[str, Leaf], Leaf]) -> Any:
    """A shallow copy of a layer whose leaves, by path, were changed; containers are copied."""
    other = copy.copy(layer)
    vars(other).update({name: _changed(value, name, change) for name, value in vars(layer).items()})
    return other


def _changed(value: Any, path: str, change: Callable[[str, Leaf], Leaf]) -> Any:
    if isinstance(value, dict):
        return {key: _changed(item, f"{path}.{key}", change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, f"{path}.{index}", change) for index, item in enumerate(value))
    return change(path, value)
