"""What the tokens of a handle say, as plain data: chat messages, and the spans of tokens that they belong to.

It knows no handles.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from langgraph_latent.errors import HandleError

Message = dict[str, Any]
"""One chat message as plain data: `role`, `content` and, where present, `name`, `tool_calls`, `tool_call_id`."""

MAX_MESSAGE_BYTES = 1 << 23
"""Of the messages of one segment as JSON."""


class Span(NamedTuple):
    """Tokens begin to end of a handle, of one kind and source, and their messages. Moved tokens keep those they had."""

    begin: int
    end: int
    kind: str
    source: str
    messages: tuple[Message, ...]


def copied(message: Message) -> Message:
    """A copy of a message, independent of it, as a checkpoint would give it back.

    Raises `HandleError` for a message without text under `role` and `content`.
    """
    return _copied(message)[0]


def digested(header: str, messages: Sequence[Message], tail: bytes) -> tuple[tuple[Message, ...], str]:
    """Copies of messages that can't be changed, and the SHA-256 of a header, these messages and a tail.

    Raises what `copied` raises, and `HandleError` for more bytes than can be read back.
    """
    head = header.encode("utf-8", "surrogatepass")
    digest, num_bytes = hashlib.sha256(head), len(head)
    copies = []
    for message in messages:
        own, canonical = _copied(message)
        copies.append(frozen(own))
        digest.update(canonical)
        num_bytes += len(canonical)
    if num_bytes > MAX_MESSAGE_BYTES:
        raise HandleError(
            f"messages of {num_bytes:,} bytes are too long for a handle, which holds {MAX_MESSAGE_BYTES:,}"
        )
    digest.update(tail)
    return tuple(copies), digest.hexdigest()


class FrozenDict(dict[str, Any]):
    """A mapping that can't be changed; a copy of it can, and equals it."""

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("what a handle holds can't be changed; handle.messages gives copies")

    __setitem__ = __delitem__ = __ior__ = update = setdefault = pop = popitem = clear = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)


class FrozenList(list[Any]):
    """A list that can't be changed; a copy of it can, and equals it."""

    _refuse = FrozenDict._refuse
    __setitem__ = __delitem__ = __iadd__ = __imul__ = _refuse
    append = extend = insert = remove = pop = clear = sort = reverse = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return copy.deepcopy(list(self), memo)


def frozen(value: Any) -> Any:
    """Plain values as ones that can't be changed, as deep as they go."""
    if isinstance(value, dict):
        return FrozenDict({name: frozen(each) for name, each in value.items()})
    return FrozenList(map(frozen, value)) if isinstance(value, list) else value


def _copied(message: Message) -> tuple[Message, bytes]:
    """A copy, and its bytes for a digest."""
    role, content = message.get("role"), message.get("content")
    if not (isinstance(role, str) and isinstance(content, str)):
        raise HandleError("a handle's messages are mappings with text under `role` and `content`")
    more = {name: value for name, value in message.items() if name not in ("role", "content")}
    kept = json.loads(json.dumps(more)) if more else more
    parts = (role, json.dumps(kept, sort_keys=True) if kept else "", content)
    texts = [part.encode("utf-8", "surrogatepass") for part in parts]
    sizes = " ".join(str(len(text)) for text in texts)
    return {"role": role, "content": content, **kept}, b" ".join([sizes.encode(), *texts])
