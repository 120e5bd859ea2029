"""The value on an edge: how a KV cache came about, small enough for any checkpoint.

A handle is a recipe (messages and exact token ids, per segment, and for what was not read in its place how it was made)
plus the identity of the model it was made for. It holds no tensor and knows nothing of pools, models or LangGraph.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from langgraph_latent.errors import HandleError
from langgraph_latent.handle.provenance import Block, Composition, LatentSteps, Provenance
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens

Message = dict[str, Any]
"""One chat message as plain data: `role`, `content` and, where present, `name`, `tool_calls`, `tool_call_id`."""

MAX_TOKENS = 1 << 22
MAX_RECIPE_BYTES = 1 << 26
RECIPE_BYTES_PER_TOKEN = 256
MAX_DEPTH = 64
"""How often blocks may be taken of what has blocks."""
SEGMENT_KINDS = ("system", "prompt", "generated", "latent", "moved")
"""system: what leads a conversation, the template's own words included; prompt: what was read; generated: what was
sampled; latent: latent steps; moved: blocks of other caches."""


@dataclass(frozen=True)
class Segment:
    """A run of a handle's tokens that one node added in one go.

    `messages` are what these tokens say, as plain chat messages, for a receiver with another template. `inputs_digest` is a
    digest of what the template was told beside them (tools, options), "" for nothing. `recipe` is how its cache came
    about where it was not read or sampled in its place. `digest` binds kind, source, messages, inputs_digest, token ids and
    provenance.
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
        """Make a segment of packed `tokens`. Raises `HandleError` for an unknown kind or a recipe that does not fit."""
        if kind not in SEGMENT_KINDS:
            raise HandleError(f"unknown segment kind {kind!r}; known kinds: {', '.join(SEGMENT_KINDS)}")
        _check_provenance(kind, tokens, provenance)
        head = f"{kind} {len(source)} {source} {len(inputs_digest)} {inputs_digest} {len(messages)} "
        digest = hashlib.sha256(head.encode("utf-8", "surrogatepass"))
        own = []
        for message in messages:
            copy, canonical = _copied(message)
            own.append(copy)
            digest.update(canonical)
        digest.update(tokens)
        if provenance is not None:
            digest.update(provenance.digest.encode())
        return cls(kind, source, len(tokens) // TOKEN_BYTES, tuple(own), digest.hexdigest(), inputs_digest, provenance)


def _check_provenance(kind: str, tokens: bytes, provenance: Provenance | None) -> None:
    """Raise `HandleError` where a segment's kind, tokens and recipe contradict one another."""
    if kind == "moved":
        fits = isinstance(provenance, Composition) and tokens == tokens_of(provenance.blocks)
    elif kind == "latent":
        fits = isinstance(provenance, LatentSteps) and tokens == bytes(provenance.steps * TOKEN_BYTES)
    else:
        fits = provenance is None
    if not fits:
        raise HandleError(f"a segment of kind {kind!r} does not fit its recipe")
    if max((handle.depth for handle in handles_in(provenance)), default=0) >= MAX_DEPTH:
        raise HandleError(f"blocks were taken of blocks {MAX_DEPTH} times; read what is inherited anew")


def tokens_of(blocks: Iterable[Block]) -> bytes:
    """The packed tokens of blocks, one behind the other."""
    return b"".join(block.handle.tokens[block.begin * TOKEN_BYTES : block.end * TOKEN_BYTES] for block in blocks)


class Span(NamedTuple):
    """Tokens begin to end of a handle, of one kind and source, and what they say; blocks of others taken apart."""

    begin: int
    end: int
    kind: str
    source: str
    messages: tuple[Message, ...]


def _copied(message: Message) -> tuple[Message, bytes]:
    """A copy of a message that nobody else changes, of what a checkpoint keeps of it, and its bytes for a digest."""
    role, content = message.get("role"), message.get("content")
    if not (isinstance(role, str) and isinstance(content, str)):
        raise HandleError("a handle's messages are mappings with text under `role` and `content`")
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    kept = json.loads(json.dumps(more)) if more else more
    parts = (role, json.dumps(kept, sort_keys=True) if kept else "", content)
    texts = [part.encode("utf-8", "surrogatepass") for part in parts]
    sizes = " ".join(str(len(text)) for text in texts)
    return {"role": role, "content": content, **kept}, b" ".join([sizes.encode(), *texts])


def _handle_id(model: str, tenant: str, segments: Iterable[Segment]) -> str:
    parts = [model, tenant, *(segment.digest for segment in segments)]
    return "kv-" + hashlib.sha256("\n".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:32]


@dataclass(frozen=True, repr=False)
class KVHandle:
    """A recipe for one sequence's KV cache, and the promise that it can be had.

    Attributes:
        id: digest of model, tenant and every segment; equal recipes have equal ids.
        model: identity digest of the `ModelSpec` the cache belongs to.
        tenant: who may use it; the empty string where tenants are not used.
        nbytes: size of the cache's keys and values when the handle was made, in bytes.
        tokens: token ids as packed uint32. The last one may not be in the cache yet (a sampled token is fed by the
            next prefill); it counts all the same.
        segments: who added which tokens, saying what.

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
            tokens, segments = _unpack(*packed, self.model, self.tenant)
            object.__setattr__(self, "tokens", tokens)
            object.__setattr__(self, "segments", segments)
            self.verify()

    @classmethod
    def root(cls, model: str, tenant: str = "") -> KVHandle:
        """The handle of no tokens, from which every recipe grows."""
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
        """The handle of this recipe with one more segment of packed `tokens`; O(new tokens) but for one copy."""
        for handle in handles_in(provenance):
            if (handle.model, handle.tenant) != (self.model, self.tenant):
                raise HandleError(f"handle {handle.id} is of another model or tenant; its blocks can't be put here")
        segment = Segment.of(kind, source, tokens, messages, inputs_digest, provenance)
        all_tokens = self.tokens + tokens
        nbytes = len(all_tokens) // TOKEN_BYTES * bytes_per_token
        return self._made(self.model, self.tenant, nbytes, all_tokens, (*self.segments, segment))

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
        if last is None or last.kind == "generated":
            return last.num_tokens if last else 0
        if isinstance(last.provenance, Composition):
            block = last.provenance.blocks[-1]
            return min(block.handle.num_sampled, block.num_tokens) if block.end == block.handle.num_tokens else 0
        return 0

    @property
    def ends_open(self) -> bool:
        """Whether it ends in an assistant's turn that is still to be closed: a sampled answer, or latent steps."""
        return bool(self.num_sampled) or (bool(self.spans) and self.spans[-1].kind == "latent")

    @cached_property
    def num_composed(self) -> int:
        """Tokens up to and with the last that was not read or sampled in its place; 0 where all of them were."""
        ends = [end for end, segment in zip(self._ends, self.segments, strict=True) if segment.provenance]
        return ends[-1] if ends else 0

    @property
    def num_plain(self) -> int:
        """Tokens before the first that was not read or sampled in its place."""
        plain = itertools.takewhile(lambda segment: segment.provenance is None, self.segments)
        return sum(segment.num_tokens for segment in plain)

    @cached_property
    def provenance_digest(self) -> str:
        """What tells its cache from a plain one of the same tokens: a digest of its recipes, "" without any."""
        made = [
            f"{end} {segment.provenance.digest}"
            for end, segment in zip(self._ends, self.segments, strict=True)
            if segment.provenance
        ]
        return hashlib.sha256("\n".join(made).encode()).hexdigest() if made else ""

    @property
    def is_exact(self) -> bool:
        """Whether its cache is that of its tokens read one after another: nothing was moved, or all of it repaired."""
        moved = [segment.provenance for segment in self.segments if isinstance(segment.provenance, Composition)]
        return all(provenance.is_exact for provenance in moved)

    @cached_property
    def source_handles(self) -> tuple[KVHandle, ...]:
        """The handles that its blocks come from, and those that theirs come from: each once, inner ones first."""
        found: dict[str, KVHandle] = {}
        for segment in self.segments:
            for handle in handles_in(segment.provenance):
                found |= {inner.id: inner for inner in handle.source_handles} | {handle.id: handle}
        return tuple(found.values())

    @cached_property
    def parts(self) -> tuple[KVHandle, ...]:
        """The handles it was put together from: its source_handles, and what blocks were put behind, system prompts apart."""
        leads = [
            handle.first(number)
            for handle in (*self.source_handles, self)
            for number, segment in enumerate(handle.segments)
            if isinstance(segment.provenance, Composition)
        ]
        return (*self.source_handles, *(lead for lead in leads if lead.segments and lead.segments[-1].kind != "system"))

    @cached_property
    def depth(self) -> int:
        """How often blocks were taken of what had blocks: 0 for a plain handle."""
        own = [1 + handle.depth for segment in self.segments for handle in handles_in(segment.provenance)]
        return max(own, default=0)

    @property
    def needs_rows(self) -> bool:
        """Whether making its cache needs attention over rows: something is repaired, or seen otherwise than in full."""
        provenances = [segment.provenance for handle in (self, *self.source_handles) for segment in handle.segments]
        return any(
            isinstance(provenance, Composition) and (provenance.repair or provenance.is_weighted)
            for provenance in provenances
        )

    @property
    def has_latent_steps(self) -> bool:
        """Whether there are latent steps in it."""
        return bool(self.steps)

    @property
    def steps(self) -> frozenset[int]:
        """How many latent steps it has in a row, each number of them."""
        return frozenset(span.end - span.begin for span in self.spans if span.kind == "latent")

    def first(self, num_segments: int) -> KVHandle:
        """The handle of the first segments alone."""
        segments = self.segments[:num_segments]
        num_tokens = sum(segment.num_tokens for segment in segments)
        nbytes = self.nbytes * num_tokens // max(self.num_tokens, 1)
        return self._made(self.model, self.tenant, nbytes, self.tokens[: num_tokens * TOKEN_BYTES], segments)

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """What its tokens are, from the first to the last; computed once, for each handle that blocks come from too."""
        return tuple(self._spans())

    def _spans(self) -> Iterator[Span]:
        for end, segment in zip(self._ends, self.segments, strict=True):
            at = end - segment.num_tokens
            if not isinstance(segment.provenance, Composition):
                yield Span(at, end, segment.kind, segment.source, segment.messages)
                continue
            for block in segment.provenance.blocks:
                for inner in block.handle.spans:
                    first, last = max(inner.begin, block.begin), min(inner.end, block.end)
                    if first < last:
                        shift = at - block.begin
                        yield inner._replace(begin=first + shift, end=last + shift)
                at += block.num_tokens

    @property
    def _ends(self) -> list[int]:
        """Where each segment ends."""
        return list(itertools.accumulate(segment.num_tokens for segment in self.segments))

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, the last sampled one included."""
        return tuple(unpack_tokens(self.tokens))

    @property
    def source(self) -> str:
        """The node that added the last segment; the empty string outside a graph."""
        return self.segments[-1].source if self.segments else ""

    @property
    def messages(self) -> tuple[Message, ...]:
        """Everything the tokens say, as plain chat messages; copies, which may be changed."""
        return tuple(_copied(message)[0] for segment in self.segments for message in segment.messages)

    @property
    def num_messages(self) -> int:
        """How many messages it tells."""
        return sum(len(segment.messages) for segment in self.segments)

    @cached_property
    def largest_token(self) -> int:
        """The largest token id, also of the handles that its blocks come from; -1 where there is none."""
        own = max(array("I", self.tokens), default=-1)
        return max([own, *(handle.largest_token for handle in self.source_handles)])

    def verify(self) -> None:
        """Check that the id is the digest of the content; once per handle. Raises `HandleError`."""
        if self.__dict__.get("_is_sound"):
            return
        position, fresh = 0, []
        try:
            for segment in self.segments:
                end = position + segment.num_tokens * TOKEN_BYTES
                tokens = self.tokens[position:end]
                for handle in handles_in(segment.provenance):
                    handle.verify()
                    if (handle.model, handle.tenant) != (self.model, self.tenant):
                        raise HandleError(f"handle {self.id!r} has blocks of another model or tenant")
                parts = (segment.messages, segment.inputs_digest, segment.provenance)
                fresh.append(Segment.of(segment.kind, segment.source, tokens, *parts))
                position = end
            sound = position == len(self.tokens) and self.id == _handle_id(self.model, self.tenant, fresh)
        except (TypeError, AttributeError) as error:
            raise HandleError(f"handle {self.id!r} is malformed: {error}") from error
        if not sound:
            raise HandleError(f"handle {self.id!r} does not match its content; it was altered. Use an unaltered copy.")
        self.__dict__["_is_sound"] = True

    def to_dict(self) -> dict[str, Any]:
        """The handle as strings and integers; `from_dict` is its inverse."""
        tokens, segments = _pack(self.tokens, self.segments, self.source_handles)
        return {
            "id": self.id,
            "model": self.model,
            "tenant": self.tenant,
            "nbytes": self.nbytes,
            "tokens": tokens,
            "segments": segments,
        }

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
        """By digests: handles that blocks come from share parts, and comparing each in each takes 2 to their depth."""
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


def _pack(tokens: bytes, segments: tuple[Segment, ...], source_handles: tuple[KVHandle, ...]) -> tuple[str, str]:
    """Tokens and segments, both deflated and in base64; with the segments, each origin once, inner ones first."""
    numbers = {handle.id: number for number, handle in enumerate(source_handles)}
    rows: Any = [_row(segment, numbers) for segment in segments]
    if source_handles:
        parts = [
            [each.nbytes, _pack_tokens(each.tokens), _pack_json([_row(segment, numbers) for segment in each.segments])]
            for each in source_handles
        ]
        rows = {"source_handles": parts, "rows": rows}
    return _pack_tokens(tokens), _pack_json(rows)


def _pack_tokens(tokens: bytes) -> str:
    """Token ids as the narrowest of uint16 and uint32."""
    ids = array("I", tokens)
    narrow = array("H", ids) if not ids or max(ids) < 1 << 16 else ids
    return _deflate(narrow.itemsize.to_bytes(1, "little") + narrow.tobytes())


def _pack_json(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return _deflate(text.encode("utf-8", "surrogatepass"))


def _row(segment: Segment, numbers: Mapping[str, int]) -> list[Any]:
    row = [segment.kind, segment.source, segment.num_tokens, segment.messages]
    if isinstance(segment.provenance, Composition):
        return [*row, segment.inputs_digest, segment.provenance.to_plain(numbers)]
    return [*row, segment.inputs_digest] if segment.inputs_digest else row


def handles_in(provenance: Provenance | None) -> list[KVHandle]:
    """The handles that a recipe takes blocks from, each once."""
    blocks = provenance.blocks if isinstance(provenance, Composition) else ()
    return list({block.handle.id: block.handle for block in blocks}.values())


def _unpack(tokens: str, segments: str, model: str, tenant: str) -> tuple[bytes, tuple[Segment, ...]]:
    try:
        own = _unpack_tokens(tokens)
        content = _unpack_json(segments, own)
        source_handles, rows = (
            (content["source_handles"], content["rows"]) if isinstance(content, dict) else ((), content)
        )
        known, num_tokens = list[KVHandle](), len(own) // TOKEN_BYTES
        for nbytes, packed, inner in source_handles:
            theirs = _unpack_tokens(packed)
            num_tokens += len(theirs) // TOKEN_BYTES
            if num_tokens > MAX_TOKENS:
                raise ValueError(f"its blocks come from more than {MAX_TOKENS} tokens")
            made = _segments(theirs, _unpack_json(inner, theirs), known)
            known.append(KVHandle._made(model, tenant, nbytes, theirs, made))
        return own, _segments(own, rows, known)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, zlib.error) as error:
        raise HandleError(f"a handle's packed form can't be read: {error}") from error


def _unpack_tokens(text: str) -> bytes:
    packed = _inflate(text, MAX_TOKENS * TOKEN_BYTES)
    return array("I", array({2: "H", 4: "I"}[packed[0]], packed[1:])).tobytes()


def _unpack_json(text: str, tokens: bytes) -> Any:
    """A token says a bounded number of bytes, so few tokens can't carry a recipe that inflates to gigabytes.

    What source_handles add is packed already and hardly inflates.
    """
    limit = (1 << 20) + RECIPE_BYTES_PER_TOKEN * (len(tokens) // TOKEN_BYTES) + 2 * len(text)
    return json.loads(_inflate(text, min(limit, MAX_RECIPE_BYTES)).decode("utf-8", "surrogatepass"))


def _segments(tokens: bytes, rows: Sequence[Any], known: Sequence[KVHandle]) -> tuple[Segment, ...]:
    """The segments that rows say. Raises what `_unpack` catches."""
    position, segments = 0, []
    for kind, source, num_tokens, messages, *more in rows:
        end = position + num_tokens * TOKEN_BYTES
        inputs_digest, *plain = more or [""]
        provenance = _provenance(kind, num_tokens, plain, known)
        segments.append(Segment.of(kind, source, tokens[position:end], messages, inputs_digest, provenance))
        position = end
    if position != len(tokens):
        raise ValueError(f"its segments claim {position // TOKEN_BYTES} tokens")
    return tuple(segments)


def _provenance(kind: str, num_tokens: int, plain: Sequence[Any], known: Sequence[KVHandle]) -> Provenance | None:
    """What a row's segment was made by; `plain` is what stands behind its inputs_digest. Raises what `_unpack` catches."""
    if kind == "latent":
        return LatentSteps(num_tokens)
    if not plain:
        return None
    (composition,) = plain
    return Composition.from_plain(composition, known)


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _inflate(text: str, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    deflated = base64.b64decode(text, validate=True)
    if base64.b64encode(deflated).decode() != text:
        raise ValueError("its last character holds bits that mean nothing")
    data = inflater.decompress(deflated, limit)
    if not inflater.eof or inflater.unused_data:
        raise ValueError(f"it is cut, padded or larger than {limit} bytes")
    return data
