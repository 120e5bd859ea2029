"""A handle and its tensors as one file, out of a workspace and into it. It does not know who reads the files."""

from __future__ import annotations

import time
from pathlib import Path

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import CodecError
from langgraph_latent.events import CallSite, Exported, Ingested, Refused
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.kv import codec
from langgraph_latent.workspace.assemble import biases_of
from langgraph_latent.workspace.request import Caller
from langgraph_latent.workspace.services import Services
from langgraph_latent.workspace.signing import is_signed, signature_of


def export(
    services: Services, handle: KVHandle, model: ResidentModel, path: str | Path | None, caller: Caller
) -> bytes | None:
    """Write a handle with its tensors to one file (mode 0600, whole or not at all), or return the bytes.

    It is signed: its tensors were computed here, or came with a signature of this installation.
    """
    begin = time.perf_counter()
    blob = codec.encode(handle, services.materializer.state_of(handle, model, caller), model.spec, signature_of)
    if path is not None:
        codec.write_file(Path(path), blob)
    services.keeper.emit(
        Exported.of(
            handle,
            num_tokens=handle.num_tokens,
            nbytes=len(blob),
            duration_s=time.perf_counter() - begin,
            file=str(path or ""),
        )
    )
    return blob if path is None else None


def ingest(services: Services, source: str | Path | bytes, model: ResidentModel, call_site: CallSite) -> KVHandle:
    """Verify an exported cache, then keep it. Raises `CodecError` or `TenantError`; then nothing of it was used.

    Without this installation's signature it is not proven: it serves its own handle alone, at level 1 at best.
    """
    begin = time.perf_counter()
    is_file = isinstance(source, str | Path)
    try:
        blob = codec.read_file(Path(source), model.spec) if isinstance(source, str | Path) else bytearray(source)
        handle, state = codec.decode(blob, model.spec, model.opaque_layers)
    except CodecError as error:
        services.keeper.emit(Refused(call_site=call_site, reason=str(error)))
        raise
    services.keeper.check(handle)
    model.check_vocabulary(handle)
    is_proven = is_signed(*codec.signed_part(blob, model.spec))
    if not is_proven:
        state = state.with_outside([handle.id])
    state, _ = services.materializer.move(state.with_biases(biases_of(handle, model)), model, Caller(call_site))
    services.keeper.keep(handle, state, model.spec.dtype, call_site)
    services.keeper.emit(
        Ingested.of(
            handle,
            call_site,
            num_tokens=handle.num_tokens,
            nbytes=len(blob),
            duration_s=time.perf_counter() - begin,
            file=str(source) if is_file else "",
            is_proven=is_proven,
        )
    )
    return handle
