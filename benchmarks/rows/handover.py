"""In-process hand-over: from a sender's finished state to a cache that the receiver's model can run on."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

from transformers import DynamicCache

from benchmarks.bench import QUESTIONS, Bench, user
from benchmarks.harness import Figure, Result, Side, at_most, interleave, ratio
from langgraph_latent.events import NOWHERE
from langgraph_latent.handle import KVHandle
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.pool import CachePool
from langgraph_latent.prompt.template import PLAIN
from langgraph_latent.workspace.request import Request

LENGTHS = (128, 1024, 8192)
ADDED = 64
"""Tokens that the sender itself added to what it inherited."""
REPEATS = 50

GOAL = at_most(100e-6, aim=50e-6)
FLAT = at_most(1.5)


class FinishedState:
    """A sender's finished state of about `num_tokens` tokens, and the ways to hand it over. Each returns seconds."""

    def __init__(self, bench: Bench, num_tokens: int) -> None:
        self._bench = bench
        self._messages = bench.context(bench.settings.context(num_tokens), seed=num_tokens)
        self._question = [user(QUESTIONS[2])]
        self._tokens = bench.model.prompts.write(self._messages, reply=False).tokens
        self._prompt = bench.model.prompts.write([*self._messages, *self._question], reply=True).tokens
        self.num_tokens = len(self._tokens) // TOKEN_BYTES
        self._root = KVHandle.root(bench.model.spec.identity)
        self._inherited = self._root.extend("prompt", "reader", self._tokens[: -ADDED * TOKEN_BYTES], self._messages, 1)
        self._state = bench.fake_state(self.num_tokens)
        self._stock = bench.stock.cache(self._state)
        self._pool = CachePool(self._state.buffer.nbytes * 2)
        self._base = KVState(self._state.buffer, self._state.kinds, self.num_tokens - ADDED)
        self._pool.put(bench.namespace, self._inherited.tokens, self._base, self._inherited.id)

    def ours(self) -> float:
        """The sender extended what it inherited by `ADDED` tokens."""
        added = self._tokens[-ADDED * TOKEN_BYTES :]
        begin = time.perf_counter()
        handle = self._inherited.extend("prompt", "analyst", added, self._question, 1)
        return self._put_and_take(handle, begin)

    def whole(self) -> float:
        """The sender read all tokens itself. Its handle was made before the prefill, as in `Generation`."""
        handle = self._root.extend("prompt", "reader", self._tokens, self._messages, 1)
        return self._put_and_take(handle, time.perf_counter())

    def _put_and_take(self, handle: KVHandle, begin: float) -> float:
        limit = len(self._prompt) // TOKEN_BYTES - 1
        self._pool.put(self._bench.namespace, handle.tokens, self._state, handle.id)
        found = self._pool.longest_prefix(self._bench.namespace, self._prompt, limit)
        assert found is not None
        with found.append(limit + 1) as tail:
            cache = tail.cache
            seconds = time.perf_counter() - begin
            assert cache.get_seq_length() == self.num_tokens, "the receiver gets all of it"
        self._pool.drop(handle.id)
        return seconds

    def delivered(self) -> float:
        """The whole way through a workspace: handle, pool, events, routing, chat template and tokenizer.

        Only where the model's longest sequence leaves room for the question.
        """
        workspace, model = self._bench.workspace, self._bench.model
        services = workspace.services
        handle = self._root.extend("prompt", "reader", self._tokens, self._messages, 1)
        with workspace.scope():
            begin = time.perf_counter()
            services.keeper.keep(handle, self._state, model.spec.dtype, NOWHERE)
            delivery = services.deliverer.deliver(model, Request(self._question, PLAIN, [handle], True, True))
            with delivery.state.append(len(delivery.tokens) // TOKEN_BYTES) as tail:
                seconds = time.perf_counter() - begin
                assert tail.num_tokens == self.num_tokens, "the receiver gets all of it"
        return seconds

    def forked(self) -> float:
        """Stock transformers: a shallow copy of the cache and its layers."""
        return _timed(partial(self._bench.stock.fork, self._stock))

    def copied(self) -> float:
        """Stock transformers: a deep copy of the cache."""
        return _timed(partial(copy.deepcopy, self._stock))


def run(bench: Bench) -> Result:
    """All lengths and ways in turn; a round's number is the median of its repeats."""
    result = Result("hand-over in process, until the model can run")
    states = {length: FinishedState(bench, length) for length in LENGTHS}
    sides: dict[str, Side] = {}
    for length, state in states.items():
        ways = {"ours": state.ours, "ours, all read by the sender": state.whole, "stock fork": state.forked}
        if bench.fits(state.num_tokens + bench.settings.context(64)):
            ways["ours, with template and tokenizer"] = state.delivered
        for name, way in ways.items():
            key = f"{length} {name}"
            sides[key] = partial(_repeated, way, result.samples.setdefault(f"{key}, every repeat", []))
        sides[f"{length} stock deepcopy"] = partial(_once, state.copied)
    result.samples.update(interleave(bench.settings.rounds, sides, bench.ticker))
    result.notes["tokens"] = {str(length): state.num_tokens for length, state in states.items()}
    _add_figures(result)
    return result


def _add_figures(result: Result) -> None:
    samples = result.samples
    for length in LENGTHS:
        result.figures.append(Figure(f"{length:,} tokens", "s", tuple(samples[f"{length} ours"]), GOAL))
    shortest, longest = samples[f"{LENGTHS[0]} ours"], samples[f"{LENGTHS[-1]} ours"]
    result.figures.append(ratio(f"{LENGTHS[-1]:,} against {LENGTHS[0]} tokens", longest, shortest, FLAT, "of"))
    for name in ("ours, all read by the sender", "ours, with template and tokenizer", "stock fork", "stock deepcopy"):
        for length in LENGTHS[1:]:
            if seconds := samples.get(f"{length} {name}"):
                result.figures.append(Figure(f"{length:,} tokens: {name}", "s", tuple(seconds)))


def _repeated(way: Callable[[], float], into: list[float], number: int) -> float:
    seconds = [way() for _ in range(REPEATS)]
    into += seconds
    return statistics.median(seconds)


def _once(way: Callable[[], float], number: int) -> float:
    return way()


def _timed(make: Callable[[], DynamicCache]) -> float:
    begin = time.perf_counter()
    cache = make()
    seconds = time.perf_counter() - begin
    assert cache.get_seq_length()
    return seconds
