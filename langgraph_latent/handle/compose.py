"""Which tokens of which caches become one: selecting, composing and merging handles. Pure; it knows no tensors.

What comes out is a handle like any other. Its cache is made where it is first needed, and only on edges whose policy
allows level 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.handle import SEGMENT_KINDS, KVHandle, Message, Span, tokens_of
from langgraph_latent.handle.provenance import MAX_WEIGHT, Block, Composition, Repair
from langgraph_latent.handle.tokens import TOKEN_BYTES

MAX_BLOCKS = 4096
"""Blocks in one composition."""


EVERY_KIND = frozenset(SEGMENT_KINDS)
NOT_SYSTEM = EVERY_KIND - {"system"}


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} is one value; pass a list")
    return value


def _names(name: str, value: Any) -> frozenset[str]:
    names = list(_listed(name, value))
    if not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{name}={value!r} holds what is no name")
    return frozenset(names)


@dataclass(frozen=True)
class Selection:
    """Which part of a handle is taken; everything but system prompts by default. Conditions are joined by "and".

    Attributes:
        kinds: of segments: "system", "prompt", "generated", "latent"; by default all but system prompts.
        sources: nodes that added them.
        spans: tokens (begin, end) of the handle, in order and not overlapping.
        answer_only: only the last sampled answer.
        layers: in which it is seen; None for all. In the others it is as if it were not there, as in KVComm (arXiv
            2510.03346).
        weight: what it counts in attention: the logarithm is added to its scores. 1 changes nothing, 0 leaves it out.

    Raises `ConfigError` for impossible values.
    """

    kinds: frozenset[str] = NOT_SYSTEM
    sources: frozenset[str] | None = None
    spans: tuple[tuple[int, int], ...] | None = None
    answer_only: bool = False
    layers: tuple[int, ...] | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("kinds", "sources"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ConfigError(f"{name}={value!r} is text; pass a list of names")
            if value is not None or name == "kinds":
                object.__setattr__(self, name, _names(name, value))
        if unknown := sorted(self.kinds - EVERY_KIND):
            raise ConfigError(f"unknown segment kind {unknown[0]!r}; known kinds: {', '.join(SEGMENT_KINDS)}")
        if self.spans is not None:
            object.__setattr__(self, "spans", tuple(_checked_spans(_listed("spans", self.spans))))
            if not self.spans:
                raise ConfigError("spans=() takes nothing; name one span or more, or leave it out for all")
        if (
            not isinstance(self.weight, int | float)
            or isinstance(self.weight, bool)
            or not 0 <= self.weight < MAX_WEIGHT
        ):
            raise ConfigError(f"weight={self.weight!r} is impossible; it is a number from 0 on")
        if self.layers is not None:
            object.__setattr__(self, "layers", tuple(_listed("layers", self.layers)))

    def check_layers(self, num_layers: int) -> None:
        """Raise `ConfigError` where it names layers that a model of so many does not have, or none."""
        if self.layers is not None and not (self.layers and all(layer in range(num_layers) for layer in self.layers)):
            raise ConfigError(f"layers={self.layers!r} is impossible; name at least one of 0 to {num_layers - 1}")

    def takes(self, span: Span) -> bool:
        """Whether it takes tokens of this span, `spans` and `answer_only` apart."""
        return span.kind in self.kinds and (self.sources is None or span.source in self.sources)


WHOLE = Selection()


def _checked_spans(spans: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    before = 0
    for span in spans:
        if (
            not isinstance(span, Sequence)
            or len(span) != 2
            or not all(type(each) is int for each in span)
            or not 0 <= span[0] < span[1]
        ):
            raise ConfigError(f"the span {span!r} is impossible; it is (begin, end) in tokens, begin before end")
        if span[0] < before:
            raise ConfigError(f"the span {span!r} overlaps the one before it, or comes before it; order and part them")
        before = span[1]
        yield (span[0], span[1])


class Part(NamedTuple):
    """Blocks that are taken from one handle, and what they say."""

    blocks: list[Block]
    messages: list[Message]


def part_of(handle: KVHandle, selection: Selection, behind: int = 0) -> Part:
    """What a selection takes of a handle's tokens from `behind` on.

    Messages are told whole where any of their tokens is taken. Raises `ConfigError` where it takes nothing, and for
    spans outside of the handle.
    """
    part = _taken(handle, selection, behind)
    if not part.blocks:
        raise ConfigError(f"nothing of {handle!r} is selected by {selection}")
    return part if selection.weight else Part([], [])


def _rest(handle: KVHandle, selection: Selection, behind: int) -> Part:
    """What a selection takes from `behind` on, be it nothing; the selection itself must take something."""
    return _taken(handle, selection, behind) if part_of(handle, selection).blocks else Part([], [])


def _taken(handle: KVHandle, selection: Selection, behind: int) -> Part:
    """The same, be it nothing; what weighs nothing, too."""
    if selection.spans and selection.spans[-1][1] > handle.num_tokens:
        raise ConfigError(f"the span {selection.spans[-1]} is not in a handle of {handle.num_tokens} tokens")
    first = handle.num_tokens - handle.num_sampled if selection.answer_only else behind
    if selection.answer_only and not handle.num_sampled:
        raise ConfigError(f"answer_only: {handle!r} does not end with an answer")
    wanted, messages = list[tuple[int, int]](), list[Message]()
    told: tuple[Message, ...] = ()
    for span in handle.spans:
        pieces = list(_within(span, selection, max(first, behind))) if selection.takes(span) else []
        wanted += pieces
        if pieces and span.messages is not told:  # two parts of one segment, composed before, say the same
            messages += span.messages
            told = span.messages
    weight = selection.weight or 1.0
    return Part([Block(handle, begin, end, weight, selection.layers) for begin, end in _joined(wanted)], messages)


def _within(span: Span, selection: Selection, first: int) -> Iterator[tuple[int, int]]:
    for begin, end in selection.spans or ((0, span.end),):
        begin, end = max(begin, span.begin, first), min(end, span.end)
        if begin < end:
            yield begin, end


def _joined(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def merge(handles: Sequence[KVHandle], *, repair: Repair | None = None) -> KVHandle:
    """One handle of several: the first one as it is, and behind it what is new in each other one, in the given order.

    What all share from the start is kept once, and so is a system prompt: the first one's. One handle is itself.

    Raises `HandleError` for handles of several models or tenants, and `ConfigError` for none or too many blocks.
    """
    if not isinstance(handles, list | tuple) or not handles:
        raise ConfigError("there is nothing to merge; pass a list of at least one handle")
    _check_alike(handles)
    lead, *others = without_contained(handles) or handles[:1]
    begin = _shared_tokens([lead, *others])
    parts = [_taken(other, WHOLE, begin) for other in others]  # nothing of one that adds but a system prompt
    return composed(lead, parts, repair)


def behind(
    head: KVHandle, handles: Sequence[KVHandle], selections: Sequence[Selection], repair: Repair | None = None
) -> KVHandle:
    """Selected parts of handles, one selection each, moved behind a head of the reader's own.

    What all handles share from the start is taken once. Where the first one begins with that very head and everything
    behind is taken, it is not moved but continued.

    Raises what `merge` raises.
    """
    if not handles:
        raise ConfigError("there is nothing to compose; pass at least one handle")
    _check_alike([head, *handles])
    num_shared = _shared_tokens(handles) if len(handles) > 1 else 0
    pairs = [*zip(handles, selections, strict=True)]
    if selections[0] == WHOLE and _begins_with(handles[0], head):
        return composed(handles[0], [_rest(*pair, num_shared) for pair in pairs[1:]], repair)
    (first, taken), *others = pairs
    # What the first selection leaves out of what is shared is not taken yet where another one takes it.
    begins = [num_shared if selection == taken or taken == WHOLE else 0 for _, selection in others]
    later = [_rest(*pair, begin) for pair, begin in zip(others, begins, strict=True)]
    return composed(head, [part_of(first, taken), *later], repair)


def system_prefix_of(handle: KVHandle) -> KVHandle:
    """The handle of a handle's leading system prompt alone, of no tokens where it has none."""
    leading = itertools.takewhile(lambda segment: segment.kind == "system", handle.segments)
    return handle.first(len(list(leading)))


