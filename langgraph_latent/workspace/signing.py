"""The key with which one installation signs the caches that it exports, and knows them again.

It knows bytes; not what they say. Whoever can read the key file can sign as this user.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import warnings
from pathlib import Path

from langgraph_latent.disk_cache import cache_dir

KEY_FILE = "signing.key"
KEY_BYTES = 32


def signature_of(manifest: bytes) -> str:
    """HMAC-SHA256 of a manifest under the installation's key, which is made where there is none; "" without a key.

    Warns where the key can't be made: what is exported then is not proven for whoever reads it.
    """
    key = _key() or _made_key()
    if not key:
        warnings.warn(
            f"there is no signing key in {str(cache_dir())!r} and none can be made, so this cache is exported without "
            "a signature; set LANGGRAPH_LATENT_CACHE to a folder of your own",
            stacklevel=2,
        )
        return ""
    return hmac.new(key, manifest, hashlib.sha256).hexdigest()


def is_signed(manifest: bytes, signature: str) -> bool:
    """Whether a signature is this installation's, of just this manifest."""
    key = _key()
    own = hmac.new(key, manifest, hashlib.sha256).hexdigest() if key else ""
    return bool(own) and hmac.compare_digest(own.encode(), signature.encode("utf-8", "replace"))


def _key() -> bytes:
    """The installation's key; empty where there is none, or others may read or have written it."""
    try:
        with open(cache_dir() / KEY_FILE, "rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(KEY_BYTES + 1)
    except (OSError, ValueError):
        return b""
    is_own = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return key if is_own and len(key) == KEY_BYTES else b""


def _made_key() -> bytes:
    """A new key, whole or not at all; another process's where that was first. Empty where none can be written."""
    folder = cache_dir()
    part = folder / f"{KEY_FILE}.{secrets.token_hex(8)}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_new(part, secrets.token_bytes(KEY_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(part, folder / KEY_FILE)
        part.unlink()
    except (OSError, ValueError):
        return b""
    return _key()


def _write_new(path: Path, content: bytes) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)
