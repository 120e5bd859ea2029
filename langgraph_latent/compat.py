"""The compatibility matrix: what can pass between two models, and why not more. Pure; knows specs and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from enum import IntEnum

from langgraph_latent.spec import ModelSpec


class Level(IntEnum):
    """The exactness ladder: a smaller level promises more."""

    EXACT = 0
    MOVED = 1
    SIBLING = 2
    ADAPTED = 3
    TEXT = 4


NOT_SIBLINGS = {"architecture", "hidden_size", "layers", "rope", "config", "schema", "vocab_size", "tokenizer"}
"""Fields that must be equal where only the weights may differ: geometry and wording."""


@dataclass(frozen=True)
class Difference:
    """One field in which two specs differ, with both values as short text."""

    field: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.field} differs ({self.a} / {self.b})"


@dataclass(frozen=True)
class Compatibility:
    """The best level that could be reached between two models, and every field that stands in the way of a better."""

    level: Level
    differences: tuple[Difference, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(str(difference) for difference in self.differences)


def compare(a: ModelSpec, b: ModelSpec) -> Compatibility:
    """Compare two models field by field.

    Equal identity is EXACT. Equal geometry and tokenizer with other weights is SIBLING. Anything else is TEXT.
    """
    if a.identity == b.identity:
        return Compatibility(Level.EXACT)
    differences = tuple(
        Difference(field.name, _short(getattr(a, field.name)), _short(getattr(b, field.name)))
        for field in fields(ModelSpec)
        if field.name != "name" and getattr(a, field.name) != getattr(b, field.name)
    )
    differing = {difference.field for difference in differences}
    level = Level.TEXT if differing & NOT_SIBLINGS else Level.SIBLING
    return Compatibility(level, differences)


def _short(value: object) -> str:
    if isinstance(value, tuple):
        kinds = Counter(map(str, value))
        return ", ".join(f"{count} x {kind}" for kind, count in kinds.most_common(3)) or "none"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
