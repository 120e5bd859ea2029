"""The first token of a turn that repeats a conversation as messages, without any handle, against no reuse."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import QUESTIONS, Bench, assistant, user
from benchmarks.harness import Result, Side, at_least, interleave, ratio
from langgraph_latent.handle.message import Message

HISTORY = 1024
ANSWERED = 8
"""Tokens of the turn before, and those that are compared once."""
GOAL = at_least(10)


def run(bench: Bench) -> Result:
    """Both sides ask after the same conversation, whose last answer was just given."""
    result = Result("first token of a turn that repeats its conversation as messages, against no reuse")
    chats = {"reuse": bench.chat, "no reuse": bench.text}
    tokens: dict[str, list[int]] = {name: [] for name in chats}

    def side(name: str, number: int) -> float:
        with bench.workspace.scope():
            first = bench.first_token(chats[name], _asked(bench, number))
        tokens[name] += first.token
        return first.seconds

    sides: dict[str, Side] = {name: partial(side, name) for name in chats}
    result.samples = interleave(bench.settings.rounds, sides, bench.ticker)
    result.figures = [ratio(f"{HISTORY:,} tokens", result.samples["no reuse"], result.samples["reuse"], GOAL)]
    result.check_equal("first tokens are equal", *tokens.values())
    with bench.workspace.scope():
        asked = _asked(bench, 0)
        answers = [bench.answer(chat, asked, ANSWERED).tokens for chat in chats.values()]
    result.check_equal(f"{ANSWERED} greedy tokens are equal", *answers)
    return result


def _asked(bench: Bench, number: int) -> list[Message]:
    """A conversation up to its next question; the turn before was just answered."""
    history = bench.conversation(bench.settings.context(HISTORY), seed=11_000_000 + number)
    conversation = [*history, user(QUESTIONS[0])]
    answer = bench.answer(bench.chat, conversation, ANSWERED)
    return [*conversation, assistant(answer.text), user(QUESTIONS[1])]
