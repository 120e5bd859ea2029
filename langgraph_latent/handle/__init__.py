"""The value on an edge: how a KV cache came about, small enough for any checkpoint. Standard library only."""

from __future__ import annotations

from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.segment import Segment

__all__ = ["KVHandle", "Segment"]
