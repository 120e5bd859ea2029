"""Whoever asks can leave at any time, and what they bring along runs where it holds up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria, TextIteratorStreamer

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, Repair
from langgraph_latent.errors import ConfigError, ContextLengthError, RequestTimeoutError
from langgraph_latent.spec.compat import Level

STORY = "the team that reads the report hands over what it knows to the team that decides. "
MOVING = EdgePolicy(allow=frozenset({Level.EXACT, Level.MOVED, Level.TEXT}), repair=Repair(0.5))


@pytest.fixture
def chat(tiny_folder: Callable[..., Path]) -> Iterator[ChatLatent]:
    with LatentWorkspace(router=EdgeRouter(default=MOVING)) as ws:
        yield ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=12).load()


class Gate:
    """Holds every model call at its second layer until it is opened."""

    def __init__(self, chat: ChatLatent) -> None:
        self.reached, self._open = threading.Event(), threading.Event()
        self._hook = chat.resident().model.model.layers[1].register_forward_pre_hook(self._wait)

    def _wait(self, *_: Any) -> None:
        self.reached.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._hook.remove()
        self._open.set()


@pytest.fixture
def gate(chat: ChatLatent) -> Iterator[Gate]:
    made = Gate(chat)
    yield made
    made.open()


def composed(chat: ChatLatent) -> KVHandle:
    """A handle whose cache is still to be composed, its blocks repaired."""
    return chat.compose([chat.read(STORY), chat.read(f"other {STORY}")], system="be brief")


# What a call does when its time is over or its caller goes: each entry prepares something and gives the call.
CALLS: dict[str, Callable[[ChatLatent], Callable[..., Any]]] = {
    "a prompt": lambda chat: lambda **options: chat.invoke(STORY, **options),
    "a stream": lambda chat: lambda **options: list(chat.stream(STORY, **options)),
    "a composed cache": lambda chat: _continuing(chat, composed(chat)),
    "a cache that is gone": lambda chat: _continuing(chat, _gone(chat, composed(chat))),
    "latent steps": lambda chat: lambda **options: chat.model_copy(update=options).think(STORY, steps=4),
    "an export": lambda chat: _exporting(chat, composed(chat)),
    "a budget": lambda chat: _within_budget(chat, composed(chat)),
}


def _continuing(chat: ChatLatent, handle: KVHandle) -> Callable[..., Any]:
    return lambda **options: chat.invoke("and?", inherit=handle, **options)


def _gone(chat: ChatLatent, handle: KVHandle) -> KVHandle:
    assert chat.workspace is not None
    chat.invoke("and?", inherit=handle)
    chat.workspace.pool.clear()
    return handle


def _exporting(chat: ChatLatent, handle: KVHandle) -> Callable[..., Any]:
    return lambda **options: chat.model_copy(update=options).export_kv_cache(handle)


def _within_budget(chat: ChatLatent, handle: KVHandle) -> Callable[..., Any]:
    return lambda **options: chat.model_copy(update=options).within_budget(handle, 10, sinks=2, window=2)


@pytest.mark.parametrize("what", CALLS)
def test_a_timeout_holds_within_a_model_call_whatever_the_call_is_for(chat: ChatLatent, what: str) -> None:
    """The model call has not ended when the error is there."""
    call = CALLS[what](chat)
    gate = Gate(chat)
    try:
        with pytest.raises(RequestTimeoutError, match=r"after 0\.2 s"):
            call(timeout=0.2)
        assert gate.reached.is_set()
    finally:
        gate.open()
    with LatentWorkspace() as fresh:
        expected = ChatLatent(model=chat.model, workspace=fresh, max_tokens=12).invoke(STORY).text
    assert chat.invoke(STORY).text == expected
    assert chat.workspace is not None
    chat.workspace.check_integrity()


def test_a_timeout_holds_while_another_request_composes_the_same_cache(chat: ChatLatent) -> None:
    handle = composed(chat)
    gate = Gate(chat)
    composing = threading.Thread(target=lambda: chat.invoke("and?", inherit=handle))
    try:
        composing.start()
        assert gate.reached.wait(60)
        with pytest.raises(RequestTimeoutError):
            chat.invoke("who?", inherit=handle, timeout=0.2)
    finally:
        gate.open()
        composing.join(60)
    assert chat.invoke("who?", inherit=handle).response_metadata["kv_route"]["level"] == 1


@pytest.mark.parametrize("how", ["a prompt", "a composed cache"])
async def test_a_cancelled_task_ends_within_a_model_call(chat: ChatLatent, how: str) -> None:
    handle = composed(chat) if how == "a composed cache" else None
    gate = Gate(chat)
    task = asyncio.create_task(chat.ainvoke(STORY, inherit=handle))
    try:
        assert await asyncio.to_thread(gate.reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 60)
    finally:
        gate.open()
    assert (await chat.ainvoke(STORY)).text == chat.invoke(STORY).text


# -- what callers bring along --------------------------------------------------------------------------------------


class AskingProcessor(LogitsProcessor):
    """A guard or another expert: it asks a chat model about each token."""

    def __init__(self, chat: ChatLatent) -> None:
        self.chat, self.threads = chat, set[str]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        self.chat.invoke("is it fine?", max_tokens=2)
        return scores


class AskingCriterion(StoppingCriteria):
    def __init__(self, chat: ChatLatent) -> None:
        self.chat = chat

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.chat.invoke("is it fine?", max_tokens=2)
        return torch.zeros(1, dtype=torch.bool)


class AskingStreamer:
    """transformers' interface of a streamer."""

    def __init__(self, chat: ChatLatent) -> None:
        self.chat = chat

    def put(self, value: torch.Tensor) -> None:
        self.chat.invoke("is it fine?", max_tokens=2)

    def end(self) -> None:
        self.put(torch.zeros(1))


