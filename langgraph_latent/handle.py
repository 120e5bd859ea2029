"""The value on an edge: how a KV cache came about, small enough for any checkpoint.

A handle is a recipe (messages and exact token ids, per segment) plus the identity of the model it was made for. It
holds no tensor and knows nothing of pools, models or LangGraph.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from langgraph_latent.errors import HandleError

Message = dict[str, Any]
"""One chat message as plain data: `role`, `content` and, where present, `name`, `tool_calls`, `tool_call_id`."""

TOKEN_BYTES = 4
MAX_TOKENS = 1 << 22
MAX_RECIPE_BYTES = 1 << 26
RECIPE_BYTES_PER_TOKEN = 256
SEGMENT_KINDS = ("prompt", "generated", "latent")


def pack_tokens(ids: Iterable[int]) -> bytes:
    """Token ids as uint32 bytes, the form in which prefixes are compared."""
    return array("I", ids).tobytes()


def unpack_tokens(tokens: bytes) -> list[int]:
    """The token ids in `pack_tokens(ids)`."""
    return array("I", tokens).tolist()


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of leading tokens on which two packed sequences agree."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high // TOKEN_BYTES
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low // TOKEN_BYTES


@dataclass(frozen=True)
class Segment:
    """A run of a handle's tokens that one node added in one go.

    `messages` are what these tokens say, as plain chat messages, for a receiver with another template. `framing` is a
    digest of what the template was told beside them (tools, options), "" for nothing. `digest` binds kind, source,
    messages, framing and token ids.
    """

    kind: str
    source: str
    num_tokens: int
    messages: tuple[Message, ...]
    digest: str = field(repr=False)
    framing: str = ""

    @classmethod
    def of(cls, kind: str, source: str, tokens: bytes, messages: Sequence[Message], framing: str = "") -> Segment:
        """Make a segment of packed `tokens`. Raises `HandleError` for an unknown kind."""
        if kind not in SEGMENT_KINDS:
            raise HandleError(f"unknown segment kind {kind!r}; known kinds: {', '.join(SEGMENT_KINDS)}")
        head = f"{kind} {len(source)} {source} {len(framing)} {framing} {len(messages)} "
        digest = hashlib.sha256(head.encode("utf-8", "surrogatepass"))
        own = []
        for message in messages:
            copy, canonical = _copied(message)
            own.append(copy)
            digest.update(canonical)
        digest.update(tokens)
        return cls(kind, source, len(tokens) // TOKEN_BYTES, tuple(own), digest.hexdigest(), framing)


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
            tokens, segments = _unpack(*packed)
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
        framing: str = "",
    ) -> KVHandle:
        """The handle of this recipe with one more segment of packed `tokens`; O(new tokens) but for one copy."""
        segment = Segment.of(kind, source, tokens, messages, framing)
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

    @cached_property
    def largest_token(self) -> int:
        """The largest token id, -1 where there is none."""
        return max(array("I", self.tokens), default=-1)

    def verify(self) -> None:
        """Check that the id is the digest of the content; once per handle. Raises `HandleError`."""
        if self.__dict__.get("_is_sound"):
            return
        position, fresh = 0, []
        try:
            for segment in self.segments:
                end = position + segment.num_tokens * TOKEN_BYTES
                tokens = self.tokens[position:end]
                fresh.append(Segment.of(segment.kind, segment.source, tokens, segment.messages, segment.framing))
                position = end
            sound = position == len(self.tokens) and self.id == _handle_id(self.model, self.tenant, fresh)
        except (TypeError, AttributeError) as error:
            raise HandleError(f"handle {self.id!r} is malformed: {error}") from error
        if not sound:
            raise HandleError(f"handle {self.id!r} does not match its content; it was altered. Use an unaltered copy.")
        self.__dict__["_is_sound"] = True

    def to_dict(self) -> dict[str, Any]:
        """The handle as strings and integers; `from_dict` is its inverse."""
        tokens, segments = _pack(self.tokens, self.segments)
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

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        source = f" from {self.source!r}" if self.source else ""
        return f"KVHandle({self.id!r}, {self.num_tokens} tokens{source}, {self.nbytes / 1e6:.1f} MB)"

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}


def _pack(tokens: bytes, segments: tuple[Segment, ...]) -> tuple[str, str]:
    """Tokens as the narrowest of uint16 and uint32, both parts deflated and in base64."""
    ids = array("I", tokens)
    narrow = array("H", ids) if not ids or max(ids) < 1 << 16 else ids
    rows = [[s.kind, s.source, s.num_tokens, s.messages, *([s.framing] if s.framing else [])] for s in segments]
    width = narrow.itemsize.to_bytes(1, "little")
    return (
        _deflate(width + narrow.tobytes()),
        _deflate(json.dumps(rows, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")),
    )


def _unpack(tokens: str, segments: str) -> tuple[bytes, tuple[Segment, ...]]:
    try:
        packed = _inflate(tokens, MAX_TOKENS * TOKEN_BYTES)
        ids = array({2: "H", 4: "I"}[packed[0]], packed[1:])
        all_tokens = array("I", ids).tobytes()
        # A token says a bounded number of bytes, so few tokens can't carry a recipe that inflates to gigabytes.
        limit = min(MAX_RECIPE_BYTES, (1 << 20) + RECIPE_BYTES_PER_TOKEN * (len(all_tokens) // TOKEN_BYTES))
        rows = json.loads(_inflate(segments, limit).decode("utf-8", "surrogatepass"))
        position, unpacked = 0, []
        for kind, source, num_tokens, messages, *framing in rows:
            end = position + num_tokens * TOKEN_BYTES
            unpacked.append(Segment.of(kind, source, all_tokens[position:end], messages, *framing))
            position = end
        if position != len(all_tokens):
            raise ValueError(f"its segments claim {position // TOKEN_BYTES} tokens")
        return all_tokens, tuple(unpacked)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError, zlib.error) as error:
        raise HandleError(f"a handle's packed form can't be read: {error}") from error


def _deflate(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


def _inflate(text: str, limit: int) -> bytes:
    inflater = zlib.decompressobj()
    data = inflater.decompress(base64.b64decode(text, validate=True), limit)
    if not inflater.eof or inflater.unused_data:
        raise ValueError(f"it is cut, padded or larger than {limit} bytes")
    return data
