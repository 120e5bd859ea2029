"""Where this library keeps files between runs, and what it remembers there: digests of weights, findings of probes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """`$LANGGRAPH_LATENT_CACHE`, else `langgraph-latent` in the user's cache directory. Not created here."""
    if own := os.environ.get("LANGGRAPH_LATENT_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "langgraph-latent"


class DiskCache:
    """Plain values by key in one JSON file of the cache directory. What can't be read or written is forgotten."""

    def __init__(self, file: str) -> None:
        self._file = file

    def get(self, key: str) -> Any:
        """The value under a key; None where there is none."""
        return self._all().get(key)

    def put(self, key: str, value: Any) -> None:
        """Add one value, with a new file in place of the old one."""
        try:
            cache_dir().mkdir(parents=True, exist_ok=True)
            fd, part = tempfile.mkstemp(dir=cache_dir(), prefix=self._file)
            with os.fdopen(fd, "w") as file:
                json.dump({**self._all(), key: value}, file)
            os.replace(part, cache_dir() / self._file)
        except OSError:
            return

    def _all(self) -> dict[str, Any]:
        try:
            known = json.loads((cache_dir() / self._file).read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        return known if isinstance(known, dict) else {}
