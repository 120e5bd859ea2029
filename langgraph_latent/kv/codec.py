"""A KV state and its handle as one self-describing safetensors file or byte string, verified before anything is used.

    8 bytes header length | JSON header: tensor table, manifest, its SHA-256 and maybe a signature of it | tensors

The manifest holds schema version, model identity, per-layer kind, window, positions, shapes, dtypes, the handle and a
SHA-256 of every tensor. The codec knows tensors and manifests; whether a model fits is asked of the manifest by
whoever reads. Nothing is ever un-pickled, and nothing is allocated before sizes and shapes were checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save

from langgraph_latent.checks import is_whole_number
from langgraph_latent.errors import CodecError, HandleError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.opaque import fill_layer, plain_of
from langgraph_latent.kv.state import KVState, tensor_bytes
from langgraph_latent.spec.spec import LayerSpec, ModelSpec, StateTensor

SCHEMA_VERSION = 2
HEADER_BYTES = 2 << 20
HEADER_BYTES_PER_TOKEN = 16
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CacheFile(NamedTuple):
    """What a blob held."""

    handle: KVHandle
    state: KVState


class Signed(NamedTuple):
    """What vouches for a blob: a manifest and the signature of it, "" for none."""

    manifest: bytes
    signature: str


def unsigned(manifest: bytes) -> str:
    """No signature, for a cache that nobody vouches for."""
    return ""


def encode(handle: KVHandle, state: KVState, spec: ModelSpec, sign: Callable[[bytes], str] = unsigned) -> bytes:
    """One byte string that `decode` takes back. Sliding-window layers hold only what the next token may attend to.

    `sign` gives the signature of the manifest, which holds a digest of every tensor.
    """
    tensors: dict[str, torch.Tensor] = {}
    layers = []
    for index, kind in enumerate(state.kinds):
        own = state.tensors(index)
        layers.append(
            {
                "kind": kind.name,
                "window": kind.window,
                "begin": kind.first_needed(state.num_tokens),
                "tensors": {
                    name: {"shape": list(tensor.shape), "sha256": _sha256(tensor_bytes(tensor))}
                    for name, tensor in own.items()
                },
                "plain": {} if kind.has_tokens else plain_of(state.opaque_layers[index]),
            }
        )
        for name, tensor in own.items():
            tensors[_name(index, name)] = tensor.detach().to("cpu").contiguous()
    manifest = json.dumps(
        {
            "schema": SCHEMA_VERSION,
            "model": spec.identity,
            "dtype": spec.dtype,
            "num_tokens": state.num_tokens,
            "layers": layers,
            "handle": handle.to_dict(),
        },
        sort_keys=True,
    )
    metadata = {"manifest": manifest, "manifest_sha256": _sha256(manifest.encode())}
    if signature := sign(manifest.encode()):
        metadata["signature"] = signature
    return save(tensors, metadata)


def decode(blob: bytes | bytearray | memoryview, spec: ModelSpec, opaque_layers: Sequence[Any] = ()) -> CacheFile:
    """Verify a blob for the model of `spec` and view its tensors, sharing memory with `blob`.

    `opaque_layers` are one state's opaque layers: those of the blob are made like them, and they are not changed.

    Its signature is not looked at here. Raises `CodecError` for anything that is not exactly what `encode` wrote for
    this model.
    """
    try:
        view = memoryview(blob)
        return _decode(memoryview(bytearray(view)) if view.readonly else view, spec, opaque_layers)
    except CodecError:
        raise
    except HandleError as error:
        raise CodecError(f"the cache's provenance is refused: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RuntimeError, struct.error) as error:
        raise CodecError(f"not a cache of this library, or damaged: {type(error).__name__}: {error}") from error


def signed_part(blob: bytes | bytearray, spec: ModelSpec) -> Signed:
    """What a blob that `decode` took is signed with; whoever asks knows the keys."""
    header, _ = _split(memoryview(blob), spec)
    metadata = header["__metadata__"]
    return Signed(metadata["manifest"].encode(), str(metadata.get("signature", "")))


def read_file(path: Path, spec: ModelSpec) -> bytearray:
    """A file's bytes, read only where its header is that of a complete cache file. Raises `CodecError`."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise CodecError(f"{str(path)!r} is not a regular file")
            length = _header_length(file.read(8), status.st_size, spec)
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
            if 8 + length + max(ends, default=0) != status.st_size:
                raise CodecError(f"{str(path)!r} has {status.st_size} bytes, not those its header declares")
            blob = bytearray(status.st_size)
            file.seek(0)
            if file.readinto(blob) != status.st_size:
                raise CodecError(f"{str(path)!r} was cut while it was read")
            return blob
    except OSError as error:
        raise CodecError(f"the cache file {str(path)!r} can't be read: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise CodecError(f"{str(path)!r} is not a cache file, or damaged: {type(error).__name__}: {error}") from error


def _open_at_once(name: str, flags: int) -> int:
    """Open without waiting: a pipe that nobody writes to would hang otherwise."""
    return os.open(name, flags | os.O_NONBLOCK)


def write_file(path: Path, blob: bytes) -> None:
    """Put a blob into a file that only its owner can read, all of it or nothing. Raises `CodecError`."""
    try:
        fd, part = tempfile.mkstemp(dir=path.parent, prefix=".kv-cache.")
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(blob)
            os.replace(part, path)
        except BaseException:
            os.unlink(part)
            raise
    except (OSError, ValueError) as error:
        raise CodecError(f"the cache can't be written to {str(path)!r}: {error}") from error


def _decode(blob: memoryview, spec: ModelSpec, opaque_layers: Sequence[Any]) -> CacheFile:
    header, data = _split(blob, spec)
    metadata = header.pop("__metadata__")
    manifest = _verified_manifest(metadata)
    _check_model(manifest, spec)
    num_tokens = manifest["num_tokens"]
    handle = KVHandle.from_dict(manifest["handle"])
    if not 0 < num_tokens <= handle.num_tokens or handle.model != spec.identity:
        raise CodecError(f"the manifest's {num_tokens} cached tokens do not fit its handle of {handle.num_tokens}")
    kinds, layers, used = [], [], 0
    for index, (declared, layer) in enumerate(zip(manifest["layers"], spec.layers, strict=True)):
        kind = LayerKind(layer.kind, layer.window)
        begin = kind.first_needed(num_tokens)
        if (declared["kind"], declared["window"], declared["begin"]) != (kind.name, kind.window, begin):
            raise CodecError(
                f"layer {index} is declared {declared['kind']} from {declared['begin']}, expected {kind.name} from "
                f"{begin}"
            )
        tensors: dict[str, torch.Tensor] = {}
        for wanted in _expected_tensors(layer, num_tokens - begin, spec.dtype):
            entry, claim = header.pop(_name(index, wanted.name)), declared["tensors"].pop(wanted.name)
            tensors[wanted.name], span = _tensor(entry, claim, wanted, data, f"layer {index} {wanted.name}")
            used += span
        if declared["tensors"]:
            raise CodecError(f"layer {index} declares tensors that the model does not have")
        kinds.append(kind)
        if kind.has_tokens:
            layers.append(tuple(tensors.values()))
        else:
            layers.append(_opaque_layer(opaque_layers[index], tensors, declared["plain"], num_tokens))
    if header or used != len(data):
        raise CodecError("the file holds more than its manifest declares")
    return CacheFile(handle, KVState.from_layers(tuple(kinds), layers, num_tokens))


def _expected_tensors(layer: LayerSpec, length: int, dtype: str) -> tuple[StateTensor, ...]:
    if not LayerKind(layer.kind).has_tokens:
        return layer.tensors
    return (
        StateTensor("keys", (1, layer.kv_heads, length, layer.key_dim), dtype),
        StateTensor("values", (1, layer.kv_heads, length, layer.value_dim), dtype),
    )


def _opaque_layer(template: Any, tensors: dict[str, torch.Tensor], plain: dict[str, Any], num_tokens: int) -> Any:
    """A layer like the template with other tensors, numbers and texts; each of the template's own type."""
    known = plain_of(template)
    if plain.keys() != known.keys() or any(type(plain[path]) is not type(known[path]) for path in known):
        raise CodecError("an opaque layer has other fields than the model's")
    layer = fill_layer(template, {**tensors, **plain})
    length = layer.get_seq_length() if hasattr(layer, "get_seq_length") else num_tokens
    if length != num_tokens:
        raise CodecError(f"an opaque layer is of {length} tokens, expected {num_tokens}")
    return layer


def _split(blob: memoryview, spec: ModelSpec) -> tuple[dict[str, Any], memoryview]:
    """Header and data of a safetensors byte string."""
    length = _header_length(bytes(blob[:8]), len(blob), spec)
    header = json.loads(bytes(blob[8 : 8 + length]))
    return header, blob[8 + length :]


def _header_length(first: bytes, total: int, spec: ModelSpec) -> int:
    """The declared length of the header, where it is one that so many bytes of cache can have."""
    if len(first) < 8:
        raise CodecError(f"{total} bytes are too few for a cache")
    (length,) = struct.unpack("<Q", first)
    limit = HEADER_BYTES + HEADER_BYTES_PER_TOKEN * (total // max(spec.bytes_per_token, 1))
    if length > min(total - 8, limit):
        raise CodecError(f"a header of {length} bytes is declared in {total} bytes; at most {limit} are believed")
    return int(length)


def _verified_manifest(metadata: dict[str, str]) -> dict[str, Any]:
    if set(metadata) - {"signature"} != {"manifest", "manifest_sha256"}:
        raise CodecError("no manifest: this safetensors file is not a cache of this library")
    if _sha256(metadata["manifest"].encode()) != metadata["manifest_sha256"]:
        raise CodecError("the manifest does not match its SHA-256; the file is damaged or was altered")
    manifest: dict[str, Any] = json.loads(metadata["manifest"])
    if manifest["schema"] != SCHEMA_VERSION:
        raise CodecError(f"schema version {manifest['schema']}, this library reads {SCHEMA_VERSION}; export it again")
    return manifest


def _check_model(manifest: dict[str, Any], spec: ModelSpec) -> None:
    if manifest["model"] != spec.identity:
        raise CodecError(
            f"this cache belongs to model {manifest['model']}, not to {spec.name!r} ({spec.identity}); use the same "
            "weights, tokenizer, dtype and attention implementation, or send text"
        )
    if manifest["dtype"] != spec.dtype or len(manifest["layers"]) != len(spec.layers):
        raise CodecError("the manifest's dtype or number of layers is not the model's")


def _tensor(
    entry: dict[str, Any], declared: dict[str, Any], wanted: StateTensor, data: memoryview, where: str
) -> tuple[torch.Tensor, int]:
    """One tensor as a view of `data`, and its length in bytes, after every check."""
    kind = DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    shape = entry["shape"]
    fits = len(shape) == len(wanted.shape) and all(
        is_whole_number(size) and (size == fixed or (fixed < 0 <= size))
        for size, fixed in zip(shape, wanted.shape, strict=True)
    )
    if not fits or declared["shape"] != shape or str(kind) != f"torch.{wanted.dtype}":
        raise CodecError(f"{where} is declared {entry['dtype']} {shape}, expected {wanted.dtype} {list(wanted.shape)}")
    nbytes = kind.itemsize * math.prod(shape)
    if not 0 <= begin <= end <= len(data) or end - begin != nbytes:
        raise CodecError(f"{where} is declared at bytes {begin} to {end} of {len(data)}, expected {nbytes} bytes")
    chunk = data[begin:end]
    if _sha256(chunk) != declared["sha256"]:
        raise CodecError(f"{where} does not match its SHA-256; the file is damaged or was altered")
    tensor = torch.frombuffer(chunk, dtype=kind).reshape(shape) if nbytes else torch.empty(shape, dtype=kind)
    if kind.is_floating_point and not torch.isfinite(tensor).all():
        raise CodecError(f"{where} holds values that are not finite")
    return tensor, nbytes


def _name(index: int, tensor: str) -> str:
    return f"layers.{index}.{tensor}"


def _sha256(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()