def _begins_with(handle: KVHandle, head: KVHandle) -> bool:
    """Whether a handle's system prompt is the head, token for token."""
    system = [*itertools.takewhile(lambda span: span.kind == "system", handle.spans)]
    return handle.tokens[: (system[-1].end if system else 0) * TOKEN_BYTES] == head.tokens


def _check_alike(handles: Sequence[KVHandle]) -> None:
    lead = handles[0]
    for other in handles:
        if not isinstance(other, KVHandle):
            raise HandleError(f"{other!r} is no KVHandle; `workspace.handle(reply)` gives a reply's")
        if (other.model, other.tenant) != (lead.model, lead.tenant):
            raise HandleError(
                f"handles {lead.id} and {other.id} are of different models or tenants; merge those of one"
            )


def without_contained(handles: Sequence[KVHandle]) -> list[KVHandle]:
    """The handles without empty ones, doubles and those that another one continues."""
    return [
        handle
        for index, handle in enumerate(handles)
        if handle.tokens
        and not any(
            _continues(other, handle) and (other.num_tokens > handle.num_tokens or at < index)
            for at, other in enumerate(handles)
            if at != index
        )
    ]


def _continues(other: KVHandle, handle: KVHandle) -> bool:
    is_alike = other.model == handle.model and other.tokens.startswith(handle.tokens)
    return is_alike and (
        other.provenance_digest == handle.provenance_digest
        or (not handle.provenance_digest and other.num_plain >= handle.num_tokens)
    )


