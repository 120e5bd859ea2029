"""Keys at other positions: rotated by the difference, with the model's own frequencies, in float32.

Linear, llama3 and YaRN scaling only change the frequencies; an attention factor is in the keys already and is not
applied again. Which frequencies, channels and layout a layer uses is found by trying them on keys that the model itself
made at two positions (`find_rotation`), so no list of model names is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

Layout = Literal["half-split", "interleaved"]
LAYOUTS: tuple[Layout, ...] = ("half-split", "interleaved")


class RotationSpec(NamedTuple):
    """A rotation in plain values.

    Attributes:
        frequencies: which of the model's, by name.
        layout: how channels are paired.
        begin: the first channel.
        direction: 1, or -1 where positions turn the other way.
    """

    frequencies: str
    layout: Layout
    begin: int
    direction: int = 1


LayerRotation = tuple[RotationSpec | None, RotationSpec | None]
"""Of a layer's keys and values; None where they carry no position."""


@dataclass(frozen=True)
class Rotation:
    """How a tensor of shape (..., seq, channels) carries positions: pairs of channels turn by position x frequency.

    Attributes:
        inv_freq: radians per position for each pair of channels, (pairs,), float32.
        layout: "half-split" pairs channel i with i + pairs, "interleaved" pairs 2i with 2i + 1.
        begin: the first channel that is rotated; the ones outside stay.
    """

    inv_freq: torch.Tensor
    layout: Layout
    begin: int = 0

    def __str__(self) -> str:
        return f"{self.layout}, {2 * len(self.inv_freq)} channels from {self.begin}"

    def shift(self, keys: torch.Tensor, delta: int | torch.Tensor) -> torch.Tensor:
        """Keys moved by `delta` positions, one number or one per token, (seq,). A new tensor of the keys' dtype."""
        inv_freq = self.inv_freq.to(keys.device)
        deltas = torch.as_tensor(delta, dtype=torch.float32, device=keys.device).reshape(-1, 1)
        angles = deltas * inv_freq  # (seq or 1, pairs)
        end = self.begin + 2 * len(inv_freq)
        first, second = self._pairs(keys[..., self.begin : end].float())
        turned = (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin())
        rotated = torch.cat(turned, -1) if self.layout == "half-split" else torch.stack(turned, -1).flatten(-2)
        return torch.cat([keys[..., : self.begin], rotated.to(keys.dtype), keys[..., end:]], -1)

    def _pairs(self, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.layout == "half-split":
            first, second = channels.chunk(2, -1)
            return first, second
        return channels[..., 0::2], channels[..., 1::2]


def frequencies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The frequencies that a model's rotary modules hold, by the name of their buffer, each once.

    Buffers named `...inv_freq`, and tables of sines beside cosines by position, as GPT-J and RoFormer keep them.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        inv_freq = tensor.float() if name.endswith("inv_freq") else _from_table(tensor.detach())
        if inv_freq is not None and not any(torch.equal(inv_freq, known) for known in found.values()):
            found[name] = inv_freq
    return found


def _from_table(buffer: torch.Tensor) -> torch.Tensor | None:
    """The frequencies of a table (positions, sines and cosines), None for any other buffer."""
    if buffer.dim() != 2 or not buffer.is_floating_point() or buffer.shape[0] < 2 or buffer.shape[1] % 2:
        return None
    sines, cosines = buffer[1].float().chunk(2)
    error = 1e-3 if buffer.dtype.itemsize > 2 else 2e-2
    if not torch.allclose(sines**2 + cosines**2, torch.ones_like(sines), atol=error):
        return None
    inv_freq = torch.atan2(sines, cosines)
    row = 2
    while row < len(buffer):  # each row is twice as exact as the one before, if only up to whole turns
        missing = torch.atan2(*buffer[row].float().chunk(2)) - row * inv_freq
        inv_freq = inv_freq + torch.remainder(missing + math.pi, 2 * math.pi).sub(math.pi) / row
        row *= 2
    return inv_freq


def find_rotation(
    before: torch.Tensor, after: torch.Tensor, delta: int, known: Mapping[str, torch.Tensor], tolerance: float
) -> RotationSpec | None:
    """The rotation that turns `before` into `after`, the same tokens' keys `delta` positions later; None if none does.

    Errors count relative to the largest value.
    """
    scale = float(after.float().abs().max().clamp(min=1e-6))
    errors = {
        spec: float((rotation.shift(before, delta).float() - after.float()).abs().max()) / scale
        for spec, rotation in _rotations(known, before.shape[-1])
    }
    best = min(errors, key=lambda spec: errors[spec], default=None)
    return best if best is not None and errors[best] <= tolerance else None


def rotation_of(spec: RotationSpec, known: Mapping[str, torch.Tensor]) -> Rotation:
    return Rotation(spec.direction * known[spec.frequencies].cpu(), spec.layout, spec.begin)


Rotations = tuple[tuple[Rotation | None, Rotation | None], ...]
"""Per layer, how its keys and its values carry positions."""


def rotations_of(specs: Sequence[LayerRotation], known: Mapping[str, torch.Tensor]) -> Rotations:
    """The rotations that these name among a model's known frequencies."""
    return tuple((keys and rotation_of(keys, known), values and rotation_of(values, known)) for keys, values in specs)


def _rotations(known: Mapping[str, torch.Tensor], channels: int) -> Iterator[tuple[RotationSpec, Rotation]]:
    for name, inv_freq in known.items():
        width = 2 * len(inv_freq)
        for layout in LAYOUTS if width <= channels else ():
            for begin, direction in itertools.product(dict.fromkeys((0, channels - width)), (1, -1)):
                spec = RotationSpec(name, layout, begin, direction)
                yield spec, rotation_of(spec, known)
