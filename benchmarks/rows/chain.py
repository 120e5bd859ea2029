"""Chains of 2, 3 and 4 agents in which only the last one's words are wanted, in total time."""

from __future__ import annotations

import time
from functools import partial

from benchmarks.bench import QUESTIONS, Bench, assistant, user
from benchmarks.harness import Result, Side, at_most, interleave, ratio
from langgraph_latent.handle.message import Message

GOALS = {2: at_most(0.40), 3: at_most(0.30), 4: at_most(0.25)}
CONTEXT = 1024
WRITTEN = 128
"""Tokens that an agent writes for the next one, on text edges."""
ANSWERED = 64
"""Tokens of the last agent's answer, on both sides."""


def run(bench: Bench) -> Result:
    """Text: each agent writes, the next reads context and all that was written. Latent: all read, the last writes."""
    result = Result(f"chain of agents, total time against text ({WRITTEN} tokens per text edge, {ANSWERED} answered)")
    latent = Latent(bench)
    shorter: dict[int, list[float]] = {2: [], 3: []}
    sides: dict[str, Side] = {f"latent {agents}": partial(latent.run, agents) for agents in GOALS}
    sides["text 4"] = partial(_text, bench, shorter)
    bench.ticker.expect(1)
    result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    result.samples |= {f"text {agents}": seconds for agents, seconds in shorter.items()}
    for agents, goal in GOALS.items():
        over, under = result.samples[f"latent {agents}"], result.samples[f"text {agents}"]
        result.figures.append(ratio(f"{agents} agents", over, under, goal, "of"))
    full = bench.answer(bench.text, [*_context(bench, 0), *map(user, QUESTIONS)], len(latent.answered))
    result.check_equal("4 agents answer as one that reads the full text", latent.answered, full.tokens)
    bench.ticker.step()
    return result


class Latent:
    """Latent chains of any length; `answered` are the tokens that the longest one's last agent wrote in round 0."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.answered: list[int] = []

    def run(self, agents: int, number: int) -> float:
        chat, context = self._bench.chat, _context(self._bench, number)
        with self._bench.workspace.scope():
            begin = time.perf_counter()
            handle = chat.read([*context, user(QUESTIONS[0])])
            for question in QUESTIONS[1 : agents - 1]:
                handle = chat.read([user(question)], inherit=handle)
            num_tokens = self._bench.settings.written(ANSWERED)
            answer = self._bench.answer(chat, [user(QUESTIONS[agents - 1])], num_tokens, handle)
            seconds = time.perf_counter() - begin
        if number == 0 and agents == len(QUESTIONS):
            self.answered = answer.tokens
        return seconds


def _text(bench: Bench, shorter: dict[int, list[float]], number: int) -> float:
    """Seconds of the text chain of 4, timed token by token.

    A shorter chain is the same up to its last agent, whose time there is the time to its token number `ANSWERED`.
    """
    written, answered = bench.settings.written(WRITTEN), bench.settings.written(ANSWERED)
    conversation: list[Message] = _context(bench, number)
    spent = 0.0
    with bench.workspace.scope():
        for agent, question in enumerate(QUESTIONS, start=1):
            conversation = [*conversation, user(question)]
            answer = bench.answer(bench.text, conversation, answered if agent == len(QUESTIONS) else written)
            if agent in shorter:
                shorter[agent].append(spent + answer.marks[answered - 1])
            spent += answer.seconds
            conversation = [*conversation, assistant(answer.text)]
    return spent


def _context(bench: Bench, number: int) -> list[Message]:
    return bench.context(bench.settings.context(CONTEXT), seed=3_000_000 + number)
