"""The value on an edge: how a KV cache came about, small enough for any checkpoint.

A handle holds what its cache can be made from (messages, exact token ids and provenance of each segment) and the
identity of the model it was made for. It holds no tensor and knows nothing of pools, models or LangGraph.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from langgraph_latent import public
from langgraph_latent.errors import HandleError
from langgraph_latent.handle.given import HandleForms
from langgraph_latent.handle.message import Message, Span, copied
from langgraph_latent.handle.packing import UNREADABLE, pack, unpack
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.segment import Block, Composition, LatentSteps, Provenance, Segment, handles_in
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens


def _handle_id(model: str, tenant: str, segments: Iterable[Segment]) -> str:
    parts = [model, tenant, *(segment.digest for segment in segments)]
    return "kv-" + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, repr=False)
@public
class KVHandle(HandleForms):
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
