"""From "the sender is done" to the receiver's first token, against reading the context again."""

from __future__ import annotations

from functools import partial

from benchmarks.bench import QUESTIONS, Bench, FirstToken, user
from benchmarks.harness import Result, Side, at_least, interleave, ratio

GOALS = {1024: at_least(12, aim=15), 2048: at_least(20, aim=25)}
CHECKED = 8
"""Tokens that all sides must agree on, once per context length."""


def run(bench: Bench) -> Result:
    """Every round has a context of its own, so nothing of it is anywhere before the sender reads it."""
    result = Result("sender done to receiver's first token, against re-reading")
    tokens: dict[str, list[list[int]]] = {}

    def side(length: int, name: str, number: int) -> float:
        first = _ask(bench, length, name, number)
        tokens.setdefault(f"{length} {name}", []).append(first.token)
        return first.seconds

    sides: dict[str, Side] = {}
    for length in GOALS:
        for name in ("latent", "re-read", "stock"):
            sides[f"{length} {name}"] = partial(side, length, name)
    bench.ticker.expect(len(GOALS))
    result.notes["suffix_tokens"] = _suffix_tokens(bench)
    result.samples = interleave(bench.settings.rounds, sides, bench.ticker)
    for length, goal in GOALS.items():
        names = [f"{length} {name}" for name in ("latent", "re-read", "stock")]
        firsts = [[token for each in tokens[name] for token in each] for name in names]
        result.check_equal(f"first tokens are equal at {length}", *firsts)
        _check_more(bench, result, length)
        latent, again, stock = (result.samples[name] for name in names)
        result.figures.append(ratio(f"{length:,} tokens, against re-reading", again, latent, goal))
        result.figures.append(ratio(f"{length:,} tokens, against stock generate", stock, latent, goal))
    return result


def _ask(bench: Bench, length: int, name: str, number: int) -> FirstToken:
    context = bench.context(bench.settings.context(length), seed=1000 * length + number)
    question = user(QUESTIONS[2])
    with bench.workspace.scope():
        if name == "latent":
            return bench.first_token(bench.chat, [question], bench.chat.read(context))
        if name == "re-read":
            return bench.first_token(bench.text, [*context, question])
        return bench.stock.first_token([*context, question])


def _check_more(bench: Bench, result: Result, length: int) -> None:
    """Compare a longer answer than the timed one, of all three sides."""
    context = bench.context(bench.settings.context(length), seed=1000 * length)
    question = user(QUESTIONS[2])
    with bench.workspace.scope():
        latent = bench.answer(bench.chat, [question], CHECKED, bench.chat.read(context))
        stock = bench.stock.generate(bench.stock.prompt([*context, question]), CHECKED)
    result.check_equal(f"{CHECKED} greedy tokens are equal at {length}", latent.tokens, stock)
    bench.ticker.step()


def _suffix_tokens(bench: Bench) -> int:
    context = bench.context(bench.settings.context(256), seed=0)
    return bench.prompt_tokens([*context, user(QUESTIONS[2])], reply=True) - bench.prompt_tokens(context)
