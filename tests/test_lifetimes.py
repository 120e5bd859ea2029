"""What is closed is gone at once: no cache and no weights wait for the garbage collector."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import LatentError
from langgraph_latent.kv.buffer import KVBuffer

STORY = "the team that reads the report hands over what it knows to the team that decides. "


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def alive() -> dict[str, int]:
    """How many caches and models there are in memory."""
    kinds = [type(each).__name__ for each in gc.get_objects() if type(each) in (KVBuffer, ResidentModel)]
    return {kind: kinds.count(kind) for kind in ("KVBuffer", "ResidentModel")}


def _fails(chat: ChatLatent) -> None:
    with pytest.raises(LatentError):
        chat.invoke(STORY * 200)


def _stops_within_a_stream(chat: ChatLatent) -> None:
    stream = chat.stream(STORY)
    next(stream), next(stream)
    stream.close()


USES: dict[str, Callable[[ChatLatent], Any]] = {
    "answers": lambda chat: [chat.invoke(f"{number} {STORY}") for number in range(3)],
    "branches": lambda chat: chat.batch([STORY, f"{STORY} who?", f"{STORY} when?"]),
    "a chain": lambda chat: chat.invoke("and?", inherit=chat.handle(chat.invoke(STORY))),
    "a stream": lambda chat: list(chat.stream(STORY)),
    "a stream that is left": _stops_within_a_stream,
    "an asynchronous call": lambda chat: asyncio.run(chat.ainvoke(STORY)),
    "an exported cache": lambda chat: chat.ingest_kv_cache(chat.export_kv_cache(chat.read(STORY)) or b""),
    "an error": _fails,
}


@pytest.mark.usefixtures("without_collector")
@pytest.mark.parametrize("use", USES)
def test_a_closed_workspace_leaves_no_cache_and_no_weights(tiny_folder: Callable[..., Path], use: str) -> None:
    folder, before = tiny_folder("llama", seed=12), alive()
    for _ in range(3):
        with LatentWorkspace() as ws:
            USES[use](ChatLatent(model=str(folder), workspace=ws, max_tokens=6))
            assert alive()["ResidentModel"] == before["ResidentModel"] + 1
    assert alive() == before
