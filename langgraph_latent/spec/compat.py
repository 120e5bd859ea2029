"""The compatibility of two models: what can pass between them, and why not more. Pure; knows specs and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from langgraph_latent import public
from langgraph_latent.spec.spec import NO_IDENTITY, LayerSpec, ModelSpec


@public
class Level(IntEnum):
    """The exactness ladder: a smaller level promises more."""

    EXACT = 0
    MOVED = 1
    SIBLING = 2
    ADAPTED = 3
    TEXT = 4


NOT_SIBLINGS = {"architecture", "hidden_size", "layers", "rope", "config", "vocab_size", "tokenizer"}
"""Fields that must be equal where only the weights may differ: geometry and wording."""
MAY_BE_UNKNOWN = ("weights", "tokenizer", "template", "attention")
"""Fields that are "" in a spec that was read off files which don't tell."""
UNKNOWN = "unknown"
Fields = Mapping[str, Any]
SHOWN = 3
"""How many fields of a config, and kinds of layers, a difference names."""


@dataclass(frozen=True)
class Difference:
    """One field in which two specs differ, or may differ, with both values as short text."""

    field: str
    a: str
    b: str

    @property
    def is_known(self) -> bool:
        """False where one side's value is not known, or neither's."""
        return UNKNOWN not in (self.a, self.b)

    def __str__(self) -> str:
        return f"{self.field} {'differs' if self.is_known else 'may differ'} ({self.a} / {self.b})"


