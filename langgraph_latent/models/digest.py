"""A digest of a model's weights that does not change with folder, sharding or file names. Knows files, not models."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from safetensors import safe_open

from langgraph_latent.errors import ModelLoadError
from langgraph_latent.kv.state import tensor_bytes
from langgraph_latent.paths import cache_dir

MEMORY_FILE = "weight-digests.json"


def weights_digest(folder: Path) -> str:
    """SHA-256 over every tensor's name, dtype, shape and bytes in the folder's safetensors files.

    Computed once per set of files and remembered by path, size, modification time and inode. Raises `ModelLoadError`
    for a folder without safetensors.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelLoadError(
            f"{folder} holds no *.safetensors file, and weights are never un-pickled; save it with save_pretrained()"
        )
    identity = "|".join(_file_identity(file) for file in files)
    known = _recall()
    if identity not in known:
        known[identity] = _digest_of(files)
        _remember(identity, known[identity])
    return known[identity]


def _digest_of(files: list[Path]) -> str:
    with ThreadPoolExecutor(max_workers=2) as threads:
        tensors = [pair for pairs in threads.map(_tensor_digests, files) for pair in pairs]
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()


def _tensor_digests(file: Path) -> list[tuple[str, str]]:
    digests = []
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (not a mapping)
            tensor = tensors.get_tensor(name)
            digest = hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor_bytes(tensor))
            digests.append((name, digest.hexdigest()))
    return digests


def _file_identity(file: Path) -> str:
    stat = file.stat()
    return f"{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"


def _recall() -> dict[str, str]:
    try:
        known = json.loads((cache_dir() / MEMORY_FILE).read_text())
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}


def _remember(identity: str, digest: str) -> None:
    """Add one digest to the memory; where the cache directory can't be written, it is computed again next time."""
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        fd, part = tempfile.mkstemp(dir=cache_dir(), prefix=MEMORY_FILE)
        with os.fdopen(fd, "w") as file:
            json.dump({**_recall(), identity: digest}, file)
        os.replace(part, cache_dir() / MEMORY_FILE)
    except OSError:
        return
