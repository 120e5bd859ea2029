"""Digests of a model's weights that do not change with folder, sharding or file names. Knows files, not models.

The digest stands for every bit. The sketch stands for the values as bfloat16 would round them, on a sample: a copy that
was saved in another precision has another digest and the same sketch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph_latent.disk_cache import DiskCache
from langgraph_latent.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy

MEMORY_FILE = "digests.json"
SKETCH_VALUES = 4096
"""Values of each tensor that a sketch looks at, at most."""
CHUNK_BYTES = 1 << 24
SAMPLES, SAMPLE_BYTES = 64, 1 << 12
"""Blocks of a file by which it is known again, and their size."""
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "C64": ("complex64", 8),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""safetensors' names of dtypes: torch's, and the bytes of a number."""
Watch = Callable[[int, int], None]
"""Called with how many bytes are read, and of how many, by any thread."""


class Digests(NamedTuple):
    """`weights`: SHA-256 over every tensor's name, dtype, shape and bytes; `sketch`: over names, shapes and samples."""

    weights: str
    sketch: str


class StoredTensor(NamedTuple):
    """A tensor in a safetensors file: torch's name of its dtype, its shape, and where its bytes are in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def weights_digest(folder: Path) -> str:
    """`digests(folder).weights`."""
    return digests(folder).weights


def digests(folder: Path, watch: Watch | None = None) -> Digests:
    """The digests of the folder's safetensors files.

    Computed once per set of files and remembered by path, size, times, inode and a sample of their bytes; `watch` is
    called only while they are computed. Raises `ModelLoadError` for a folder without safetensors, or with one that is
    damaged.
    """
    files = weight_files(folder)
    if not files:
        raise ModelLoadError(
            f"{folder} holds no *.safetensors file, and weights are never un-pickled; save it with save_pretrained()"
        )
    if not any(stored_tensors(file) for file in files):
        raise ModelLoadError(f"the *.safetensors files in {folder} hold no tensors")
    return Digests(*remembered("weights", files, 2, lambda: _digests_of(files, watch)))


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises `ModelLoadError` for anything else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file} can't be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} holds no JSON object")
    return content


def weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def stored_tensors(file: Path) -> list[StoredTensor]:
    """What the header of a safetensors file says. Raises `ModelLoadError` where it can't be one."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > size - 8:
                raise ValueError(f"its header would be longer than the file ({size} bytes)")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        return [_stored_tensor(name, entry, 8 + length, size) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ModelLoadError(f"{file} is not a safetensors file: {error}") from error


def _stored_tensor(name: str, entry: dict[str, Any], data_begin: int, size: int) -> StoredTensor:
    dtype, itemsize = DTYPES.get(entry["dtype"], (str(entry["dtype"]), 0))
    shape = tuple(int(number) for number in entry["shape"])
    begin, end = (data_begin + int(at) for at in entry["data_offsets"])
    if not data_begin <= begin <= end <= size or (itemsize and end - begin != math.prod(shape) * itemsize):
        raise ValueError(f"its header puts {name!r} where it can't be")
    return StoredTensor(name, dtype, shape, begin, end)


def _digests_of(files: list[Path], watch: Watch | None) -> Digests:
    digest = partial(_tensor_digests, read=_adding(watch, files)) if watch else _tensor_digests
    with ThreadPoolExecutor(max_workers=2) as threads:
        found = [entry for entries in threads.map(digest, files) for entry in entries]
    weights, sketch = (json.dumps(sorted((entry[0], entry[index]) for entry in found)) for index in (1, 2))
    return Digests(hashlib.sha256(weights.encode()).hexdigest(), hashlib.sha256(sketch.encode()).hexdigest())


def _adding(watch: Watch, files: list[Path]) -> Callable[[int], None]:
    """Adds up for a watcher what several threads have read."""
    lock, done, total = threading.Lock(), 0, sum(file.stat().st_size for file in files)

    def read(num_bytes: int) -> None:
        nonlocal done
        with lock:
            done += num_bytes
            watch(done, total)

    return read


def _tensor_digests(file: Path, read: Callable[[int], None] = lambda _: None) -> list[tuple[str, str, str]]:
    """Name, digest and sketch of every tensor in a file."""
    import numpy  # not before it is needed: a config file alone needs no numbers

    stored = stored_tensors(file)
    content = numpy.memmap(file, numpy.uint8, "r")
    entries = []
    for tensor in stored:
        data: Any = content[tensor.begin : tensor.end]
        digest = hashlib.sha256(f"torch.{tensor.dtype}{tensor.shape}".encode())
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            digest.update(chunk)
            read(len(chunk))
        entries.append((tensor.name, digest.hexdigest(), _sketch(tensor, data)))
    return entries


def _sketch(tensor: StoredTensor, data: numpy.ndarray[Any, Any]) -> str:
    """A digest of some of a tensor's values, evenly spread; floating point numbers as bfloat16."""
    import numpy

    numbers = math.prod(tensor.shape)
    stride = max(1, -(-numbers // SKETCH_VALUES))
    if tensor.dtype in ("float64", "float32", "float16"):
        kind, sample = "float", bfloat16_bits(data.view(tensor.dtype)[::stride].astype(numpy.float32))
    elif tensor.dtype == "bfloat16":
        kind, sample = "float", data.view(numpy.uint16)[::stride].copy()
    else:  # integers and packed numbers as they are
        kind, sample = tensor.dtype, data[::stride].copy()
    return hashlib.sha256(f"{kind}{tensor.shape}".encode() + sample.tobytes()).hexdigest()


def bfloat16_bits(numbers: numpy.ndarray[Any, Any]) -> numpy.ndarray[Any, Any]:
    """float32 numbers rounded to bfloat16, to nearest and ties to even, as 16-bit patterns; as torch does it."""
    import numpy

    bits = numbers.view(numpy.uint32)
    rounded = (bits + numpy.uint32(0x7FFF) + ((bits >> numpy.uint32(16)) & numpy.uint32(1))) >> numpy.uint32(16)
    return numpy.where(numpy.isnan(numbers), 0x7FC0, rounded).astype(numpy.uint16)


# -- the memory ------------------------------------------------------------------------------------------------------


def remembered(
    what: str, files: list[Path], num_values: int, compute: Callable[[], tuple[str, ...]]
) -> tuple[str, ...]:
    """What `compute` gave for these files the last time, while they have not changed; `num_values` texts."""
    key = "|".join((what, *(_file_identity(file) for file in files)))
    stored = DiskCache(MEMORY_FILE)
    known = stored.get(key)
    if isinstance(known, list) and len(known) == num_values and all(isinstance(value, str) for value in known):
        return tuple(known)
    values = tuple(compute())
    stored.put(key, values)
    return values


def _file_identity(file: Path) -> str:
    """What changes with a file's content: also where size and modification time were set to those of before."""
    stat = file.stat()
    times = f"{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"
    return f"{file.resolve()}:{stat.st_size}:{times}:{_sample_digest(file, stat.st_size)}"


def _sample_digest(file: Path, size: int) -> str:
    """SHA-256 of blocks that are evenly spread over a file, the first and the last among them."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        for begin in sorted({max(0, size - SAMPLE_BYTES) * part // (SAMPLES - 1) for part in range(SAMPLES)}):
            stream.seek(begin)
            digest.update(stream.read(SAMPLE_BYTES))
    return digest.hexdigest()