def _shared_tokens(handles: Sequence[KVHandle]) -> int:
    """How many tokens the segments have that all handles begin with."""
    rows = zip(*(handle.segments for handle in handles), strict=False)
    shared = itertools.takewhile(lambda row: len({segment.digest for segment in row}) == 1, rows)
    return sum(row[0].num_tokens for row in shared)


def repaired(handle: KVHandle, repair: Repair | None) -> KVHandle:
    """A handle whose last segment is composed and not repaired yet, with that repair; any other one as it is."""
    last = handle.segments[-1] if handle.segments else None
    if repair is None or last is None or not isinstance(last.provenance, Composition) or last.provenance.repair:
        return handle
    before = handle.first(len(handle.segments) - 1)
    tokens, size = handle.tokens[len(before.tokens) :], handle.nbytes // handle.num_tokens
    provenance = replace(last.provenance, repair=repair)
    return before.extend(
        last.kind, last.source, tokens, last.messages, size, inputs_digest=last.inputs_digest, provenance=provenance
    )


def composed(base: KVHandle, parts: Sequence[Part], repair: Repair | None = None) -> KVHandle:
    """A handle of a base and, moved behind it, blocks of others; the base itself where there are none.

    Raises `ConfigError` for too many blocks.
    """
    blocks = [block for part in parts for block in part.blocks]
    if not blocks:
        return base
    if len(blocks) > MAX_BLOCKS:
        raise ConfigError(f"{len(blocks):,} blocks are more than {MAX_BLOCKS:,}; select fewer and longer spans")
    last = blocks[-1].handle
    size = max(block.handle.nbytes // block.handle.num_tokens for block in blocks)
    return base.extend(
        "moved",
        last.source,
        tokens_of(blocks),
        [message for part in parts for message in part.messages],
        size,
        inputs_digest=last.segments[-1].inputs_digest,
        provenance=Composition(tuple(blocks), repair),
    )
