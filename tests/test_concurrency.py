"""Many requests at once on one chat model: each is answered as if alone, ends alone, and is stopped at once."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from langchain_core.messages import AIMessage
from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentWorkspace
from langgraph_latent.errors import ClosedError, QueueFullError, RequestTimeoutError
from langgraph_latent.event_loop import MAX_THREADS
from langgraph_latent.events import Decoded

STORY = "the team that reads the report hands over what it knows to the team that decides. "
POISON = "~~"
Work = Callable[[], Any]


class Spy:
    """Counts the sequences of a model's calls, and holds the model at one of them.

    Attributes:
        sizes: sequences per call.
        under_way: requests, per call.
    """

    def __init__(self, chat: ChatLatent) -> None:
        self.scheduler = chat.resident().scheduler
        self.sizes: list[int] = []
        self.under_way: list[int] = []
        self._run = self.scheduler._run
        self._held_at = 0
        self._is_ready: Callable[[], bool] = lambda: True
        self.held, self.go = threading.Event(), threading.Event()
        self.scheduler._run = self

    def __call__(self, batch: Sequence[Any]) -> torch.Tensor:
        self.sizes.append(len(batch))
        if len(self.sizes) == self._held_at:
            self.held.set()
            assert self.go.wait(60)
        eventually(self._is_ready)
        self._is_ready = lambda: True
        self.under_way.append(self.scheduler.num_requests)
        return self._run(batch)

    def hold(self, number: int) -> None:
        """Stop in call `number` from now until `go` is set."""
        self.held.clear()
        self.go.clear()
        self._held_at = len(self.sizes) + number

    def gather(self, number: int) -> None:
        """Stop in the next call until it and those that wait for theirs are `number` and one more."""
        self._is_ready = lambda: len(self.scheduler._waiting) + len(self.scheduler._running) == number + 1

    def close(self) -> None:
        """End; no request is left behind."""
        self.scheduler._run = self._run
        eventually(lambda: not self.scheduler.num_requests)
        assert not self.scheduler._waiting
        eventually(lambda: not self.scheduler._running)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


async def until(is_so: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, is_so)


@pytest.fixture
def spy(tiny_chat: ChatLatent) -> Iterator[Spy]:
    made = Spy(tiny_chat)
    yield made
    made.close()


def together(works: Iterable[Work]) -> list[Any]:
    """Results, or errors, of calls begun at once in a thread each."""
    works = list(works)
    gate, results = threading.Barrier(len(works)), [None] * len(works)

    def run(index: int, work: Work) -> None:
        gate.wait(60)
        try:
            results[index] = work()
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    return results


def alone(chat: ChatLatent, prompt: str = STORY, **options: Any) -> str:
    """The answer in a workspace that has seen nothing else."""
    with LatentWorkspace(memory="1GiB") as fresh:
        return ChatLatent(model=chat.model, workspace=fresh, max_tokens=chat.max_tokens).invoke(prompt, **options).text


def joined(chunks: Iterable[Any]) -> str:
    return "".join(chunk.text for chunk in chunks)


class Failing:
    """A logits processor or stopping criterion that raises when it is asked a third time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, context: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls == 3:
            raise ZeroDivisionError("asked a third time")
        return scores if self.is_processor else torch.zeros(1, dtype=torch.bool)

    is_processor = True


class FailingCriterion(Failing):
    is_processor = False


# -- the same answers ---------------------------------------------------------------------------------------------


def get_weather(city: str) -> str:
    """The weather in a city."""
    return city


def requests(chat: ChatLatent, doc: KVHandle) -> list[Work]:
    """Requests of every sort."""
    hot = {"temperature": 1.3, "top_p": 0.9, "top_k": 40}
    stop = alone(chat)[3:5]
    return [
        *(lambda n=n: chat.invoke(f"{n} {STORY * n}", max_tokens=6 + 5 * n).text for n in range(4)),
        lambda: chat.invoke(STORY, stop=[stop]).text,
        *(lambda seed=seed: chat.invoke(STORY, seed=seed, **hot).text for seed in (1, 2)),
        *(lambda n=n: chat.invoke(f"question {n}?", inherit=doc).text for n in range(3)),
        lambda: chat.invoke("and?", inherit=chat.invoke("who?", inherit=doc, max_tokens=5)).text,
        *(lambda n=n: joined(chat.stream(f"tell me {n}", max_tokens=10 + 10 * n)) for n in range(2)),
        lambda: joined(chat.stream("and?", inherit=doc, seed=3, **hot)),
        lambda: chat.bind_tools([get_weather]).invoke("weather?").text,
        lambda: joined(chat.bind_tools([get_weather]).stream("sun?")),
        lambda: chat.read([("human", STORY * 12)]).id,
    ]