@pytest.mark.parametrize(
    "asking",
    [
        lambda chat: {"logits_processor": [AskingProcessor(chat)]},
        lambda chat: {"logits_processor": [AskingProcessor(chat)], "temperature": 0.7, "seed": 3},
        lambda chat: {"stopping_criteria": [AskingCriterion(chat)]},
        lambda chat: {"streamer": AskingStreamer(chat)},
    ],
)
def test_what_a_caller_brings_along_may_ask_chat_models_while_others_are_at_work(
    chat: ChatLatent, asking: Callable[[ChatLatent], dict[str, Any]]
) -> None:
    expected = chat.invoke(STORY, **asking(chat)).text
    stop, answers = threading.Event(), list[str]()

    def be_busy() -> None:
        while not stop.is_set():
            chat.invoke(STORY, max_tokens=8)

    busy = threading.Thread(target=be_busy, daemon=True)
    asks = threading.Thread(
        target=lambda: answers.extend(chat.invoke(STORY, **asking(chat)).text for _ in range(3)), daemon=True
    )
    busy.start(), asks.start()
    asks.join(60)
    assert not asks.is_alive()
    stop.set()
    busy.join(60)
    assert answers == [expected] * 3


def test_a_callers_processor_runs_in_the_callers_thread(chat: ChatLatent) -> None:
    processor = AskingProcessor(chat)
    thread = threading.Thread(target=lambda: chat.invoke(STORY, logits_processor=[processor]), name="the caller's")
    thread.start()
    thread.join(60)
    assert processor.threads == {"the caller's"}


# -- streamers end --------------------------------------------------------------------------------------------------


def _failing_call(chat: ChatLatent) -> None:
    chat.resident().model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)


@pytest.mark.parametrize(
    ("prompt", "options", "prepare", "error"),
    [
        (STORY * 200, {}, lambda chat: None, ContextLengthError),
        (STORY, {"max_tokens": -1}, lambda chat: None, ConfigError),
        (STORY, {"nonsense": 1}, lambda chat: None, ConfigError),
        (STORY, {"timeout": -1}, lambda chat: None, ConfigError),
        (STORY, {}, _failing_call, ZeroDivisionError),
        (STORY, {}, lambda chat: None, None),
    ],
)
@pytest.mark.parametrize("way", ["invoke", "stream", "ainvoke", "astream"])
async def test_a_streamer_ends_once_on_every_way_out(
    tiny_folder: Callable[..., Path],
    ws: LatentWorkspace,
    prompt: str,
    options: dict[str, Any],
    prepare: Callable[[ChatLatent], None],
    error: type[Exception] | None,
    way: str,
) -> None:
    """Whoever iterates over it must not wait for ever."""
    own = tiny_folder("llama", seed=11) if error is ZeroDivisionError else tiny_folder("llama")
    chat = ChatLatent(model=str(own), workspace=ws, max_tokens=4).load()
    streamer = TextIteratorStreamer(chat.tokenizer, timeout=60)
    prepare(chat)

    async def ask() -> None:
        match way:
            case "invoke":
                await asyncio.to_thread(lambda: chat.invoke(prompt, streamer=streamer, **options))
            case "stream":
                await asyncio.to_thread(lambda: list(chat.stream(prompt, streamer=streamer, **options)))
            case "ainvoke":
                await chat.ainvoke(prompt, streamer=streamer, **options)
            case "astream":
                async for _ in chat.astream(prompt, streamer=streamer, **options):
                    pass

    if error is None:
        await ask()
    else:
        with pytest.raises(error):
            await ask()
    "".join(streamer)
    assert streamer.text_queue.empty()
