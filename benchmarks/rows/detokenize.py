"""The share of a long decode that goes into making text of its tokens, measured within the decode."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from benchmarks.bench import QUESTIONS, Bench, user
from benchmarks.harness import Figure, Result, at_most, interleave
from langgraph_latent.prompt.detokenizer import Detokenizer

WRITTEN = 2000
GOAL = at_most(0.02)


def run(bench: Bench) -> Result:
    """One agent answers with `WRITTEN` tokens. Its text must be what a decode of all of them at once gives."""
    result = Result("detokenising within a long decode")
    num_tokens = bench.settings.written(WRITTEN)
    shares: list[float] = []
    is_text_equal = True

    def seconds_of_a_token(number: int) -> float:
        nonlocal is_text_equal
        with pushes_timed() as pushes, bench.workspace.scope():
            answer = bench.answer(bench.chat, [user(f"{QUESTIONS[0]} {number}")], num_tokens)
        shares.append(sum(pushes) / (answer.marks[-1] - answer.marks[0]))
        text = bench.model.tokenizer.decode(answer.tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        is_text_equal &= answer.text == text
        return sum(pushes) / num_tokens

    result.samples = interleave(bench.settings.slow_rounds, {"a token": seconds_of_a_token}, bench.ticker)
    result.figures = [
        Figure(f"{num_tokens:,} tokens: share of the decode", "of", tuple(shares), GOAL),
        Figure(f"{num_tokens:,} tokens: a token", "s", tuple(result.samples["a token"])),
    ]
    result.checks["the pieces are the text of all tokens"] = is_text_equal
    return result


@contextmanager
def pushes_timed() -> Iterator[list[float]]:
    """The seconds that each `Detokenizer.push` within the block took."""
    seconds: list[float] = []
    push = Detokenizer.push

    def timed(self: Detokenizer, token: int) -> str:
        begin = time.perf_counter()
        piece = push(self, token)
        seconds.append(time.perf_counter() - begin)
        return piece

    with mock.patch.object(Detokenizer, "push", timed):
        yield seconds
