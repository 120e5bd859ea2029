"""A run of a handle's tokens: what it says, and how its cache came about where it was not read in its place.

It knows no pools and no models; a handle only as what blocks are taken from.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langgraph_latent.checks import is_number, is_whole_number
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.message import Message, Span, digested
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.tokens import TOKEN_BYTES

Handle = Any
"""A `KVHandle`, which is made of segments: its module imports this one."""
MAX_DEPTH = 64
"""How often blocks may be taken of what has blocks."""
MAX_WEIGHT = 1e9
SEGMENT_KINDS = ("system", "prompt", "generated", "latent", "moved")
"""system: what leads a conversation, the template's own words included; prompt: what was read; generated: what was
sampled; latent: latent steps; moved: blocks of other caches."""


@dataclass(frozen=True)
class Block:
    """Tokens `begin` to `end` of another handle's cache, as they are there, put at another position.

    Attributes:
        weight: what its tokens count in attention: its logarithm is added to their scores. 1 changes nothing. It holds
            in this place only: a block that is taken of this one does not have it.
        layers: those in which it is seen; None for all.

    Raises `ConfigError` for a span outside of the handle, a weight that is not above 0, and no layers.
    """

    handle: Handle
    begin: int
    end: int
    weight: float = 1.0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        is_whole = is_whole_number(self.begin) and is_whole_number(self.end)
        if not is_whole or not 0 <= self.begin < self.end <= self.handle.num_tokens:
            raise ConfigError(f"tokens {self.begin!r} to {self.end!r} are not in a handle of {self.handle.num_tokens}")
        if not is_number(self.weight) or not 0 < self.weight < MAX_WEIGHT:
            raise ConfigError(f"weight={self.weight!r} is impossible; it is a number above 0 (leave a part out for 0)")
        if self.layers is not None:
            if not self.layers or not all(is_whole_number(layer, 0) for layer in self.layers):
                raise ConfigError(f"layers={self.layers!r} is impossible; name one layer or more, from 0 on")
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin

    @property
    def is_weighted(self) -> bool:
        """Whether it has a weight other than 1, or is seen in some layers only."""
        return self.weight != 1 or self.layers is not None

    @property
    def spans(self) -> list[Span]:
        """What its tokens are, where they are in its handle."""
        cut = [
            each._replace(begin=max(each.begin, self.begin), end=min(each.end, self.end)) for each in self.handle.spans
        ]
        return [span for span in cut if span.begin < span.end]

    @property
    def is_recomputable(self) -> bool:
        """Whether it is full messages, seen in full, without latent steps, which can't be recomputed elsewhere."""
        spans = self.handle.spans
        is_whole = self.begin in {span.begin for span in spans} and self.end in {span.end for span in spans}
        return is_whole and not self.is_weighted and not any(span.kind == "latent" for span in self.spans)


@dataclass(frozen=True)
class Composition:
    """Blocks of other caches, one after the other, and how far they are repaired there."""

    blocks: tuple[Block, ...]
    repair: Repair | None = None

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("a composition has at least one block")
        if self.repair is not None and not isinstance(self.repair, Repair):
            raise ConfigError(f"repair={self.repair!r} is not a Repair; write Repair(0.15), or None")

    @property
    def is_exact(self) -> bool:
        """Whether it is full messages, all recomputed in their place and seen in full."""
        is_recomputed = self.repair is not None and self.repair.ratio == 1
        return is_recomputed and all(block.is_recomputable for block in self.blocks)

    @property
    def is_weighted(self) -> bool:
        """Whether any of its blocks is weighted."""
        return any(block.is_weighted for block in self.blocks)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the cache."""
        parts = [[each.handle.id, each.begin, each.end, float(each.weight), each.layers] for each in self.blocks]
        repair = self.repair and [float(self.repair.ratio), self.repair.strategy]
        return hashlib.sha256(json.dumps(["moved", parts, repair]).encode()).hexdigest()


@dataclass(frozen=True)
class LatentSteps:
    """Latent steps after the tokens before: the last hidden state fed back as the next input embedding.

    Nothing in it is random: the same prefix and number of steps give the same cache.
    """

    steps: int

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the cache."""
        return hashlib.sha256(json.dumps(["latent", self.steps]).encode()).hexdigest()


Provenance = Composition | LatentSteps


@dataclass(frozen=True)
class Segment:
    """A run of a handle's tokens that one node added in one go.

    Attributes:
        messages: what these tokens say, as plain chat messages, for a receiver with another template.
        digest: binds kind, source, messages, inputs_digest, token ids and provenance.
        inputs_digest: of what the template was given beside the messages (tools, options), "" for nothing.
        provenance: how its cache came about where it was not read or sampled in its place.
    """

    kind: str
    source: str
    num_tokens: int
    messages: tuple[Message, ...]
    digest: str = field(repr=False)
    inputs_digest: str = ""
    provenance: Provenance | None = None

    @classmethod
    def of(
        cls,
        kind: str,
        source: str,
        tokens: bytes,
        messages: Sequence[Message],
        inputs_digest: str = "",
        provenance: Provenance | None = None,
    ) -> Segment:
        """A segment of packed `tokens`. Raises `HandleError` for an unknown kind or a provenance that does not fit."""
        if kind not in SEGMENT_KINDS:
            raise HandleError(f"unknown segment kind {kind!r}; known kinds: {', '.join(SEGMENT_KINDS)}")
        _check_provenance(kind, tokens, provenance)
        header = f"{kind} {len(source)} {source} {len(inputs_digest)} {inputs_digest} {len(messages)} "
        own, digest = digested(header, messages, tokens + (provenance.digest.encode() if provenance else b""))
        return cls(kind, source, len(tokens) // TOKEN_BYTES, own, digest, inputs_digest, provenance)


def _check_provenance(kind: str, tokens: bytes, provenance: Provenance | None) -> None:
    """Raise `HandleError` where a segment's kind, tokens and provenance contradict one another."""
    if kind == "moved":
        fits = isinstance(provenance, Composition) and _is_made_of(tokens, provenance.blocks)
    elif kind == "latent":
        fits = isinstance(provenance, LatentSteps) and len(tokens) == provenance.steps * TOKEN_BYTES == tokens.count(0)
    else:
        fits = provenance is None
    if not fits:
        raise HandleError(f"a segment of kind {kind!r} does not fit its provenance")
    if max((handle.depth for handle in handles_in(provenance)), default=0) >= MAX_DEPTH:
        raise HandleError(f"blocks were taken of blocks {MAX_DEPTH} times; re-read what is inherited")


def _is_made_of(tokens: bytes, blocks: Sequence[Block]) -> bool:
    """Whether packed tokens are those of blocks; of a composition that claims far more, nothing is built."""
    return sum(block.num_tokens for block in blocks) * TOKEN_BYTES == len(tokens) and tokens == tokens_of(blocks)


def tokens_of(blocks: Iterable[Block]) -> bytes:
    """The packed tokens of blocks, one after the other."""
    return b"".join(block.handle.tokens[block.begin * TOKEN_BYTES : block.end * TOKEN_BYTES] for block in blocks)


def handles_in(provenance: Provenance | None) -> list[Handle]:
    """The handles that a provenance takes blocks from, each once."""
    blocks = provenance.blocks if isinstance(provenance, Composition) else ()
    return list({block.handle.id: block.handle for block in blocks}.values())
