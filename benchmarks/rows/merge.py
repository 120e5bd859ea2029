"""Four caches made one, with and without repair, against a full prefill of the same tokens."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.bench import Bench
from benchmarks.harness import Result, at_most, interleave, ratio
from langgraph_latent import KVHandle, Repair

CONTEXT, NUM_BLOCKS = 2048, 4
REPAIRS = {
    "no repair": None,
    "15 % repaired, boundary": Repair(0.15, "boundary"),
    "15 % repaired, deviation": Repair(0.15, "deviation"),
    "100 % repaired": Repair(1.0),
}
GOAL = {name: at_most(0.35) for name in REPAIRS if name.startswith("15 %")}


def run(bench: Bench) -> Result:
    """The blocks are read before; what is timed makes the merged cache from theirs."""
    result = Result("merge of four caches, against a full prefill of the same tokens")
    with bench.workspace.scope():
        length = bench.settings.context(CONTEXT) // NUM_BLOCKS
        blocks = [bench.chat.read(bench.conversation(length, seed=9_000_000 + n)) for n in range(NUM_BLOCKS)]
        merged = {name: bench.chat.compose(blocks, repair=repair) for name, repair in REPAIRS.items()}
        sides = {name: partial(_compose, bench, handle) for name, handle in merged.items()}
        ids = list(merged["no repair"].token_ids)
        result.samples = interleave(
            bench.settings.rounds, {"prefill": partial(_prefill, bench, ids), **sides}, bench.ticker
        )
    result.notes["tokens"] = len(ids)
    for name in REPAIRS:
        seconds, whole = result.samples[name], result.samples["prefill"]
        result.figures.append(ratio(f"{len(ids):,} tokens, {name}", seconds, whole, GOAL.get(name), unit="of"))
    return result


def _compose(bench: Bench, handle: KVHandle, number: int) -> float:
    bench.workspace.evict(handle)
    begin = time.perf_counter()
    bench.workspace.state_of(handle, bench.model)
    return time.perf_counter() - begin


def _prefill(bench: Bench, ids: list[int], number: int) -> float:
    begin = time.perf_counter()
    with bench.model.empty_state().append(len(ids)) as tail:
        bench.model.prefill(ids, tail)
    return time.perf_counter() - begin
