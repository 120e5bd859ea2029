"""Where this library keeps files between runs, and what it remembers there: digests of weights, findings of probes."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

from langgraph_latent.errors import ConfigError


def cache_dir() -> Path:
    """`$LANGGRAPH_LATENT_CACHE`, else `langgraph-latent` in the user's cache directory. Not created here.

    For a user without a home directory, as in many containers, a folder of this user's own among temporary files.
    """
    if own := os.environ.get("LANGGRAPH_LATENT_CACHE"):
        return home_expanded(own)
    caches = os.environ.get("XDG_CACHE_HOME")
    try:
        return Path(caches or Path.home() / ".cache") / "langgraph-latent"
    except RuntimeError:  # there is neither $HOME nor an entry for the user
        return _own_temporary_dir()


def home_expanded(path: str | Path) -> Path:
    """A path with `~` replaced. Raises `ConfigError` where the user has no home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{str(path)!r} can't be expanded: {error}; write the whole path, or set HOME") from error


def _own_temporary_dir() -> Path:
    """A folder of temporary files that belongs to this user alone: others must not put files into it.

    Raises `ConfigError` where the name is taken by somebody else.
    """
    folder = Path(tempfile.gettempdir()) / f"langgraph-latent-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700)
    try:
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            return folder
    except OSError:
        pass
    raise ConfigError(
        f"this user has no home directory, and {str(folder)!r} is not a folder of its own; set LANGGRAPH_LATENT_CACHE "
        "to a folder that can be written"
    )


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
