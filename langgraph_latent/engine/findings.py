"""What a probe found out about a model's caches, as plain values: written to disk, read back and checked there.

It knows kinds of layers and rotations by name; how a model is probed is not its business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from langgraph_latent.checks import is_whole_number
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.rope import LAYOUTS, LayerRotation, RotationSpec
from langgraph_latent.spec.spec import CAPABILITIES, Capabilities

VERSION = 10
"""Of the probe's claims and their texts: stored findings of another version are not believed."""
FINDINGS_FILE = "probes.json"
"""Where they are stored, in the library's cache directory."""


@dataclass(frozen=True)
class Findings:
    """What a probe found.

    Attributes:
        takes_mask, gives_positions: whether the model's forward is to be given an attention mask, and position ids.
        is_stepwise: over a cache, it takes one token at a time only.
        refusals: (capability, reason) for what can't be done.
        positions: where positions come from, for people.
        rotations: per layer, how its keys and its values carry positions; None where they carry none.
    """

    takes_mask: bool = True
    gives_positions: bool = False
    is_stepwise: bool = False
    refusals: tuple[tuple[str, str], ...] = ()
    positions: str = ""
    rotations: tuple[LayerRotation, ...] = ()
    is_probed: bool = True

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(self.refusals, self.positions, self.is_probed)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Findings:
        """Raises `KeyError`, `TypeError` or `ValueError` for what `to_dict` did not make."""
        return cls(
            takes_mask=_flag(data["takes_mask"]),
            gives_positions=_flag(data["gives_positions"]),
            is_stepwise=_flag(data["is_stepwise"]),
            refusals=tuple(map(_refusal, data["refusals"])),
            positions=str(data["positions"]),
            rotations=tuple((_spec(keys), _spec(values)) for keys, values in data["rotations"]),
        )

    def checked(self, num_layers: int, frequencies: Collection[str]) -> Findings:
        """Itself. Raises `ValueError` where it can't be of a model of so many layers and these frequencies."""
        names = {spec.frequencies for layer in self.rotations for spec in layer if spec}
        if len(self.rotations) != num_layers or not names <= set(frequencies):
            raise ValueError("these findings are of another model")
        return self


def _spec(fields: Sequence[Any] | None) -> RotationSpec | None:
    if fields is None:
        return None
    spec = RotationSpec(*fields)
    if spec.layout not in LAYOUTS or not is_whole_number(spec.begin, 0) or spec.direction not in (1, -1):
        raise ValueError(f"{spec} is not a rotation")
    return spec


def _refusal(fields: Sequence[Any]) -> tuple[str, str]:
    name, reason = fields
    if name not in CAPABILITIES or not isinstance(reason, str):
        raise ValueError(f"{fields} is not a refusal")
    return name, reason


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value


def unprobed(kinds: Sequence[LayerKind]) -> Findings:
    """What is promised without a probe: what the kinds of layers prove, and nothing that needs a proof."""
    skipped = "the probe was skipped"
    refusals = [("move", skipped), ("think", skipped), ("batch", skipped)]
    return Findings(refusals=(*opaque_refusals(kinds), *refusals), positions="not probed", is_probed=False)


def opaque_refusals(kinds: Sequence[LayerKind]) -> list[tuple[str, str]]:
    """What a model's opaque layers rule out: (capability, reason)."""
    opaque = Counter(kind.name for kind in kinds if not kind.has_tokens and kind.name != "none")
    if not opaque:
        return []
    names = ", ".join(f"{count} {name}" for name, count in opaque.items())
    return [("crop", f"it has opaque layers ({names}): no part of their state can be taken back")]
