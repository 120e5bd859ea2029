"""`Selection`: which tokens of a handle are taken; and the excerpt of these. It does not know what is made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from langgraph_latent import public
from langgraph_latent.checks import is_number, is_whole_number
from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message, Span
from langgraph_latent.handle.segment import MAX_WEIGHT, SEGMENT_KINDS, Block

EVERY_KIND = frozenset(SEGMENT_KINDS)
NOT_SYSTEM = EVERY_KIND - {"system"}


@dataclass(frozen=True)
@public
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
        if not is_number(self.weight) or not 0 <= self.weight < MAX_WEIGHT:
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


def _listed(name: str, value: Any) -> Iterable[Any]:
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name}={value!r} is one value; pass a list")
    return value


def _names(name: str, value: Any) -> frozenset[str]:
    names = list(_listed(name, value))
    if not all(isinstance(each, str) for each in names):
        raise ConfigError(f"{name}={value!r} holds what is not a name")
    return frozenset(names)


def _checked_spans(spans: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    before = 0
    for span in spans:
        is_pair = isinstance(span, Sequence) and len(span) == 2 and all(map(is_whole_number, span))
        if not is_pair or not 0 <= span[0] < span[1]:
            raise ConfigError(f"the span {span!r} is impossible; it is (begin, end) in tokens, begin before end")
        if span[0] < before:
            raise ConfigError(f"the span {span!r} overlaps the one before it, or comes before it; order and part them")
        before = span[1]
        yield (span[0], span[1])


WHOLE = Selection()


class Excerpt(NamedTuple):
    """Blocks that are taken from one handle, and their messages."""

    blocks: list[Block]
    messages: list[Message]


def excerpt_of(handle: KVHandle, selection: Selection, begin: int = 0) -> Excerpt:
    """What a selection takes of a handle's tokens from `begin` on.

    Where any token of a message is taken, the excerpt has the full message. Raises `ConfigError` where nothing is
    taken, and for spans outside of the handle.
    """
    excerpt = excerpt_if_any(handle, selection, begin)
    if not excerpt.blocks:
        raise ConfigError(f"nothing of {handle!r} is selected by {selection}")
    return excerpt if selection.weight else Excerpt([], [])


def excerpt_if_any(handle: KVHandle, selection: Selection, begin: int) -> Excerpt:
    """`excerpt_of`, but for two things: it may be empty, and has what a weight of 0 leaves out."""
    if selection.spans and selection.spans[-1][1] > handle.num_tokens:
        raise ConfigError(f"the span {selection.spans[-1]} is not in a handle of {handle.num_tokens} tokens")
    if selection.answer_only and not handle.num_sampled:
        raise ConfigError(f"answer_only: {handle!r} does not end with an answer")
    first = max(begin, handle.num_tokens - handle.num_sampled) if selection.answer_only else begin
    wanted, messages = list[tuple[int, int]](), list[Message]()
    before: tuple[Message, ...] = ()
    for span in handle.spans:
        pieces = list(_within(span, selection, first)) if selection.takes(span) else []
        wanted += pieces
        if pieces and span.messages is not before:  # neighbouring spans of one segment have the same
            messages += span.messages
            before = span.messages
    weight = selection.weight or 1.0
    return Excerpt([Block(handle, *each, weight, selection.layers) for each in _joined(wanted)], messages)


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
