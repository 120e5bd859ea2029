"""Decode speed over append-only buffers against stock `generate` over a `DynamicCache`, and the memory of both."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.bench import Bench, NoEnd
from benchmarks.harness import Figure, Mismatch, Result, Side, at_least, at_most, interleave, ratio
from benchmarks.memory import PeakMemory
from langgraph_latent.engine.sampling import Sampler, Sampling
from langgraph_latent.handle.tokens import pack_tokens, unpack_tokens
from langgraph_latent.kv.state import KVState

GOALS = {256: at_least(1.0), 1024: at_least(1.05, aim=1.1), 4096: at_least(1.1, aim=1.2)}
WRITTEN = 32
NO_COPY = at_most(0.25)
"""Memory that decoding takes over the cache's own bytes; a second copy of the cache would be 1."""


class PromptState:
    """One prompt's state, held for both sides as a sender holds what it handed over; a side decodes after it."""

    def __init__(self, bench: Bench, length: int) -> None:
        self._bench = bench
        self._num_tokens = bench.settings.written(WRITTEN)
        messages = bench.context(bench.settings.context(length), seed=5_000_000 + length)
        self._ids = unpack_tokens(bench.model.prompts.write(messages, reply=True).tokens)
        self._state = self._read()
        self._stock = bench.stock.cache(self._state)
        self.tokens: dict[str, list[int]] = {}
        self.extra: dict[str, list[float]] = {}
        self.moves = 0

    def _read(self) -> KVState:
        """Prefill all but the last token, which is the first that a side feeds."""
        with self._bench.model.empty_state().append(len(self._ids)) as tail:
            self._bench.model.prefill(self._ids[:-1], tail)
            return tail.seal()

    def run(self, name: str, number: int) -> float:
        """Decode; seconds a token."""
        decode = self._ours if name == "ours" else self._theirs
        with PeakMemory() as peak:
            begin = time.perf_counter()
            tokens = decode()
            seconds = time.perf_counter() - begin
        if self.tokens.setdefault(name, tokens) != tokens:
            raise Mismatch(f"decode: {name} gave other tokens in round {number}")
        if peak.extra_bytes is not None:
            self.extra.setdefault(name, []).append(peak.extra_bytes / self._state.nbytes)
        return seconds / self._num_tokens

    def _ours(self) -> list[int]:
        model, before = self._bench.model, storage(self._state)
        settings, prompt = Sampling(max_tokens=self._num_tokens), pack_tokens(self._ids)
        ends = NoEnd(sorted(model.end_tokens))
        sampler = Sampler(settings, model.model.generation_config, model.device, prompt, [ends])
        with self._state.append(len(self._ids)) as tail:
            logits = model.prefill(self._ids[-1:], tail)
            tokens = list(model.decode(logits, tail, sampler, self._num_tokens))
            self.moves += storage(tail.seal()) != before
        return tokens

    def _theirs(self) -> list[int]:
        stock = self._bench.stock
        return stock.generate(self._ids, self._num_tokens, stock.fork(self._stock))


def run(bench: Bench) -> Result:
    """The same state, the same greedy tokens, `WRITTEN` of them."""
    result = Result("decode speed against stock generate, and its memory")
    lengths = [length for length in GOALS if bench.fits(bench.settings.context(length) + WRITTEN + 1)]
    bench.ticker.expect(len(lengths))
    cases = {}
    for length in lengths:
        cases[length] = PromptState(bench, length)
        bench.ticker.step()
    sides: dict[str, Side] = {
        f"{length} {name}": partial(case.run, name) for length, case in cases.items() for name in ("ours", "stock")
    }
    result.samples = interleave(bench.settings.rounds, sides, bench.ticker)
    for length, case in cases.items():
        ours, stock = (result.samples[f"{length} {name}"] for name in ("ours", "stock"))
        result.figures.append(ratio(f"{length:,} tokens of context", stock, ours, GOALS[length]))
        result.check_equal(f"{len(case.tokens['ours'])} greedy tokens are equal at {length}", *case.tokens.values())
    longest = lengths[-1]
    for name, goal in (("ours", NO_COPY), ("stock", None)):
        if extra := cases[longest].extra.get(name):
            figure = f"{longest:,} tokens: memory {name} takes, in caches"
            result.figures.append(Figure(figure, "of", tuple(extra), goal))
    result.checks["decoding writes in place, without a second storage"] = not any(c.moves for c in cases.values())
    return result


def storage(state: KVState) -> list[int]:
    """Where the storage under a state lies in memory."""
    stores = [(store.keys, store.values) for store in state.buffer.layers]
    return [tensor.data_ptr() for pair in stores for tensor in pair if tensor is not None]
