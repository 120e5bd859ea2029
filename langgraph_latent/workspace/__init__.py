"""The owner of models in use, caches, router and tracer, and how it serves a request."""

from __future__ import annotations

from langgraph_latent.workspace.workspace import LatentWorkspace

__all__ = ["LatentWorkspace"]
