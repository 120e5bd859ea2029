"""One graph with `ChatLatent` against the same graph with `ChatHuggingFace`: tokens read, time, and equal texts."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import Bench
from benchmarks.harness import Figure, Result, Side, at_most, interleave, ratio
from benchmarks.swap_rows.graphs import Graph
from benchmarks.swap_rows.sides import HuggingFace, Latent, Run, num_prefilled, usage

HISTORY = 1024
WRITTEN = 48
TOKENS, TIME = at_most(0.3), at_most(0.7)
LATENT, STOCK = "ChatLatent", "ChatHuggingFace"


def run(graph: Graph, bench: Bench) -> Result:
    """Every round has a history of its own and starts with nothing read."""
    result = Result(f"{graph.title}, against {STOCK}")
    written = bench.settings.written(WRITTEN)
    stock, latent = HuggingFace(bench, written), Latent(bench, written)
    runs: dict[str, list[Run]] = {LATENT: [], STOCK: []}

    def side(name: str, number: int) -> float:
        history = bench.conversation(bench.settings.context(HISTORY), seed=8_000_000 + number)
        runs[name].append((latent if name == LATENT else stock).run(graph, history))
        return runs[name][-1].seconds

    sides: dict[str, Side] = {name: partial(side, name) for name in runs}
    result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    read = [float(sum(num_prefilled(call) for call in each.calls)) for each in runs[LATENT]]
    fed = [float(sum(stock.num_prompt_tokens(call) for call in each.calls)) for each in runs[STOCK]]
    result.samples |= {f"{LATENT}, tokens prefilled": read, f"{STOCK}, tokens prefilled": fed}
    tokens, seconds = (TOKENS, TIME) if graph.has_goals else (None, None)
    result.figures = [
        ratio("tokens prefilled", read, fed, tokens, "of"),
        ratio("total time", result.samples[LATENT], result.samples[STOCK], seconds, "of"),
        Figure(f"total time, {STOCK}", "s", tuple(result.samples[STOCK])),
    ]
    _compare(result, runs, stock)
    return result


def _compare(result: Result, runs: dict[str, list[Run]], stock: HuggingFace) -> None:
    """Whether both sides were asked and answered the same, and counted a prompt's tokens alike."""
    num_equal = num_calls = num_tokens = num_alike = 0
    for ours, theirs in zip(runs[LATENT], runs[STOCK], strict=True):
        answers = {call.transcript: call.reply.text for call in ours.calls}
        num_calls += len(theirs.calls)
        num_equal += sum(answers.get(call.transcript) == call.reply.text for call in theirs.calls)
        num_tokens += len(ours.calls)
        num_alike += sum(usage(call)["input_tokens"] == stock.num_prompt_tokens(call) for call in ours.calls)
    result.remarks["answers"] = "equal" if num_equal == num_calls else f"unequal: {num_equal} of {num_calls} are equal"
    result.notes |= {"calls": num_calls, "equal_answers": num_equal}
    result.checks["both sides write the same texts"] = num_equal == num_calls == num_tokens
    result.checks["both sides make the same tokens of a prompt"] = num_alike == num_tokens
