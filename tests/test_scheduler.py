"""Requests share model calls, in order, and none is held up or harmed by another: each is given what it gives alone."""

from __future__ import annotations

import gc
import random
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.engine import loader, scheduler
from langgraph_latent.engine.limits import Limits
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.scheduler import NewTokens, Scheduler
from langgraph_latent.errors import ConfigError, QueueFullError, RequestTimeoutError
from langgraph_latent.kv.buffer import LayerStore
from langgraph_latent.kv.state import KVTail
from langgraph_latent.spec.digest import weights_digest

KINDS = ["llama", "mistral", "qwen3", "gpt2"]
POISON = 666


class Tail:
    """What the scheduler needs of a `KVTail`."""

    num_tokens = 0

    def rewind(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


class Model:
    """A model whose logits are a row's last token id, which fails on `POISON` and can be held at a call.

    Attributes:
        calls: the ids of every row, call by call.
        begun, go: the next call sets the first and waits for the second.
        gates: what a call waits for instead, by its number.
        errors: raised once, at the end of a call of so many sequences.
    """

    def __init__(self) -> None:
        self.calls: list[list[list[int]]] = []
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.gates: dict[int, threading.Event] = {}
        self.errors: dict[int, BaseException] = {}

    def __call__(self, batch: Sequence[NewTokens]) -> torch.Tensor:
        self.calls.append([list(ids) for ids, _ in batch])
        self.begun.set()
        assert self.gates.get(len(self.calls), self.go).wait(60)
        for ids, tail in batch:
            tail.num_tokens += len(ids)
            if POISON in ids:
                raise ValueError("poison")
        if len(batch) in self.errors:
            raise self.errors.pop(len(batch))
        return torch.tensor([[float(ids[-1])] for ids, _ in batch])

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.calls]


class Requests:
    """A scheduler over a `Model`, and requests on it that each have a thread."""

    def __init__(self, max_batch: int = 16) -> None:
        self.model = Model()
        self.scheduler = Scheduler(self.model, max_batch)
        self._threads = ThreadPoolExecutor(32)

    def hold(self) -> Any:
        """A request's step whose model call does not end before `self.model.go` is set."""
        self.model.go.clear()
        self.model.begun.clear()
        held = self.begin([0])
        assert self.model.begun.wait(60)
        return held

    def begin(self, *steps: list[int], tail: Any = None, limits: Limits | None = None) -> Any:
        """A future of the last logits of a request that feeds `steps`; its slot is there when this returns."""
        slot = self.scheduler.slot(limits)
        return self._threads.submit(self._feed, slot, steps, tail or Tail())

    def _feed(self, slot: Any, steps: Sequence[list[int]], tail: Any) -> float:
        with slot:
            return [float(slot.feed(ids, tail)) for ids in steps][-1]

    def wait_for(self, num_waiting: int) -> None:
        eventually(lambda: len(self.scheduler._waiting) == num_waiting)

    def close(self) -> None:
        """End; no request and no step is left behind."""
        self._threads.shutdown()
        assert (self.scheduler.num_requests, self.scheduler._waiting) == (0, [])
        eventually(lambda: not self.scheduler._running)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def requests() -> Iterator[Requests]:
    made = Requests()
    yield made
    made.close()


@pytest.fixture
def pairs() -> Iterator[Requests]:
    """Requests on a model that takes two sequences in a call."""
    made = Requests(max_batch=2)
    yield made
    made.close()


# -- who shares a call ------------------------------------------------------------------------------------------------


def test_requests_that_come_while_the_model_is_busy_share_its_next_call(requests: Requests) -> None:
    held = requests.hold()
    futures = [requests.begin([number]) for number in range(1, 6)]
    requests.wait_for(5)
    requests.model.go.set()
    assert [future.result(60) for future in (held, *futures)] == [0, 1, 2, 3, 4, 5]
    assert requests.model.sizes == [1, 5]


