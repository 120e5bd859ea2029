"""What a model is, and what passes between two: identities, comparisons, the matrix."""

from __future__ import annotations

from langgraph_latent.spec.compat import Compatibility, Level, compare
from langgraph_latent.spec.spec import ModelSpec

__all__ = ["Compatibility", "Level", "ModelSpec", "compare"]
