"""The value on an edge: how a KV cache came about, small enough for any checkpoint.

A handle holds what its cache can be made from (messages, exact token ids and provenance of each segment) and the
identity of the model it was made for. It holds no tensor and knows nothing of pools, models or LangGraph.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from langgraph_latent import public
from langgraph_latent.checks import is_number, is_whole_number
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.message import Message, Span, copied, digested
from langgraph_latent.handle.packing import UNREADABLE, pack, unpack
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens

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

    handle: KVHandle
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
        fits = isinstance(provenance, Composition) and tokens == tokens_of(provenance.blocks)
    elif kind == "latent":
        fits = isinstance(provenance, LatentSteps) and len(tokens) == provenance.steps * TOKEN_BYTES == tokens.count(0)
    else:
        fits = provenance is None
    if not fits:
        raise HandleError(f"a segment of kind {kind!r} does not fit its provenance")
    if max((handle.depth for handle in handles_in(provenance)), default=0) >= MAX_DEPTH:
        raise HandleError(f"blocks were taken of blocks {MAX_DEPTH} times; re-read what is inherited")


def tokens_of(blocks: Iterable[Block]) -> bytes:
    """The packed tokens of blocks, one after the other."""
    return b"".join(block.handle.tokens[block.begin * TOKEN_BYTES : block.end * TOKEN_BYTES] for block in blocks)


def handles_in(provenance: Provenance | None) -> list[KVHandle]:
    """The handles that a provenance takes blocks from, each once."""
    blocks = provenance.blocks if isinstance(provenance, Composition) else ()
    return list({block.handle.id: block.handle for block in blocks}.values())


def _handle_id(model: str, tenant: str, segments: Iterable[Segment]) -> str:
    parts = [model, tenant, *(segment.digest for segment in segments)]
    return "kv-" + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, repr=False)
@public
class KVHandle:
    """What one sequence's KV cache can be made from, anywhere and at any time.

    Attributes:
        id: digest of model, tenant and every segment.
        model: identity digest of the `ModelSpec` the cache belongs to.
        tenant: who may use it; the empty string where tenants are not used.
        nbytes: size of the cache's keys and values when the handle was made, in bytes.
        tokens: token ids as packed uint32. The last one may not be in the cache yet (a sampled token is fed by the
            next prefill); it counts all the same.
        segments: who added which tokens, and the messages they stand for.

    Serialises (msgpack, `to_dict`) in a packed text form of at most 8 bytes a token and 2 kB, which the constructor
    takes back; a packed form that does not match its id raises `HandleError`.
    """

    id: str
    model: str
    tenant: str
    nbytes: int
    tokens: bytes = field(repr=False)
    segments: tuple[Segment, ...] = field(repr=False)

    def __post_init__(self) -> None:
        packed: tuple[Any, Any] = (self.tokens, self.segments)
        if all(isinstance(part, str) for part in packed):
            read = _unpacked(*packed, self.model, self.tenant)
            object.__setattr__(self, "tokens", read.tokens)
            object.__setattr__(self, "segments", read.segments)
            self._check_id(read.segments)

    @classmethod
    def root(cls, model: str, tenant: str = "") -> KVHandle:
        """The handle of no tokens, from which every other one grows."""
        return cls._made(model, tenant, 0, b"", ())

    @classmethod
    def _made(cls, model: str, tenant: str, nbytes: int, tokens: bytes, segments: tuple[Segment, ...]) -> KVHandle:
        handle = cls(_handle_id(model, tenant, segments), model, tenant, nbytes, tokens, segments)
        handle.__dict__["_is_sound"] = True
        return handle

    def extend(
        self,
        kind: str,
        source: str,
        tokens: bytes,
        messages: Sequence[Message],
        bytes_per_token: int = 0,
        inputs_digest: str = "",
        provenance: Provenance | None = None,
    ) -> KVHandle:
        """The handle with one more segment of packed `tokens`; O(new tokens) but for one copy."""
        for handle in handles_in(provenance):
            if (handle.model, handle.tenant) != (self.model, self.tenant):
                raise HandleError(f"handle {handle.id} is of another model or tenant; its blocks can't be put here")
        segment = Segment.of(kind, source, tokens, messages, inputs_digest, provenance)
        all_tokens = self.tokens + tokens
        nbytes = len(all_tokens) // TOKEN_BYTES * bytes_per_token
        return self._made(self.model, self.tenant, nbytes, all_tokens, (*self.segments, segment))

    def first(self, num_segments: int) -> KVHandle:
        """The handle of the first segments alone."""
        segments = self.segments[:num_segments]
        num_tokens = sum(segment.num_tokens for segment in segments)
        nbytes = self.nbytes * num_tokens // max(self.num_tokens, 1)
        return self._made(self.model, self.tenant, nbytes, self.tokens[: num_tokens * TOKEN_BYTES], segments)

    @property
    def source(self) -> str:
        """The node that added the last segment; the empty string outside a graph."""
        return self.segments[-1].source if self.segments else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything the tokens say, as plain chat messages; copies, which may be changed."""
        return tuple(copied(message) for segment in self.segments for message in segment.messages)

    @property
    def num_messages(self) -> int:
        return sum(len(segment.messages) for segment in self.segments)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, the last sampled one included."""
        return tuple(unpack_tokens(self.tokens))

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_pending(self) -> int:
        """How many of its tokens are not in the cache it was made with: the last sampled one."""
        return 1 if self.segments and self.segments[-1].kind == "generated" else 0

    @property
    def num_sampled(self) -> int:
        """How many tokens of a sampled answer it ends with; 0 where it ends with something else."""
        last = self.segments[-1] if self.segments else None
        if last and isinstance(last.provenance, Composition):
            block = last.provenance.blocks[-1]
            return min(block.handle.num_sampled, block.num_tokens) if block.end == block.handle.num_tokens else 0
        return last.num_tokens if last and last.kind == "generated" else 0

    @property
    def num_plain(self) -> int:
        """Tokens before the first that was not read or sampled in its place."""
        plain = itertools.takewhile(lambda segment: segment.provenance is None, self.segments)
        return sum(segment.num_tokens for segment in plain)

    @cached_property
    def num_composed(self) -> int:
        """Tokens up to and with the last that was not read or sampled in its place; 0 where all of them were."""
        ends = [end for end, segment in self._with_ends if segment.provenance]
        return ends[-1] if ends else 0

    @cached_property
    def provenance_digest(self) -> str:
        """What tells its cache from a plain one of the same tokens: a digest of its provenances, "" without any."""
        made = [f"{end} {segment.provenance.digest}" for end, segment in self._with_ends if segment.provenance]
        return hashlib.sha256("\n".join(made).encode()).hexdigest() if made else ""

    @property
    def is_exact(self) -> bool:
        """Whether its cache is that of its tokens read one after another: nothing was moved, or all of it repaired."""
        return all(composition.is_exact for composition in self.compositions)

    @property
    def compositions(self) -> list[Composition]:
        """The provenances of its segments of moved blocks."""
        return [segment.provenance for segment in self.segments if isinstance(segment.provenance, Composition)]

    @cached_property
    def source_handles(self) -> tuple[KVHandle, ...]:
        """The handles that its blocks come from, and those that theirs come from: each once, inner ones first."""
        found: dict[str, KVHandle] = {}
        for segment in self.segments:
            for handle in handles_in(segment.provenance):
                found |= {inner.id: inner for inner in handle.source_handles} | {handle.id: handle}
        return tuple(found.values())

    @cached_property
    def depth(self) -> int:
        """How often blocks were taken of what had blocks: 0 for a plain handle."""
        own = [1 + handle.depth for segment in self.segments for handle in handles_in(segment.provenance)]
        return max(own, default=0)

    @cached_property
    def largest_token(self) -> int:
        """The largest token id, also of its source handles; -1 where there is none."""
        own = max(array("I", self.tokens), default=-1)
        return max([own, *(handle.largest_token for handle in self.source_handles)])

    @property
    def has_latent_steps(self) -> bool:
        return any(span.kind == "latent" for span in self.spans)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What its tokens are, from the first to the last; computed once, for each source handle too."""
        spans = list[Span]()
        for end, segment in self._with_ends:
            at = end - segment.num_tokens
            if not isinstance(segment.provenance, Composition):
                spans.append(Span(at, end, segment.kind, segment.source, segment.messages))
                continue
            for block in segment.provenance.blocks:
                shift = at - block.begin
                spans += [span._replace(begin=span.begin + shift, end=span.end + shift) for span in block.spans]
                at += block.num_tokens
        return tuple(spans)

    @property
    def _with_ends(self) -> list[tuple[int, Segment]]:
        """Each segment, and where it ends."""
        return [*zip(itertools.accumulate(each.num_tokens for each in self.segments), self.segments, strict=True)]

    def verify(self) -> None:
        """Check that the id is the digest of the content; once per handle. Raises `HandleError`."""
        if self.__dict__.get("_is_sound"):
            return
        try:
            for handle in [each for segment in self.segments for each in handles_in(segment.provenance)]:
                handle.verify()
                if (handle.model, handle.tenant) != (self.model, self.tenant):
                    raise HandleError(f"handle {self.id!r} has blocks of another model or tenant")
            parts = [(s.kind, s.source, s.num_tokens, s.messages, s.inputs_digest, s.provenance) for s in self.segments]
            segments = _cut(self.tokens, parts)
        except (TypeError, AttributeError) as error:
            raise HandleError(f"handle {self.id!r} is malformed: {error}") from error
        self._check_id(segments)

    def _check_id(self, segments: Sequence[Segment]) -> None:
        if self.id != _handle_id(self.model, self.tenant, segments):
            raise HandleError(f"handle {self.id!r} does not match its content; it was altered. Use an unaltered copy.")
        self.__dict__["_is_sound"] = True

    def to_dict(self) -> dict[str, Any]:
        """The handle as strings and integers; `from_dict` is its inverse."""
        numbers = {handle.id: number for number, handle in enumerate(self.source_handles)}
        rows = [[_row(segment, numbers) for segment in each.segments] for each in (*self.source_handles, self)]
        sources = [(each.nbytes, each.tokens, own) for each, own in zip(self.source_handles, rows, strict=False)]
        tokens, segments = pack(self.tokens, rows[-1], sources)
        plain = {name: getattr(self, name) for name in ("id", "model", "tenant", "nbytes")}
        return {**plain, "tokens": tokens, "segments": segments}

    _asdict = to_dict  # LangGraph's serialiser calls it before it walks the fields

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> KVHandle:
        """Read what `to_dict` wrote. Raises `HandleError` for anything else."""
        if not isinstance(data, Mapping) or set(data) != {"id", "model", "tenant", "nbytes", "tokens", "segments"}:
            raise HandleError("not a handle: expected the mapping that KVHandle.to_dict() returns")
        text_fields = ("id", "model", "tenant", "tokens", "segments")
        if not all(isinstance(data[name], str) for name in text_fields) or not isinstance(data["nbytes"], int):
            raise HandleError("not a handle: a field has the wrong type")
        return cls(**data)

    def __eq__(self, other: object) -> bool:
        """By digests: source handles share parts, and comparing each in each takes 2 to the power of their depth."""
        return isinstance(other, KVHandle) and self._parts == other._parts

    @property
    def _parts(self) -> tuple[Any, ...]:
        digests = [segment.digest for segment in self.segments]
        return (self.id, self.model, self.tenant, self.nbytes, self.tokens, digests)

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        source = f" from {self.source!r}" if self.source else ""
        return f"KVHandle({self.id!r}, {self.num_tokens} tokens{source}, {self.nbytes / 1e6:.1f} MB)"

    def __reduce__(self) -> tuple[Any, ...]:
        """Packed, so that equal handles are equal bytes: LangGraph's node cache compares them."""
        return self.from_dict, (self.to_dict(),)


