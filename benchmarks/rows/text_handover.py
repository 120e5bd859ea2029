"""From "the sender has read" to the receiver's first token, against a sender that writes down what it knows."""

from __future__ import annotations

from benchmarks.bench import QUESTIONS, Bench, assistant, user
from benchmarks.harness import Result, at_least, interleave, ratio

CONTEXT = 1024
WRITTEN = 256


def run(bench: Bench) -> Result:
    """Text: the sender decodes `WRITTEN` tokens over its cache, the receiver reads all of it again. Latent: neither."""
    result = Result(f"the same, against a text hand-over of {WRITTEN} tokens")
    question = user(QUESTIONS[2])

    def latent(number: int) -> float:
        with bench.workspace.scope():
            handle = bench.chat.read(_context(bench, number))
            return bench.first_token(bench.chat, [question], handle).seconds

    def text(number: int) -> float:
        context, order = _context(bench, number), user("Write down all that matters.")
        with bench.workspace.scope():
            handle = bench.chat.read(context)
            note = bench.answer(bench.chat, [order], bench.settings.written(WRITTEN), handle)
            conversation = [*context, order, assistant(note.text), question]
            return note.seconds + bench.first_token(bench.text, conversation).seconds

    result.samples = interleave(bench.settings.slow_rounds, {"latent": latent, "text": text}, bench.ticker)
    times = ratio(f"{CONTEXT:,} tokens", result.samples["text"], result.samples["latent"], at_least(60))
    result.figures.append(times)
    result.notes["tokens_written"] = bench.settings.written(WRITTEN)
    return result


def _context(bench: Bench, number: int) -> list[dict[str, str]]:
    return bench.context(bench.settings.context(CONTEXT), seed=2_000_000 + number)
