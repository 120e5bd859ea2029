"""A cache to bytes and to a file and back, verified, against `torch.save` and `torch.load`."""

from __future__ import annotations

import hashlib
import io
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.bench import Bench
from benchmarks.harness import Figure, Result, interleave, measured
from langgraph_latent import KVHandle
from langgraph_latent.events import NOWHERE
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.state import tensor_bytes

CONTEXT = 1024


def run(bench: Bench) -> Result:
    """The cache is a random one of the model's shapes, under a real handle."""
    result = Result("export and ingest of one cache")
    messages = bench.context(bench.settings.context(CONTEXT), seed=7_000_000)
    tokens = bench.model.prompts.write(messages, reply=False).tokens
    root = KVHandle.root(bench.model.spec.identity)
    handle = root.extend("prompt", "reader", tokens, messages, bench.model.spec.bytes_per_token)
    state = bench.fake_state(len(tokens) // TOKEN_BYTES)
    parts: dict[str, list[float]] = {
        name: [] for name in ("to bytes", "from bytes", "to file", "from file", "SHA-256 and finiteness alone")
    }
    with bench.workspace.scope(), tempfile.TemporaryDirectory() as folder:
        bench.workspace.services.keeper.keep(handle, state, bench.model.spec.dtype, NOWHERE)

        def ours(number: int) -> float:
            return _round_trip(bench, handle, Path(folder) / "cache", parts)

        def stock(number: int) -> float:
            return _stock_trip(state.layers())

        whole = interleave(bench.settings.rounds, {"ours": ours, "torch.save and load": stock}, bench.ticker)
        kept = bench.workspace.state_of(handle, bench.model)
        result.checks["what was ingested equals what was exported"] = kept is not state and kept.equals(state)
    result.samples = parts | {f"to bytes and back: {name}": seconds for name, seconds in whole.items()}
    result.notes["cache_bytes"] = state.nbytes
    result.figures = [
        Figure(name, "s", tuple(parts[name])) for name in ("to bytes", "from bytes", "to file", "from file")
    ]
    shares = zip(parts["SHA-256 and finiteness alone"], parts["from bytes"], strict=True)
    result.figures.append(Figure("verification, of the way from bytes", "of", tuple(a / b for a, b in shares)))
    result.figures.append(Figure("torch.save to bytes and torch.load", "s", tuple(whole["torch.save and load"])))
    return result


def _round_trip(bench: Bench, handle: KVHandle, path: Path, parts: dict[str, list[float]]) -> float:
    """Both ways, each time without the tensors that are in the pool already; seconds of the way over bytes."""
    with measured(parts["to bytes"]):
        blob = bench.chat.export_kv_cache(handle)
    assert blob is not None
    with measured(parts["to file"]):
        bench.chat.export_kv_cache(handle, path)
    bench.workspace.evict(handle)
    with measured(parts["from file"]):
        bench.chat.ingest_kv_cache(path)
    bench.workspace.evict(handle)
    with measured(parts["from bytes"]):
        bench.chat.ingest_kv_cache(blob)
    layers = bench.workspace.state_of(handle, bench.model).layers()
    with measured(parts["SHA-256 and finiteness alone"]):
        for pair in layers:
            for tensor in pair:
                hashlib.sha256(tensor_bytes(tensor)).digest()
                torch.isfinite(tensor).all()
    return parts["to bytes"][-1] + parts["from bytes"][-1]


def _stock_trip(layers: list[tuple[torch.Tensor, ...]]) -> float:
    """What one would write without this library: no handle, no identity, no checks."""
    compact = [(keys.contiguous(), values.contiguous()) for keys, values in layers]
    begin = time.perf_counter()
    buffer = io.BytesIO()
    torch.save(compact, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return time.perf_counter() - begin