def _row(segment: Segment, numbers: Mapping[str, int]) -> list[Any]:
    """A segment as plain values; `numbers` stand for source handles, by id."""
    row = [segment.kind, segment.source, segment.num_tokens, segment.messages]
    if not isinstance(segment.provenance, Composition):
        return [*row, segment.inputs_digest] if segment.inputs_digest else row
    blocks, repair = segment.provenance.blocks, segment.provenance.repair
    plain = {
        "blocks": [[numbers[each.handle.id], each.begin, each.end, each.weight, each.layers] for each in blocks],
        "repair": repair and [repair.ratio, repair.strategy],
    }
    return [*row, segment.inputs_digest, plain]


def _unpacked(tokens: str, segments: str, model: str, tenant: str) -> KVHandle:
    """The handle of a packed form. Raises `HandleError`."""
    known = list[KVHandle]()
    try:
        for nbytes, own, rows in unpack(tokens, segments):
            parts = [_part(row, known) for row in rows]
            known.append(KVHandle._made(model, tenant, nbytes, own, _cut(own, parts)))
    except UNREADABLE as error:
        raise HandleError(f"a handle's packed form can't be read: {error}") from error
    return known[-1]


def _part(row: Sequence[Any], known: Sequence[KVHandle]) -> tuple[Any, ...]:
    """What `_cut` makes a segment of, from what `_row` wrote; `known` are the source handles by their numbers."""
    kind, source, num_tokens, messages, *more = row
    inputs_digest, *plain = more or [""]
    if kind == "latent":
        return kind, source, num_tokens, messages, inputs_digest, LatentSteps(num_tokens)
    return kind, source, num_tokens, messages, inputs_digest, _composition(known, *plain) if plain else None


def _composition(known: Sequence[KVHandle], plain: Mapping[str, Any]) -> Composition:
    blocks = []
    for number, begin, end, weight, layers in plain["blocks"]:
        if number < 0:
            raise ValueError(f"a block names a handle by the number {number}, below 0")
        blocks.append(Block(known[number], begin, end, weight, None if layers is None else tuple(layers)))
    return Composition(tuple(blocks), None if plain["repair"] is None else Repair(*plain["repair"]))


def _cut(tokens: bytes, parts: Iterable[Sequence[Any]]) -> tuple[Segment, ...]:
    """Segments of all tokens, in order: each of a kind, source, number of tokens and what else `Segment.of` takes."""
    position, segments = 0, []
    for kind, source, num_tokens, *more in parts:
        end = position + num_tokens * TOKEN_BYTES
        segments.append(Segment.of(kind, source, tokens[position:end], *more))
        position = end
    if position != len(tokens):
        raise HandleError(f"a handle's segments claim {position // TOKEN_BYTES} tokens; use an unaltered copy")
    return tuple(segments)