@pytest.mark.parametrize("kind", ["llama", "mistral", "gpt2"])
def test_requests_of_every_sort_get_the_answers_they_get_alone(
    kind: str, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=str(tiny_folder(kind)), workspace=ws, max_tokens=24)
    doc = chat.read([("system", "You read."), ("human", STORY * 3)])
    expected = []
    for index in range(len(requests(chat, doc))):
        with LatentWorkspace(memory="1GiB") as fresh:
            lonely = ChatLatent(model=chat.model, workspace=fresh, max_tokens=24)
            expected.append(requests(lonely, doc)[index]())
    spy = Spy(chat)
    assert together(requests(chat, doc)) == expected
    assert sum(spy.sizes) > 2 * len(spy.sizes)
    assert max(spy.sizes) > 6
    spy.close()


def test_a_request_joins_a_call_between_two_tokens_of_others(tiny_chat: ChatLatent, spy: Spy) -> None:
    stream = tiny_chat.stream(STORY)
    first = next(stream).text
    assert tiny_chat.invoke("short", max_tokens=2).text == alone(tiny_chat, "short", max_tokens=2)
    assert first + joined(stream) == alone(tiny_chat)


# -- errors ---------------------------------------------------------------------------------------------------------


def test_what_a_request_brings_along_fails_only_that_request(tiny_chat: ChatLatent, spy: Spy) -> None:
    prompts = [f"number {n}" for n in range(4)]
    expected = [alone(tiny_chat, prompt) for prompt in prompts]
    spy.gather(6)
    *replies, one, other, streamed = together(
        [
            *(lambda prompt=prompt: tiny_chat.invoke(prompt).text for prompt in prompts),
            lambda: tiny_chat.invoke(STORY, logits_processor=[Failing()]),
            lambda: tiny_chat.invoke(STORY, stopping_criteria=[FailingCriterion()]),
            lambda: joined(tiny_chat.stream(STORY, logits_processor=[Failing()])),
        ]
    )
    assert replies == expected
    assert [type(error) for error in (one, other, streamed)] == [ZeroDivisionError] * 3
    assert max(spy.sizes) >= 6
    assert tiny_chat.invoke(STORY).text == alone(tiny_chat)


def fail_in_last_layer(chat: ChatLatent, is_bad: Callable[[torch.Tensor, bool], bool]) -> list[Any]:
    """Make calls fail when the first layers have written already; `is_bad` sees token ids and whether it is a batch.

    Returns what removes it again.
    """
    model = chat.resident().model.model
    bad = []

    def look(module: Any, arguments: Any, options: dict[str, Any]) -> None:
        bad[:] = [is_bad(options["input_ids"], options["attention_mask"].dim() == 4)]

    def fail(module: Any, arguments: Any) -> None:
        if bad[0]:
            raise RuntimeError("no room for it")

    return [
        model.register_forward_pre_hook(look, with_kwargs=True),
        model.layers[-1].register_forward_pre_hook(fail),
    ]


def test_a_call_that_fails_only_for_several_fails_nobody(tiny_chat: ChatLatent, spy: Spy) -> None:
    """Out of memory for all, enough of it for each."""
    prompts = [f"number {n}" for n in range(5)]
    doc = tiny_chat.read(STORY)
    expected = [alone(tiny_chat, prompt, inherit=doc) for prompt in prompts]
    hooks = fail_in_last_layer(tiny_chat, lambda ids, is_packed: is_packed)
    try:
        replies = together([lambda prompt=prompt: tiny_chat.invoke(prompt, inherit=doc).text for prompt in prompts])
        assert replies == expected
        assert max(spy.sizes) > 1
    finally:
        for hook in hooks:
            hook.remove()


