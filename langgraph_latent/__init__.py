"""LangGraph graphs whose edges carry KV caches instead of text.

The public names; they are imported on first access. Each has the address `langgraph_latent`, wherever its file is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from langgraph.checkpoint.serde import _msgpack  # private: the types that LangGraph's serialiser makes without asking

if TYPE_CHECKING:
    from langgraph_latent.channel import LatentChannel
    from langgraph_latent.chat_model import ChatLatent
    from langgraph_latent.errors import LatentError
    from langgraph_latent.handle.compose import merge
    from langgraph_latent.handle.handle import KVHandle
    from langgraph_latent.handle.repair import Repair
    from langgraph_latent.handle.selection import Selection
    from langgraph_latent.node import LatentNode, LatentState
    from langgraph_latent.router.choice import RouteDecision
    from langgraph_latent.router.policy import EdgePolicy, Route
    from langgraph_latent.router.router import EdgeRouter
    from langgraph_latent.spec.compat import Compatibility, Level, compare
    from langgraph_latent.spec.spec import ModelSpec
    from langgraph_latent.tracer import LatentTracer
    from langgraph_latent.workspace.workspace import LatentWorkspace

_HOMES = {
    "ChatLatent": "chat_model",
    "Compatibility": "spec.compat",
    "EdgePolicy": "router.policy",
    "EdgeRouter": "router.router",
    "KVHandle": "handle.handle",
    "LatentChannel": "channel",
    "LatentError": "errors",
    "LatentNode": "node",
    "LatentState": "node",
    "LatentTracer": "tracer",
    "LatentWorkspace": "workspace.workspace",
    "Level": "spec.compat",
    "ModelSpec": "spec.spec",
    "Repair": "handle.repair",
    "Route": "router.policy",
    "RouteDecision": "router.choice",
    "Selection": "handle.selection",
    "compare": "spec.compat",
    "merge": "handle.compose",
}
__version__ = "0.1.0"
__all__ = [
    "ChatLatent",
    "Compatibility",
    "EdgePolicy",
    "EdgeRouter",
    "KVHandle",
    "LatentChannel",
    "LatentError",
    "LatentNode",
    "LatentState",
    "LatentTracer",
    "LatentWorkspace",
    "Level",
    "ModelSpec",
    "Repair",
    "Route",
    "RouteDecision",
    "Selection",
    "compare",
    "merge",
]

# A handle holds text and numbers, and checks them. It may lie in any key, list, Send or store, so whoever imports this
# package can read it back: without a warning at every resume, and under LANGGRAPH_STRICT_MSGPACK too. Checkpoints of
# version 0.1 name the second address.
_msgpack.SAFE_MSGPACK_TYPES |= {(address, "KVHandle") for address in (__name__, f"{__name__}.handle")}

Public = TypeVar("Public", bound=Callable[..., Any])


def public(thing: Public) -> Public:
    """A class or function with the address `langgraph_latent`, which checkpoints and pickles may store: files move.

    Under `@dataclass`, so that annotations are evaluated before the module that knows their names is forgotten.
    """
    if isinstance(thing, type):
        thing.__annotations__ = inspect.get_annotations(thing, eval_str=True)
    thing.__module__ = __name__
    return thing


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
