"""Frozen records of what happened on an edge. Nothing here stores them; the tracer does."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

_E = TypeVar("_E", bound="Event")


class Subject(Protocol):
    """What an event can be about: a handle."""

    @property
    def id(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def source(self) -> str: ...


@dataclass(frozen=True)
class CallSite:
    """Where in a graph something happened; empty strings outside one."""

    node: str = ""
    thread_id: str = ""
    run_id: str = ""


NOWHERE = CallSite()


@dataclass(frozen=True, kw_only=True)
class Event:
    """Fields that every event has.

    `time` is seconds since 1970, taken when the event is made, at the end of what it describes; `duration_s` is wall
    time. `source` and `call_site.node` are the edge's two ends.
    """

    time: float = field(default_factory=time.time)
    call_site: CallSite = NOWHERE
    handle: str = ""
    model: str = ""
    source: str = ""
    num_tokens: int = 0
    nbytes: int = 0
    duration_s: float = 0.0
    success: bool = True

    @classmethod
    def of(cls: type[_E], handle: Subject, call_site: CallSite = NOWHERE, **fields: Any) -> _E:
        """An event about a handle: its id, model and source, with whatever else there is to record."""
        return cls(call_site=call_site, handle=handle.id, model=handle.model, source=handle.source, **fields)

    def to_dict(self) -> dict[str, Any]:
        """The event as one flat, JSON-ready mapping with its name under `event`."""
        data = asdict(self)
        return {"time": data.pop("time"), "event": type(self).__name__.lower(), **data.pop("call_site"), **data}


@dataclass(frozen=True, kw_only=True)
class Loaded(Event):
    """A workspace began to use a model; `duration_s` is short where the process held it already."""

    name: str = ""
    device: str = ""
    dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class Prefilled(Event):
    """`num_tokens` tokens went through the model; `cache_read` before them were reused."""

    cache_read: int = 0


@dataclass(frozen=True, kw_only=True)
class Decoded(Event):
    """`num_tokens` tokens were sampled."""

    finish_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Produced(Event):
    """A node made a handle."""

    shape: tuple[int, ...] = ()
    num_layers: int = 0
    dtype: str = ""
    checksum: str = ""


@dataclass(frozen=True, kw_only=True)
class Routed(Event):
    """The router decided how an edge is served."""

    route: str = ""
    level: int = 0
    code: str = ""
    reason: str = ""
    differences: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delivered(Event):
    """`cache_read` tokens of a handle reached the receiver as KV cache, without being computed again."""

    route: str = ""
    cache_read: int = 0


@dataclass(frozen=True, kw_only=True)
class Rebuilt(Event):
    """`num_tokens` tokens of a handle had to be computed again from its provenance, because `reason`."""

    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Composed(Event):
    """Tokens of a handle's cache were made from their provenance: latent steps, or moved tokens.

    Of these `num_repaired` were recomputed.
    """

    kind: str = ""
    num_repaired: int = 0


@dataclass(frozen=True, kw_only=True)
class FellBack(Event):
    """A route failed and the next safer one is taken."""

    from_route: str = ""
    to_route: str = ""
    reason: str = ""
    success: bool = False


@dataclass(frozen=True, kw_only=True)
class Diverged(Event):
    """The rendered prompt departs from the inherited tokens; only the common `num_tokens` are reused."""

    num_inherited: int = 0


@dataclass(frozen=True, kw_only=True)
class Reworded(Event):
    """Messages were rendered differently than they came, because the chat template can't render them as they are.

    The codes in `changes` are explained in `prompt/template.py`.
    """

    changes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Moved(Event):
    """A cache of `num_tokens` tokens was copied to the receiver's device: `nbytes` lay elsewhere."""

    device: str = ""


@dataclass(frozen=True, kw_only=True)
class Exported(Event):
    """A cache was written to a file, or to a byte string where `file` is empty."""

    file: str = ""


@dataclass(frozen=True, kw_only=True)
class Ingested(Event):
    """A cache was read from a file, or from a byte string where `file` is empty, and verified.

    `is_proven` says whether this installation had signed it; otherwise it serves its own handle alone, at level 1.
    """

    file: str = ""
    is_proven: bool = False


@dataclass(frozen=True, kw_only=True)
class Refused(Event):
    """A handle, file or byte string failed verification."""

    reason: str = ""
    success: bool = False


@dataclass(frozen=True, kw_only=True)
class Evicted(Event):
    """Tensors left the pool; their handles still work."""

    reason: str = ""