def test_a_call_that_fails_for_one_of_several_fails_only_that_one(tiny_chat: ChatLatent, spy: Spy) -> None:
    poison = torch.tensor(tiny_chat.get_token_ids(POISON))
    assert len(poison) == 2
    prompts = [f"number {n}" for n in range(5)]
    expected = [alone(tiny_chat, prompt) for prompt in prompts]

    def is_bad(ids: torch.Tensor, is_packed: bool) -> bool:
        return bool((ids[0].unfold(0, 2, 1) == poison).all(-1).any()) if ids.shape[1] > 1 else False

    hooks = fail_in_last_layer(tiny_chat, is_bad)
    try:
        spy.gather(5)
        works = [lambda prompt=prompt: tiny_chat.invoke(prompt).text for prompt in [*prompts, POISON]]
        *replies, failed = together(works)
    finally:
        for hook in hooks:
            hook.remove()
    assert replies == expected
    assert isinstance(failed, RuntimeError)
    assert str(failed) == "no room for it"
    assert max(spy.sizes) >= 5


# -- streams that stall, calls inside calls --------------------------------------------------------------------------


def test_a_stream_that_nobody_pulls_holds_nobody_up(tiny_chat: ChatLatent, spy: Spy) -> None:
    stream = tiny_chat.stream(STORY, max_tokens=200)
    next(stream), next(stream)
    prompts = [f"number {n}" for n in range(4)]
    replies = together([lambda prompt=prompt: tiny_chat.invoke(prompt).text for prompt in prompts])
    assert replies == [alone(tiny_chat, prompt) for prompt in prompts]
    assert spy.scheduler.num_requests == 1
    stream.close()
    assert spy.scheduler.num_requests == 0


def test_a_dropped_stream_gives_its_place_back(tiny_chat: ChatLatent, spy: Spy) -> None:
    stream = tiny_chat.stream(STORY)
    next(stream)
    assert spy.scheduler.num_requests == 1
    del stream
    gc.collect()
    assert spy.scheduler.num_requests == 0


def test_a_call_inside_a_stream_of_the_same_model_and_thread_is_answered(tiny_chat: ChatLatent, spy: Spy) -> None:
    def nested() -> tuple[str, set[str]]:
        parts, inner = [], set()
        for chunk in tiny_chat.stream(STORY):
            parts.append(chunk)
            inner.add(tiny_chat.invoke("inner", max_tokens=3).text)
        return joined(parts), inner

    assert together([nested]) == [(alone(tiny_chat), {alone(tiny_chat, "inner", max_tokens=3)})]


# -- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_call", [False, True])
def test_a_request_ends_when_its_time_is_over(per_call: bool, tiny_chat: ChatLatent, spy: Spy) -> None:
    limited = tiny_chat.model_copy(update={} if per_call else {"timeout": 0.1})
    options: dict[str, Any] = {"max_tokens": 1900, **({"timeout": 0.1} if per_call else {})}
    late, in_time = together([lambda: limited.invoke(STORY, **options), lambda: tiny_chat.invoke("short").text])
    assert isinstance(late, RequestTimeoutError)
    assert isinstance(late, TimeoutError)
    assert in_time == alone(tiny_chat, "short")
    with pytest.raises(RequestTimeoutError, match=r"not done after 0\.1 s"):
        list(limited.stream(STORY, **options))
    assert spy.scheduler.num_requests == 0
    assert limited.invoke(STORY, timeout=None, max_tokens=12).text == alone(tiny_chat)


async def test_a_request_ends_when_its_time_is_over_in_an_event_loop_too(tiny_chat: ChatLatent, spy: Spy) -> None:
    options: dict[str, Any] = {"max_tokens": 1900, "timeout": 0.1}
    with pytest.raises(RequestTimeoutError):
        await tiny_chat.ainvoke(STORY, **options)
    with pytest.raises(RequestTimeoutError):
        [_ async for _ in tiny_chat.astream(STORY, **options)]
    assert (await tiny_chat.ainvoke(STORY)).text == alone(tiny_chat)


def test_a_full_queue_refuses_at_once_or_waits_as_often_as_it_may(tiny_chat: ChatLatent, spy: Spy) -> None:
    stream = tiny_chat.stream(STORY)
    first = next(stream).text
    limited = tiny_chat.model_copy(update={"max_queue": 1})
    with pytest.raises(QueueFullError):
        limited.invoke("refused")
    patient = tiny_chat.model_copy(update={"max_queue": 1, "max_retries": 60})
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(patient.invoke, "waits")
        assert tiny_chat.invoke("no limit").text == alone(tiny_chat, "no limit")
        assert not waiting.done()
        assert first + joined(stream) == alone(tiny_chat)
        assert waiting.result(60).text == alone(tiny_chat, "waits")
    assert limited.invoke("accepted").text == alone(tiny_chat, "accepted")


