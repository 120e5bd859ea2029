"""Which way an edge goes, and why. Pure: plain values in, decisions out."""

from __future__ import annotations

from langgraph_latent.router.router import EdgePolicy, EdgeRouter, Route, RouteDecision

__all__ = ["EdgePolicy", "EdgeRouter", "Route", "RouteDecision"]
