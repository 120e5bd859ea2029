"""Which way an edge goes, and why. Pure: plain values in, decisions out."""

from __future__ import annotations

from langgraph_latent.router.choice import RouteDecision
from langgraph_latent.router.policy import EdgePolicy, Route
from langgraph_latent.router.router import EdgeRouter

__all__ = ["EdgePolicy", "EdgeRouter", "Route", "RouteDecision"]
