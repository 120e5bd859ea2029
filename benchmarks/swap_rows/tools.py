"""A loop over a tool: what `ChatHuggingFace` makes of it, and what `ChatLatent` saves of its own reading."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from benchmarks.bench import Bench
from benchmarks.harness import Result, Side, interleave, ratio
from benchmarks.swap_rows.graphs import Graph, tool_loop
from benchmarks.swap_rows.sides import HuggingFace, Latent, Run, num_prefilled

HISTORY = 1024
WRITTEN = 96
"""Tokens of an answer; enough for a call of the tool where a token is a byte, so in a quick run too."""
ROUNDS = 3


@tool
def look_up(topic: Literal["logs", "network", "people"]) -> str:
    """Look up what is known about a topic."""
    return f"Nothing new is known about the {topic}."


GRAPH = Graph("", lambda model: tool_loop(model, [look_up], ROUNDS), ("Look it up, then say what went wrong.",))


def run(bench: Bench) -> Result:
    """An agent that must call a tool three times and then answers; `ChatLatent` with and without reuse."""
    result = Result(f"agent and tool, {ROUNDS} calls, against ChatLatent without reuse")
    latents = {"reuse": Latent(bench, WRITTEN), "no reuse": Latent(bench, WRITTEN, reuse=False)}
    runs: dict[str, list[Run]] = {name: [] for name in latents}

    def side(name: str, number: int) -> float:
        history = bench.conversation(bench.settings.context(HISTORY), seed=9_000_000 + number)
        runs[name].append(latents[name].run(GRAPH, history))
        return runs[name][-1].seconds

    sides: dict[str, Side] = {name: partial(side, name) for name in latents}
    result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    read = {name: [float(sum(map(num_prefilled, each.calls))) for each in runs[name]] for name in runs}
    result.samples |= {f"{name}, tokens prefilled": values for name, values in read.items()}
    result.figures = [
        ratio("tokens prefilled", read["reuse"], read["no reuse"], unit="of"),
        ratio("total time", result.samples["reuse"], result.samples["no reuse"], unit="of"),
    ]
    with_reuse, without = (list(map(_texts, each)) for each in runs.values())
    result.checks["both sides call and write the same"] = with_reuse == without
    result.checks["every call that was asked for was made"] = min(map(_num_tool_calls, runs["reuse"])) >= ROUNDS
    result.remarks["ChatHuggingFace"] = _what_stock_does(bench)
    return result


def _texts(run: Run) -> list[object]:
    return [(call.reply.text, [(each["name"], each["args"]) for each in call.reply.tool_calls]) for call in run.calls]


def _num_tool_calls(run: Run) -> int:
    return sum(bool(call.reply.tool_calls) for call in run.calls)


def _what_stock_does(bench: Bench) -> str:
    """Run the same graph with it, then hand it a tool's result as a message."""
    if importlib.util.find_spec("langchain_huggingface") is None:
        return "not installed"
    stock = HuggingFace(bench, WRITTEN)
    calls = stock.run(GRAPH, bench.conversation(bench.settings.context(HISTORY), seed=9_000_000)).calls
    if any(call.reply.tool_calls for call in calls):
        return "calls the tool"
    prompts = [stock.chat._to_chat_prompt(call.prompt) for call in calls]
    shown = "the prompt shows no tool" if not any(look_up.name in text for text in prompts) else "the tool is shown"
    answer = look_up.invoke({"name": look_up.name, "args": {"topic": "logs"}, "id": "1", "type": "tool_call"})
    try:
        stock.chat.invoke([HumanMessage("Look it up."), answer, HumanMessage("Go on.")])
    except ValueError as error:
        refused = f"a tool's result is refused ({str(error).splitlines()[0][:80]})"
    else:
        refused = "a tool's result is read"
    return f"can't: bind_tools() has no effect over a pipeline: {shown}, no reply has tool_calls, and {refused}"