def test_the_oldest_requests_go_first_where_a_call_takes_two(pairs: Requests) -> None:
    """In whatever order they come to the model."""
    held = pairs.hold()
    slots = [pairs.scheduler.slot() for _ in range(5)]
    futures = []
    for number in (3, 0, 4, 2, 1):
        futures.append(pairs._threads.submit(pairs._feed, slots[number], [[number + 1]], Tail()))
        pairs.wait_for(len(futures))
    pairs.model.go.set()
    assert [future.result(60) for future in (held, *futures)] == [0, 4, 1, 5, 3, 2]
    assert pairs.model.calls == [[[0]], [[1], [2]], [[3], [4]], [[5]]]


def test_all_of_many_requests_end_where_a_call_takes_two(pairs: Requests) -> None:
    futures = [pairs.begin(*([number] for _ in range(20))) for number in range(12)]
    assert [future.result(60) for future in futures] == list(range(12))
    assert max(pairs.model.sizes) == 2
    assert sum(pairs.model.sizes) == 12 * 20


def test_a_call_waits_for_whoever_has_just_got_a_token(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that two requests stay side by side which need a moment between a token and the next step."""

    def wait_long() -> None:
        monkeypatch.setattr(scheduler, "PATIENCE_RATIO", 1e9)
        requests.scheduler.patience_s = 1000.0

    both_decode = threading.Barrier(2, wait_long)

    def decode() -> None:
        with requests.scheduler.slot() as slot:
            for number in range(12):
                if number == 2:
                    both_decode.wait(60)
                slot.feed([number], Tail())

    for future in [requests._threads.submit(decode) for _ in range(2)]:
        future.result(60)
    assert requests.model.sizes.count(2) >= 9


def test_a_request_that_does_not_come_back_holds_nobody_up(requests: Requests) -> None:
    with requests.scheduler.slot() as stalled:
        stalled.feed([1], Tail())
        stalled.feed([2], Tail())
        assert requests.begin([3], [4]).result(60) == 4
        assert requests.scheduler.num_requests == 1


def test_a_prompt_is_fed_in_smaller_parts_beside_others(requests: Requests) -> None:
    with requests.scheduler.slot() as slot:
        alone = slot.chunk_tokens
        with requests.scheduler.slot():
            assert 1 < slot.chunk_tokens < alone
        assert slot.chunk_tokens == alone


# -- errors -----------------------------------------------------------------------------------------------------------


def test_only_the_request_whose_row_fails_alone_too_gets_the_error(requests: Requests) -> None:
    held = requests.hold()
    tails = [Tail() for _ in range(4)]
    futures = [requests.begin([number], tail=tail) for number, tail in zip([1, POISON, 3, 4], tails, strict=True)]
    requests.wait_for(4)
    requests.model.go.set()
    with pytest.raises(ValueError, match="poison"):
        futures[1].result(60)
    assert [future.result(60) for future in (held, futures[0], *futures[2:])] == [0, 1, 3, 4]
    assert requests.model.sizes == [1, 4, 1, 1, 1, 1]
    assert [tail.num_tokens for tail in tails] == [1, 0, 1, 1]


def test_an_error_does_not_keep_its_tail_alive(requests: Requests) -> None:
    """Out of memory, for one: what failed must be free before anything else is tried."""
    gc.collect()
    gc.disable()
    try:
        tail = Tail()
        gone = weakref.ref(tail)
        with requests.scheduler.slot() as slot, pytest.raises(ValueError, match="poison") as caught:
            slot.feed([POISON], tail)
        del tail, caught
        assert gone() is None
    finally:
        gc.enable()


def test_whoever_is_interrupted_within_a_call_leaves_at_once_and_the_others_get_what_it_gives(
    requests: Requests,
) -> None:
    """Twice Ctrl-C in a call for three, of which one is the main thread's: the call ends once, for the other two."""
    held = requests.hold()
    futures = [requests.begin([number]) for number in (1, 2)]
    requests.model.gates[2] = gate = threading.Event()
    requests._threads.submit(lambda: (requests.wait_for(3), requests.model.go.set()))
    with requests.scheduler.slot() as slot:
        interrupted_twice(lambda: slot.feed([3], Tail()), when=lambda: len(requests.model.calls) == 2)
    assert not any(future.done() for future in futures)
    gate.set()
    assert [future.result(60) for future in (held, *futures)] == [0, 1, 2]
    assert requests.model.sizes == [1, 3]


def test_an_interrupt_before_the_call_begins_leaves_the_model_free(
    requests: Requests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between being the one who starts the next call and starting it."""
    start = requests.scheduler._start

    def interrupted(work: Callable[[], None]) -> None:
        monkeypatch.setattr(requests.scheduler, "_start", start)
        raise KeyboardInterrupt

    monkeypatch.setattr(requests.scheduler, "_start", interrupted)
    with requests.scheduler.slot() as slot:
        with pytest.raises(KeyboardInterrupt):
            slot.feed([1], Tail())
        assert requests.begin([2]).result(60) == 2
    assert requests.model.calls == [[[2]]]


def test_a_call_started_twice_runs_once(requests: Requests, monkeypatch: pytest.MonkeyPatch) -> None:
    start = requests.scheduler._start
    monkeypatch.setattr(requests.scheduler, "_start", lambda work: (start(work), start(work)))
    assert requests.begin([1], [2]).result(60) == 2
    assert requests.model.calls == [[[1]], [[2]]]


def test_no_buffer_is_written_by_two_calls_after_two_interrupts(tiny_chat: ChatLatent) -> None:
    """The call goes on to its end without whoever was interrupted; its storage is nobody else's until then."""
    model = tiny_chat.resident()
    begun, go = threading.Event(), threading.Event()

    def hold(*_: Any) -> None:
        begun.set()
        assert go.wait(60)

    def feed() -> None:
        with state.append() as tail:
            tails.append(tail)
            model.prefill(some_ids(30, seed=1), tail)

    tails: list[KVTail] = []
    with model.empty_state().append(400) as tail:
        model.prefill(some_ids(20), tail)
        state = tail.seal()
    hook = model.model.model.layers[1].register_forward_pre_hook(hold)
    try:
        interrupted_twice(feed, when=begun.is_set)
        claim = tails[0].claim
        assert (claim.is_given_back, claim.is_writing) == (True, True)
        assert not state.buffer.claim(20)
    finally:
        hook.remove()
        go.set()
    eventually(lambda: not claim.is_writing)
    assert state.buffer.claim(20)
    state.buffer.release()
    with state.append() as tail, model.empty_state().append() as plain:
        expected = model.prefill(some_ids(20) + some_ids(9, seed=2), plain)
        assert_close(model.prefill(some_ids(9, seed=2), tail), expected)


def test_a_model_call_can_not_ask_a_chat_model(tiny_chat: ChatLatent) -> None:
    """It would wait for itself: an error says so, and nothing hangs."""

    def ask(*_: Any) -> None:
        tiny_chat.invoke("is it fine?")

    hook = tiny_chat.resident().model.model.layers[0].register_forward_pre_hook(ask)
    try:
        with pytest.raises(ConfigError, match="from within a model call"):
            tiny_chat.invoke("the team")
    finally:
        hook.remove()
    assert tiny_chat.invoke("the team").text


def interrupted_twice(work: Callable[[], object], *, when: Callable[[], bool]) -> None:
    """Run `work` in the main thread until Ctrl-C ends it, which comes when something is so, and then once more."""

    def interrupt() -> None:
        eventually(when)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    for each in (work, lambda: time.sleep(60)):
        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - it may come while the thread starts
            thread.start()
            each()
        thread.join(60)


# -- limits -----------------------------------------------------------------------------------------------------------


def test_a_request_whose_time_is_over_leaves_while_the_model_is_still_busy(requests: Requests) -> None:
    held = requests.hold()
    late = requests.begin([1], limits=Limits(timeout=0.01))
    with pytest.raises(RequestTimeoutError, match=r"after 0\.01 s") as caught:
        late.result(60)
    assert isinstance(caught.value, TimeoutError)
    assert not held.done()
    assert requests.scheduler.num_requests == 1
    requests.model.go.set()
    assert held.result(60) == 0
    assert requests.begin([2]).result(60) == 2
    assert requests.model.calls == [[[0]], [[2]]]


def test_a_full_queue_refuses_and_harms_nobody(requests: Requests) -> None:
    held = requests.hold()
    with pytest.raises(QueueFullError, match="1 requests are under way on this model and max_queue is 1"):
        requests.scheduler.slot(Limits(max_queue=1))
    second = requests.begin([1], limits=Limits(max_queue=2))
    requests.model.go.set()
    assert (held.result(60), second.result(60)) == (0, 1)


def test_retries_wait_for_room(requests: Requests) -> None:
    with requests.scheduler.slot():
        waiting = requests._threads.submit(requests.begin, [1], limits=Limits(max_queue=1, max_retries=60))
        time.sleep(0.05)
        assert not waiting.done()
    assert waiting.result(60).result(60) == 1


def test_waiting_for_room_counts_as_time(requests: Requests) -> None:
    with requests.scheduler.slot(), pytest.raises(RequestTimeoutError):
        requests.scheduler.slot(Limits(max_queue=1, max_retries=60, timeout=0.01))


# -- packed batches ---------------------------------------------------------------------------------------------------


@pytest.fixture
def model(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> ResidentModel:
    return ChatLatent(model=str(tiny_folder(request.param)), workspace=ws).resident()


def some_ids(number: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 250), k=number)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_a_batch_over_different_caches_gives_the_logits_and_caches_that_each_gives_alone(
    model: ResidentModel,
) -> None:
    """Forks of one prefix, an unrelated cache and none; one token, a few, and more than a sliding window of 24."""
    assert model.scheduler.max_batch > 1
    with model.empty_state().append() as tail:
        model.forward([NewTokens(some_ids(40), tail)])
        prefix = tail.seal()
    with model.empty_state().append() as tail:
        model.forward([NewTokens(some_ids(61, seed=1), tail)])
        other = tail.seal()
    before = prefix.checksum(), other.checksum()
    states = [prefix, prefix, prefix, prefix.crop(17), other, model.empty_state(), model.empty_state()]
    news = [some_ids(size, seed=size) for size in (1, 9, 33, 30, 1, 70, 1)]

    def fed(*, side_by_side: bool) -> list[Any]:
        tails = [state.append() for state in states]
        logits = []
        for ids in (news, [[5]] * len(news), [[6, 7]] * len(news)):
            batch = [NewTokens(new, tail) for new, tail in zip(ids, tails, strict=True)]
            logits += [model.forward(batch)] if side_by_side else [torch.cat([model.forward([each]) for each in batch])]
        layers = [layer for tail in tails for layer in tail.seal().layers()]
        for tail in tails:
            tail.close()
        return [logits, layers]

    (logits, layers), (logits_alone, layers_alone) = fed(side_by_side=True), fed(side_by_side=False)
    assert_close(torch.stack(logits), torch.stack(logits_alone))
    for pair, pair_alone in zip(layers, layers_alone, strict=True):
        assert_close(torch.stack(pair), torch.stack(pair_alone))
    assert (prefix.checksum(), other.checksum()) == before


@pytest.mark.parametrize("model", KINDS, indirect=True)
@pytest.mark.parametrize("seed", range(3))
def test_a_walk_of_calls_over_changing_batches_gives_plain_transformers_logits(model: ResidentModel, seed: int) -> None:
    """Sequences join, pause and fork; each call feeds some of them."""
    choose = random.Random(seed)
    sequences = [([], model.empty_state().append()) for _ in range(5)]
    for _ in range(12):
        if choose.random() < 0.3:
            ids, tail = choose.choice(sequences)
            sequences.append((list(ids), tail.seal().append()))
        chosen = choose.sample(range(len(sequences)), choose.randint(1, 5))
        news = [choose.choices(range(3, 250), k=choose.choice([1, 1, 1, 7, 40])) for _ in chosen]
        logits = model.forward([NewTokens(new, sequences[index][1]) for index, new in zip(chosen, news, strict=True)])
        for row, index, new in zip(logits, chosen, news, strict=True):
            sequences[index][0].extend(new)
            with torch.no_grad():
                assert_close(row, model.model(input_ids=torch.tensor([sequences[index][0]])).logits[0, -1])


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_concurrent_prompts_in_parts_give_the_logits_of_one_call(model: ResidentModel) -> None:
    """Prompts and single tokens of other requests are in the same calls."""
    prompts = [some_ids(size, seed=size) for size in (3, 150, 300, 20, 129, 128)]

    def logits(ids: list[int]) -> torch.Tensor:
        with model.empty_state().append() as tail, model.scheduler.slot() as slot:
            return model.prefill(ids, tail, slot)

    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(logits, prompts))
    for actual, ids in zip(together, prompts, strict=True):
        assert_close(actual, logits(ids))


def test_a_model_that_takes_no_batch_runs_them_one_after_another(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager attention knows one mask for all."""
    folder = tiny_folder("llama", seed=3)
    stock = AutoModelForCausalLM.from_pretrained(folder).eval()
    stock.set_attn_implementation("eager")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    eager = ResidentModel(stock, tokenizer, str(folder), weights_digest(folder))
    assert eager.scheduler.max_batch == 1
    monkeypatch.setattr(loader, "_load", lambda *_: eager)
    chat = ChatLatent(model=str(folder), workspace=ws, max_tokens=8)
    assert chat.resident() is eager
    prompts = [f"number {number}" for number in range(6)]
    expected = [chat.invoke(prompt).text for prompt in prompts]
    with ThreadPoolExecutor(6) as threads:
        assert [reply.text for reply in threads.map(chat.invoke, prompts)] == expected


def test_memory_that_runs_out_in_a_batch_leaves_the_caches_that_were_forked(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call fails between a fork's decision to copy and the copy; alone, each row has room."""
    model = ChatLatent(model=str(tiny_folder("llama")), workspace=ws).resident()
    with model.empty_state().append(200) as tail:
        model.forward([NewTokens(some_ids(40), tail)])
        prefix = tail.seal().crop(30)
        whole = tail.seal()
    before, grow, failed = whole.checksum(), LayerStore._grow, []

    def grow_later(*arguments: Any) -> int:
        if not failed:
            failed.append(True)
            raise MemoryError
        return grow(*arguments)

    news = [[5, 6], [7]]
    with prefix.append() as first, prefix.append() as second:
        expected = [model.forward([NewTokens(new, tail)]) for new, tail in zip(news, (first, second), strict=True)]
    with prefix.append() as first, prefix.append() as second, model.scheduler.slot() as slot:
        steps = [NewTokens(new, tail) for new, tail in zip(news, (first, second), strict=True)]
        monkeypatch.setattr(LayerStore, "_grow", grow_later)
        logits = fed_at_once(model.scheduler, slot, steps)
    assert failed
    assert_close(torch.stack(logits), torch.cat(expected))
    assert whole.checksum() == before


def fed_at_once(scheduler: Scheduler, slot: Any, batch: Sequence[NewTokens]) -> list[torch.Tensor]:
    """The logits of sequences that are in one call for certain."""
    scheduler._running = [object()]  # type: ignore[list-item]
    with ThreadPoolExecutor(len(batch)) as threads:
        futures = [threads.submit(slot.feed, *each) for each in batch]
        eventually(lambda: len(scheduler._waiting) == len(batch))
        with scheduler._changed:
            scheduler._running = []
            scheduler._changed.notify_all()
    return [future.result() for future in futures]