@pytest.mark.parametrize("max_batch", [1, 2])
def test_more_requests_than_fit_into_a_call_all_end(max_batch: int, tiny_chat: ChatLatent, spy: Spy) -> None:
    prompts = [f"number {n}" for n in range(5)]
    spy.scheduler.max_batch = max_batch
    try:
        replies = together([lambda prompt=prompt: tiny_chat.invoke(prompt).text for prompt in prompts])
    finally:
        spy.scheduler.max_batch = 16
    assert replies == [alone(tiny_chat, prompt) for prompt in prompts]
    assert max(spy.sizes) == max_batch


# -- event loops, and stopping -------------------------------------------------------------------------------------


@pytest.fixture
def loop_errors() -> Iterator[list[Any]]:
    """What an event loop would have logged as never retrieved; the test installs its `append`."""
    seen: list[Any] = []
    yield seen
    gc.collect()
    assert seen == []


def watch(errors: list[Any]) -> None:
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))


async def test_the_event_loop_goes_on_while_the_model_works(tiny_chat: ChatLatent, spy: Spy) -> None:
    """Field case 17: every form of call stands still inside the model, and the loop does not."""

    async def stream() -> str:
        return joined([chunk async for chunk in tiny_chat.astream(STORY)])

    calls = (lambda: tiny_chat.ainvoke(STORY), stream, lambda: tiny_chat.aread("read"), lambda: tiny_chat.abatch(["a"]))
    ticks = 0
    for begin in calls:
        spy.hold(1)
        task = asyncio.ensure_future(begin())
        while not spy.held.is_set() or ticks % 10:
            await asyncio.sleep(0.001)
            ticks += 1
        assert not task.done()
        spy.go.set()
        await task
    assert ticks >= 40


async def test_cancelling_a_task_stops_its_generation_within_a_token(
    tiny_chat: ChatLatent, spy: Spy, loop_errors: list[Any]
) -> None:
    watch(loop_errors)
    spy.hold(5)
    task = asyncio.create_task(tiny_chat.ainvoke(STORY, max_tokens=1900))
    await until(spy.held.is_set)
    task.cancel()
    await turns()
    assert not task.done()
    spy.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(spy.sizes) == 5
    assert spy.scheduler.num_requests == 0
    assert (await tiny_chat.ainvoke(STORY)).text == alone(tiny_chat)


