"""`LatentChannel`: a LangGraph state channel for handles. It holds handles only; a checkpoint never sees a tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from langgraph._internal._typing import MISSING  # private: LangGraph's mark of an empty channel
from langgraph.channels.base import BaseChannel
from langgraph.errors import InvalidUpdateError
from langgraph.types import Overwrite
from typing_extensions import Self

from langgraph_latent import public
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.compose import merge
from langgraph_latent.handle.handle import KVHandle

POLICIES = ("last", "collect", "merge")


@public
class LatentChannel(BaseChannel[Any, Any, Any]):
    """Holds the handle (or handles) last written to a state key; None before the first write.

    `Annotated[KVHandle | None, LatentChannel]` keeps the last of several handles written in one step, in the order in
    which LangGraph applies tasks (by path: node name, then `Send` index).
    `Annotated[list[KVHandle], LatentChannel(policy="collect")]` keeps all handles of the last step that wrote, in that
    order; branches that end in different steps need a key each.
    `Annotated[KVHandle | None, LatentChannel(policy="merge")]` keeps them as one (`compose.merge`), in that order;
    its cache is put together where it is inherited, on an edge whose policy allows level 1. Writing None empties the
    channel; `Overwrite(value)` replaces whatever else the step wrote.

    Raises `InvalidUpdateError` for a write that is neither a handle, a list of handles nor None.
    """

    __slots__ = ("policy", "value")

    def __init__(self, typ: Any = None, key: str = "", *, policy: Literal["last", "collect", "merge"] = "last") -> None:
        if policy not in POLICIES:
            raise ConfigError(f"policy={policy!r} is unknown; known policies: {', '.join(POLICIES)}")
        super().__init__(typ, key)
        self.policy = policy
        self.value: tuple[KVHandle, ...] | None = None  # None: never written; (): emptied

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LatentChannel) and other.policy == self.policy

    __hash__ = None  # type: ignore[assignment]

    @property
    def ValueType(self) -> Any:
        return list[KVHandle] if self.policy == "collect" else KVHandle

    @property
    def UpdateType(self) -> Any:
        return KVHandle | list[KVHandle]

    def from_checkpoint(self, checkpoint: Any) -> Self:
        channel = type(self)(self.typ, self.key, policy=self.policy)
        if checkpoint is not MISSING:
            channel.value = tuple(_handles(checkpoint))
        return channel

    def checkpoint(self) -> Any:
        return MISSING if self.value is None else self.get()

    def get(self) -> Any:
        if self.policy == "collect":
            return list(self.value or ())
        return self.value[-1] if self.value else None

    def is_available(self) -> bool:
        """Always: a key that is not written yet reads as None (or as no handles), not as missing."""
        return True

    def update(self, values: Sequence[Any]) -> bool:
        if not values:
            return False
        overwrites = [value for value in map(_overwritten, values) if value is not MISSING]
        if len(overwrites) > 1:
            raise InvalidUpdateError(f"at key {self.key!r}: only one Overwrite may be written per step")
        try:
            handles = [handle for value in overwrites or values for handle in _handles(value)]
            if self.policy == "merge" and len(handles) > 1:
                handles = [merge(handles)]
        except (HandleError, ConfigError) as error:
            raise InvalidUpdateError(f"at key {self.key!r}: {error}") from error
        self.value = tuple(handles if self.policy == "collect" else handles[-1:])
        return True


def _handles(value: Any) -> Iterator[KVHandle]:
    """The handles in a written or restored value; a mapping is a handle that a strict serialiser left as plain data."""
    if isinstance(value, KVHandle):
        yield value
    elif isinstance(value, Mapping):
        yield KVHandle.from_dict(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _handles(item)
    elif value is not None:
        raise HandleError(
            f"a LatentChannel takes KVHandle values, lists of them or None, not {type(value).__name__}; "
            "`workspace.handle(reply)` gives a reply's handle"
        )


def _overwritten(value: Any) -> Any:
    """What an `Overwrite` carries, in any of the forms LangGraph accepts; MISSING for an ordinary write."""
    if isinstance(value, Overwrite):
        return value.value
    if isinstance(value, Mapping):
        if set(value) == {"__overwrite__"}:
            return value["__overwrite__"]
        if value.get("type") == "__overwrite__" and "value" in value:
            return value["value"]
    return MISSING
