"""Where this library keeps files between runs: converted demo models and remembered weight digests."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """`$LANGGRAPH_LATENT_CACHE`, else `langgraph-latent` in the user's cache directory. Not created here."""
    if own := os.environ.get("LANGGRAPH_LATENT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "langgraph-latent"
