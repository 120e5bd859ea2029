"""LangGraph graphs whose edges carry KV caches instead of text.

The public names; those that need torch are imported on first access.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from langgraph_latent.channel import LatentChannel
    from langgraph_latent.chat_model import ChatLatent
    from langgraph_latent.compat import Compatibility, Level, compare
    from langgraph_latent.compose import Selection, merge
    from langgraph_latent.errors import LatentError
    from langgraph_latent.handle import KVHandle
    from langgraph_latent.node import LatentNode, LatentState
    from langgraph_latent.recipe import Repair
    from langgraph_latent.router import EdgePolicy, EdgeRouter, Route, RouteDecision
    from langgraph_latent.spec import ModelSpec
    from langgraph_latent.tracer import LatentTracer
    from langgraph_latent.workspace import LatentWorkspace

_HOMES = {
    "ChatLatent": "chat_model",
    "Compatibility": "compat",
    "EdgePolicy": "router",
    "EdgeRouter": "router",
    "KVHandle": "handle",
    "LatentChannel": "channel",
    "LatentError": "errors",
    "LatentNode": "node",
    "LatentState": "node",
    "LatentTracer": "tracer",
    "LatentWorkspace": "workspace",
    "Level": "compat",
    "ModelSpec": "spec",
    "Repair": "recipe",
    "Route": "router",
    "RouteDecision": "router",
    "Selection": "compose",
    "compare": "compat",
    "merge": "compose",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