@dataclass(frozen=True)
@public
class Compatibility:
    """The best level that could be reached between two models, and every field that stands in the way of a better.

    `notes` say in sentences what would make more possible, and what the level promises.
    """

    level: Level
    differences: tuple[Difference, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(str(difference) for difference in self.differences)

    @property
    def could_be_exact(self) -> bool:
        """Whether all that stands in the way of EXACT is what is not known."""
        return self.level is Level.SIBLING and not any(difference.is_known for difference in self.differences)


@public
def compare(a: ModelSpec, b: ModelSpec) -> Compatibility:
    """Compare a sender's model with a receiver's, field by field.

    * EXACT: equal identity, with weights and a tokenizer that are known.
    * SIBLING: equal geometry and tokenizer. The same weights in another dtype, quantisation, attention implementation
      or under another chat template; other weights or adapters; or weights that are not known. Also where a field is in
      one of two config files only and its default is not known: it may differ.
    * TEXT: anything else.

    Where nothing that is known differs, `could_be_exact` says so; the level is what is proven.

    What the receiver's caches can't do is in the notes and does not change the level: it is a fact about one model, and
    the router weighs it.
    """
    if a.identity == b.identity and a.weights and a.tokenizer:
        differences: tuple[Difference, ...] = ()
    else:
        differences = tuple(_differences(a, b))
    differing = {difference.field for difference in differences if difference.is_known}
    level = Level.EXACT
    if differences:
        level = Level.TEXT if differing & NOT_SIBLINGS else Level.SIBLING
    return Compatibility(level, differences, tuple(_notes(a, b, level, differences)))


def _differences(a: ModelSpec, b: ModelSpec) -> Iterator[Difference]:
    for field in fields(ModelSpec):
        name = field.name
        ours, theirs = getattr(a, name), getattr(b, name)
        is_unknown = not ours and (name == "weights" or (name == "tokenizer" and bool(a.weights)))
        if name in NO_IDENTITY or (ours == theirs and not is_unknown):
            continue
        if name == "config" and a.config_fields and b.config_fields:
            yield _config_difference(json.loads(a.config_fields), json.loads(b.config_fields))
        elif name == "rope":
            yield Difference(name, *_differing_text(json.loads(ours or "{}"), json.loads(theirs or "{}")))
        elif name == "layers":
            yield Difference(name, *_layers_text(ours, theirs))
        else:
            yield Difference(name, *(_short(name, value) for value in (ours, theirs)))


def _config_difference(a: Fields, b: Fields) -> Difference:
    """What two configs say otherwise; not known where they only leave different fields unsaid, switches excepted."""
    differing = [name for name in a.keys() | b.keys() if a.get(name) != b.get(name)]
    known = [name for name in differing if (name in a and name in b) or isinstance(a.get(name, b.get(name)), bool)]
    ours, theirs = ({name: each[name] for name in known or differing if name in each} for each in (a, b))
    if known:
        return Difference("config", *_differing_text(ours, theirs))
    if ours and theirs:
        ours, theirs = {}, {**ours, **theirs}
    return Difference("config", *(_fields_text(each, sorted(each)) or UNKNOWN for each in (ours, theirs)))


def _differing_text(a: Fields, b: Fields) -> tuple[str, str]:
    """Where two sets of fields differ, as text for each side; nested values by their paths."""
    ours, theirs = dict(_leaves(a)), dict(_leaves(b))
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return _fields_text(ours, names) if a else "none", _fields_text(theirs, names) if b else "none"


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from _leaves(item, f"{path}.{name}" if path else str(name))
    if not isinstance(value, Mapping | list):
        yield path, value


def _fields_text(fields: Fields, names: Sequence[str]) -> str:
    shown = [f"{name} {_value_text(fields[name])}" if name in fields else f"{name} unsaid" for name in names[:SHOWN]]
    return ", ".join(shown + ([f"{len(names) - SHOWN} more"] if len(names) > SHOWN else []))


def _value_text(value: object) -> str:
    text = f"{value:.12g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _layers_text(a: tuple[LayerSpec, ...], b: tuple[LayerSpec, ...]) -> tuple[str, str]:
    """Layers counted by kind, as text for each side; where that is equal, the first layer that differs."""
    ours, theirs = (_counted(layers) for layers in (a, b))
    if ours != theirs:
        return ours, theirs
    at = next(index for index, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
    return f"layer {at}: {a[at]}", f"layer {at}: {b[at]}"


def _counted(layers: tuple[LayerSpec, ...]) -> str:
    kinds = Counter(map(str, layers)).most_common()
    more = [f"{sum(count for _, count in kinds[SHOWN:])} more"] if len(kinds) > SHOWN else []
    return "; ".join([f"{count} {kind}" for kind, count in kinds[:SHOWN]] + more) or "none"


def _short(field: str, value: object) -> str:
    if field in MAY_BE_UNKNOWN and not value:
        return UNKNOWN
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."


# -- what would help -------------------------------------------------------------------------------------------------

FOREIGN = "other geometry: text, or a fitted adapter with a certificate (level 3)"
REMEDIES = {
    "architecture": FOREIGN,
    "hidden_size": FOREIGN,
    "layers": FOREIGN,
    "vocab_size": "other vocabulary sizes: the same token ids can't be fed to both; text only",
    "rope": "other rope parameters: keys are turned by other angles; use the same rope settings, or text",
    "config": "other config fields shape the numbers: use the same config.json, or text",
    "tokenizer": "other tokenizer: the same text becomes other tokens; text only",
    "template": "other chat template: a cache stays valid token for token, but the next message is rendered otherwise; "
    "give both the same chat template for level 0",
    "adapters": "adapters differ: activate the same adapter in both for level 0",
    "quantization": "quantised differently, numbers differ by more than rounding: load both in the same quantisation, "
    "or in none",
    "attention": "other attention implementation, numbers differ by rounding: load both with the same one for level 0",
    "max_positions": "other longest sequences: caches are valid up to the shorter; use the same for level 0",
}
"""One sentence per kind of difference. What needs both specs is in `_notes`."""
WITHOUT = {
    "append": "only text reaches the receiver, whose caches can't be continued",
    "crop": "the receiver can't keep a prefix of a cache",
    "move": "the receiver can't move a cache, level 1 is refused",
    "think": "the receiver can't take latent steps",
}


def _notes(a: ModelSpec, b: ModelSpec, level: Level, differences: tuple[Difference, ...]) -> Iterator[str]:
    by_field = {difference.field: difference for difference in differences}
    known = {name for name, difference in by_field.items() if difference.is_known}
    yield from dict.fromkeys(REMEDIES[name] for name in by_field if name in known and name in REMEDIES)
    if level is not Level.TEXT:
        if a.sketch and a.sketch == b.sketch and "weights" in known:
            dtypes = f" ({a.dtype} and {b.dtype})" if a.dtype != b.dtype else ""
            yield (
                f"rounded copy of the same weights{dtypes}, by a sample of them: numbers differ by rounding; load one "
                "copy for both for level 0"
            )
        else:
            if "weights" in known and "quantization" not in known:
                yield "fine-tune of the same base, by its geometry: level 2 needs a certificate measured for this pair"
            if "dtype" in known:
                wider = _wider(a.dtype, b.dtype)
                yield f"other precision, numbers differ by rounding: load both in {wider} for level 0"
    if "config" in by_field and "config" not in known:
        yield f"{by_field['config']}: one config leaves it unsaid; save both with one transformers, or load both"
    if unknown := sorted(by_field.keys() - known - {"config"}):
        yield f"{' and '.join(unknown)} unknown: with the missing files, or the models loaded, more can be said"
    if by_field and not known:
        yield "could be exact: nothing that is known differs"
    missing = ("append",) if level is Level.TEXT else tuple(WITHOUT)
    for capability in missing:
        if reason := b.capabilities.refusal(capability):
            yield f"{WITHOUT[capability]}: {reason}"


def _wider(*dtypes: str) -> str:
    return next((dtype for dtype in ("float64", "float32") if dtype in dtypes), "float32")
