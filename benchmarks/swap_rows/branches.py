"""Branches that ask different questions about one context, at the same time against one after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, TypedDict

from langchain_core.messages import BaseMessage, HumanMessage, convert_to_messages
from langgraph.graph import START, StateGraph

from benchmarks.bench import Bench, NoEnd
from benchmarks.harness import Goal, Mismatch, Result, Side, at_most, interleave, ratio
from langgraph_latent import ChatLatent, LatentWorkspace

CONTEXTS = (1024, 256)
WRITTEN = 48
GOALS: dict[tuple[int, int], Goal] = {(1024, 4): at_most(0.45), (1024, 8): at_most(0.35)}
"""Of contexts and branches."""
QUESTIONS = (
    "What went wrong?",
    "What is urgent?",
    "Which team should act?",
    "What should it do?",
    "Who was told, and when?",
    "What did it cost?",
    "How was it found?",
    "What must change?",
)
Texts = dict[str, str]


class State(TypedDict):
    texts: Annotated[Texts, lambda old, new: {**old, **new}]


Runner = Callable[[Any, list[BaseMessage], int, int], Texts]
"""Answers the first so many questions after a context, so many at a time."""


def fan_out(model: Any, context: list[BaseMessage], num_branches: int, at_a_time: int) -> Texts:
    """A graph with a node per question."""
    builder = StateGraph(State)
    for index, question in enumerate(QUESTIONS[:num_branches]):
        node = partial(_branch, model, context, question)
        builder.add_node(f"branch {index}", node)
        builder.add_edge(START, f"branch {index}")
    texts: Texts = builder.compile().invoke({"texts": {}}, {"max_concurrency": at_a_time})["texts"]
    return texts


def _branch(model: Any, context: list[BaseMessage], question: str, state: State) -> State:
    return {"texts": {question: model.invoke([*context, HumanMessage(question)]).text}}


def batch(model: Any, context: list[BaseMessage], num_branches: int, at_a_time: int) -> Texts:
    """The chat model's own `batch`."""
    questions = QUESTIONS[:num_branches]
    replies = model.batch([[*context, HumanMessage(each)] for each in questions], {"max_concurrency": at_a_time})
    return {question: reply.text for question, reply in zip(questions, replies, strict=True)}


RUNNERS: dict[str, Runner] = {"fan-out": fan_out, "batch": batch}


def run(bench: Bench) -> Result:
    """Every run begins in a workspace of its own in which the context was read, and nothing else."""
    result = Result(f"branches on one context, {WRITTEN} tokens each, at the same time against one after another")
    texts: dict[tuple[int, int], Texts] = {}

    def side(runner: Runner, context: int, num_branches: int, at_a_time: int, number: int) -> float:
        seconds, found = _run(bench, runner, context, num_branches, at_a_time)
        if texts.setdefault((context, num_branches), found) != found:
            raise Mismatch(f"branches: {num_branches} on {context} tokens, {at_a_time} at a time, give other texts")
        return seconds

    sides: dict[str, Side] = {}
    cases = [(context, num_branches) for context in CONTEXTS for num_branches in (4, 8)]
    for context, num_branches in cases:
        for name, runner in RUNNERS.items():
            for order, at_a_time in (("together", num_branches), ("in turn", 1)):
                key = f"{context} {num_branches} {name} {order}"
                sides[key] = partial(side, runner, context, num_branches, at_a_time)
    result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    for context, num_branches in cases:
        for name in RUNNERS:
            together, in_turn = (
                result.samples[f"{context} {num_branches} {name} {order}"] for order in ("together", "in turn")
            )
            title = f"{context:,} tokens, {num_branches} branches, {name}"
            result.figures.append(ratio(title, together, in_turn, GOALS.get((context, num_branches)), "of"))
    result.checks["all ways give the same texts"] = True
    return result


def _run(bench: Bench, runner: Runner, context: int, num_branches: int, at_a_time: int) -> tuple[float, Texts]:
    """Seconds and texts of the branches; all decode equally many tokens."""
    read = bench.context(bench.settings.context(context), seed=10_000_000 + context)
    with LatentWorkspace() as workspace:
        chat = ChatLatent(model=bench.name, workspace=workspace, max_tokens=bench.settings.written(WRITTEN))
        chat.read(read)
        model = _Endless(chat, NoEnd(sorted(bench.model.end_tokens)))
        begin = time.perf_counter()
        texts = runner(model, convert_to_messages(read), num_branches, at_a_time)
        seconds = time.perf_counter() - begin
        workspace.check_integrity()
    return seconds, texts


class _Endless:
    """A chat model whose answers do not end by themselves."""

    def __init__(self, chat: ChatLatent, ends: NoEnd) -> None:
        self.invoke = partial(chat.invoke, logits_processor=[ends])
        self.batch = partial(chat.batch, logits_processor=[ends])
