"""A chain of 4 agents in which all decode equally many tokens, in total time: only the re-reading is saved."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.bench import QUESTIONS, Answer, Bench, assistant, user
from benchmarks.harness import Result, Side, at_most, interleave, ratio
from langgraph_latent.handle.message import Message

CONTEXT = 1024
WRITTEN = 16


def run(bench: Bench) -> Result:
    """Both sides hand on the same words; a text edge reads them, and the context, again."""
    result = Result(f"chain of 4 agents that each decode {WRITTEN} tokens, total time against text")
    answers: dict[str, list[Answer]] = {}

    def side(name: str, number: int) -> float:
        begin = time.perf_counter()
        answers[name] = (_latent if name == "latent" else _text)(bench, number)
        return time.perf_counter() - begin

    sides: dict[str, Side] = {name: partial(side, name) for name in ("latent", "text")}
    result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    share = ratio(f"{CONTEXT:,} tokens", result.samples["latent"], result.samples["text"], at_most(0.42), "of")
    result.figures.append(share)
    _check(result, answers["latent"], answers["text"])
    return result


def _latent(bench: Bench, number: int) -> list[Answer]:
    news, handle, answers = _context(bench, number), None, []
    with bench.workspace.scope():
        for question in QUESTIONS:
            answer = bench.answer(bench.chat, [*news, user(question)], bench.settings.written(WRITTEN), handle)
            news, handle = [], answer.handle
            answers.append(answer)
    return answers


def _text(bench: Bench, number: int) -> list[Answer]:
    conversation, answers = _context(bench, number), []
    with bench.workspace.scope():
        for question in QUESTIONS:
            conversation = [*conversation, user(question)]
            answer = bench.answer(bench.text, conversation, bench.settings.written(WRITTEN))
            conversation = [*conversation, assistant(answer.text)]
            answers.append(answer)
    return answers


def _check(result: Result, latent: list[Answer], text: list[Answer]) -> None:
    """Equal answers are promised as long as the written words tokenise back into the sampled tokens."""
    alike = 0
    for ours, theirs in zip(latent, text, strict=True):
        if ours.prompt != theirs.prompt:
            break
        result.check_equal(f"agent {alike + 1} writes the same tokens", ours.tokens, theirs.tokens)
        alike += 1
    result.notes["agents_with_equal_prompts"] = alike


def _context(bench: Bench, number: int) -> list[Message]:
    return bench.context(bench.settings.context(CONTEXT), seed=4_000_000 + number)