async def turns() -> None:
    """Let everything happen that an event loop has to do now."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_timeout_of_asyncio_stops_the_generation(
    tiny_chat: ChatLatent, ws: LatentWorkspace, spy: Spy, loop_errors: list[Any]
) -> None:
    watch(loop_errors)
    spy.hold(5)
    task = asyncio.create_task(tiny_chat.ainvoke(STORY, max_tokens=1900))
    await until(spy.held.is_set)
    waiting = asyncio.create_task(asyncio.wait_for(task, timeout=0.001))
    await asyncio.sleep(0.1)  # the time is over, whatever else there was to do
    spy.go.set()
    with pytest.raises(TimeoutError):
        await waiting
    assert spy.scheduler.num_requests == 0
    (ended,) = [event for event in ws.tracer.events if isinstance(event, Decoded)]
    assert (ended.finish_reason, len(spy.sizes)) == ("cancelled", 5)


@pytest.mark.parametrize("how", ["aclose", "break", "cancel"])
async def test_leaving_an_astream_after_two_chunks_stops_its_generation_within_a_token(
    how: str, tiny_chat: ChatLatent, ws: LatentWorkspace, spy: Spy, loop_errors: list[Any]
) -> None:
    """Field case 22."""
    watch(loop_errors)
    spy.hold(8)

    async def two_chunks() -> None:
        stream = tiny_chat.astream(STORY, max_tokens=1900)
        await anext(stream), await anext(stream)
        await until(spy.held.is_set)
        if how == "aclose":
            await stream.aclose()
        elif how == "cancel":
            await anext_for_ever(stream)

    task = asyncio.create_task(two_chunks())
    await until(spy.held.is_set)
    for _ in range(3):
        await asyncio.sleep(0.01)
        await turns()
    if how == "cancel":
        task.cancel()
    gc.collect()
    await turns()
    spy.go.set()
    await asyncio.wait([task])
    assert task.cancelled() == (how == "cancel")
    await until(lambda: not spy.scheduler.num_requests)
    assert len(spy.sizes) == 8
    await turns()
    assert [event.finish_reason for event in ws.tracer.events if isinstance(event, Decoded)] == ["cancelled"]
    assert (await tiny_chat.ainvoke(STORY)).text == alone(tiny_chat)


async def anext_for_ever(stream: Any) -> None:
    async for _ in stream:
        pass


def test_closing_a_stream_after_two_chunks_stops_its_generation(tiny_chat: ChatLatent, spy: Spy) -> None:
    """Field case 22."""
    stream = tiny_chat.stream(STORY, max_tokens=1900)
    next(stream), next(stream)
    num_calls = len(spy.sizes)
    stream.close()
    assert (len(spy.sizes), spy.scheduler.num_requests) == (num_calls, 0)
    assert tiny_chat.invoke(STORY).text == alone(tiny_chat)
    assert max(spy.sizes) == 1


async def test_errors_reach_whoever_awaits_and_nobody_else(
    tiny_chat: ChatLatent, spy: Spy, loop_errors: list[Any]
) -> None:
    watch(loop_errors)
    with pytest.raises(ZeroDivisionError, match="asked a third time"):
        await tiny_chat.ainvoke(STORY, logits_processor=[Failing()])
    stream = tiny_chat.astream(STORY, logits_processor=[Failing()])
    await anext(stream), await anext(stream)
    with pytest.raises(ZeroDivisionError, match="asked a third time"):
        await anext(stream)
    gathered = (tiny_chat.ainvoke(STORY), tiny_chat.ainvoke(STORY, logits_processor=[Failing()]))
    reply, error = await asyncio.gather(*gathered, return_exceptions=True)
    assert isinstance(error, ZeroDivisionError)
    assert isinstance(reply, AIMessage)
    assert reply.text == alone(tiny_chat)


@pytest.mark.parametrize("streams", [False, True])
async def test_an_error_after_the_caller_has_gone_is_nobodys(
    streams: bool, tiny_chat: ChatLatent, spy: Spy, loop_errors: list[Any]
) -> None:
    watch(loop_errors)
    spy.hold(3)
    options: dict[str, Any] = {"logits_processor": [Failing()]}
    call = anext_for_ever(tiny_chat.astream(STORY, **options)) if streams else tiny_chat.ainvoke(STORY, **options)
    task = asyncio.create_task(call)
    await until(spy.held.is_set)
    task.cancel()
    await turns()
    spy.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not spy.scheduler.num_requests)


# -- a thousand -----------------------------------------------------------------------------------------------------


def short_calls(chat: ChatLatent) -> tuple[list[tuple[str, int]], dict[tuple[str, int], str]]:
    """A thousand calls of twenty sorts in a mixed order, and the answers that they get alone."""
    sorts = [(f"number {n} {STORY[: 9 * n]}", 2 + n % 3) for n in range(20)]
    expected = {(prompt, size): alone(chat, prompt, max_tokens=size) for prompt, size in sorts}
    return random.Random(0).choices(sorts, k=1000), expected


@pytest.mark.slow
def test_a_thousand_short_calls_from_sixteen_threads_are_all_right(tiny_chat: ChatLatent, spy: Spy) -> None:
    calls, expected = short_calls(tiny_chat)
    num_threads = threading.active_count()

    def answer(call: tuple[str, int]) -> str:
        return tiny_chat.invoke(call[0], max_tokens=call[1]).text

    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(answer, calls)) == [expected[call] for call in calls]
    assert threading.active_count() == num_threads
    assert sum(spy.sizes) > 2 * len(spy.sizes)


@pytest.mark.slow
async def test_a_thousand_short_calls_from_an_event_loop_are_all_right(tiny_chat: ChatLatent, spy: Spy) -> None:
    calls, expected = short_calls(tiny_chat)
    num_threads = threading.active_count()
    replies = await asyncio.gather(*(tiny_chat.ainvoke(prompt, max_tokens=size) for prompt, size in calls))
    assert [reply.text for reply in replies] == [expected[call] for call in calls]
    assert threading.active_count() <= num_threads + MAX_THREADS
    assert max(spy.under_way) <= MAX_THREADS
    assert sum(spy.sizes) > 2 * len(spy.sizes)


# -- closing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", ["workspace", "chat"])
def test_closing_during_use_leaves_every_call_right_or_refused(closes: str, tiny_folder: Callable[..., Path]) -> None:
    workspace = LatentWorkspace(memory="1GiB")
    chat = ChatLatent(model=str(tiny_folder("llama", seed=9)), workspace=workspace, max_tokens=10)
    expected = [alone(chat, f"number {n}") for n in range(8)]
    weights = weakref.ref(chat.resident().model)
    spies = [Spy(chat)]

    def ask(number: int) -> list[Any]:
        replies: list[Any] = []
        while not replies or isinstance(replies[-1], str):
            try:
                replies.append(chat.invoke(f"number {number}").text)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                replies.append(error)
        return replies

    def close() -> None:
        under_way = spies[0].under_way
        eventually(lambda: len(under_way) > 30 and under_way[-1] > 4)
        (workspace if closes == "workspace" else chat).close()

    *replies, _ = together([*(lambda n=n: ask(n) for n in range(8)), close])
    for own, answer in zip(replies, expected, strict=True):
        *answers, error = own
        assert set(answers) <= {answer}
        assert isinstance(error, ClosedError)
    assert sum(map(len, replies)) > 8
    spies.pop().close()
    gc.collect()
    assert weights() is None
    workspace.check_integrity()
    workspace.close()
    assert workspace.size_info().pool.used_bytes == 0


def test_a_stream_goes_on_to_its_end_when_its_workspace_is_closed(tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace(memory="1GiB") as workspace:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=workspace, max_tokens=12)
        expected = alone(chat)
        stream = chat.stream(STORY)
        first = next(stream).text
    assert first + joined(stream) == expected
    assert workspace.size_info().pool.used_bytes == 0


# -- batches and graphs -----------------------------------------------------------------------------------------------


PROMPTS = [f"number {n}" for n in range(12)]


def test_the_inputs_of_a_batch_share_calls(tiny_chat: ChatLatent, spy: Spy) -> None:
    spy.gather(11)
    replies = tiny_chat.batch(PROMPTS)
    assert max(spy.sizes) >= 11
    assert [reply.text for reply in replies] == [alone(tiny_chat, prompt) for prompt in PROMPTS]


async def test_the_inputs_of_an_abatch_share_calls(tiny_chat: ChatLatent, spy: Spy) -> None:
    spy.gather(11)
    replies = await tiny_chat.abatch(PROMPTS)
    assert max(spy.sizes) >= 11
    assert [reply.text for reply in replies] == [alone(tiny_chat, prompt) for prompt in PROMPTS]


async def test_a_batch_runs_as_many_at_a_time_as_it_may(tiny_chat: ChatLatent, spy: Spy) -> None:
    config: Any = {"max_concurrency": 3}
    for replies in (tiny_chat.batch(PROMPTS, config), await tiny_chat.abatch(PROMPTS, config)):
        assert [reply.text for reply in replies] == [alone(tiny_chat, prompt) for prompt in PROMPTS]
    assert 1 < max(spy.under_way) <= 3


def test_an_input_of_a_batch_that_fails_fails_alone(tiny_chat: ChatLatent, spy: Spy) -> None:
    replies = tiny_chat.batch([*PROMPTS[:3], ""], return_exceptions=True)
    assert [reply.text for reply in replies[:3]] == [alone(tiny_chat, prompt) for prompt in PROMPTS[:3]]
    assert isinstance(replies[3], Exception)


class State(TypedDict, total=False):
    latent: Annotated[KVHandle | None, LatentChannel]
    findings: Annotated[list[KVHandle], LatentChannel(policy="collect")]


@pytest.mark.parametrize("in_loop", [False, True])
async def test_parallel_branches_of_a_graph_share_calls_and_have_their_own_handles(
    in_loop: bool, tiny_chat: ChatLatent, ws: LatentWorkspace, spy: Spy
) -> None:
    """Field case 55."""
    builder = StateGraph(State)
    for name in "abc":
        builder.add_node(name, LatentNode(tiny_chat, prompt=f"{name}?", latent="findings", inherit="latent"))
        builder.add_edge(START, name)
    graph, doc = builder.compile(), tiny_chat.read(STORY)
    spy.gather(2)
    update: Any = {"latent": doc}
    findings = (await graph.ainvoke(update) if in_loop else graph.invoke(update))["findings"]
    assert max(spy.sizes) >= 2
    assert [handle.source for handle in findings] == ["a", "b", "c"]
    for name, handle in zip("abc", findings, strict=True):
        assert handle.messages[-1]["content"] == alone(tiny_chat, f"{name}?", inherit=doc)
        assert handle.token_ids[: doc.num_tokens] == doc.token_ids
        assert ws.pool.has(handle.id)
