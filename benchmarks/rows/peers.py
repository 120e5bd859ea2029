"""The same hand-over by two other libraries, `avp` and `latentmesh`, where they are installed (`--peers`)."""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.bench import QUESTIONS, Bench, assistant, user
from benchmarks.harness import Result, Side, interleave, ratio
from langgraph_latent.handle.message import Message

CONTEXTS = (1024, 2048)
LATENT_STEPS = 20
"""`avp`'s own default."""

Hand = Callable[[list[Message], Message], float]
"""Lets a sender read messages, then times a receiver's first token for one more message."""


def missing() -> list[str]:
    """The peers that are not installed here."""
    return [name for name in PEERS if importlib.util.find_spec(name) is None]


def run(bench: Bench) -> Result:
    """Ours, the installed peers and re-reading, in turn.

    Peers promise no equal tokens, so none are compared; they do not stream, so a call for one token is timed.
    """
    result = Result("sender done to receiver's first token, by library")
    hands: dict[str, Hand] = {"langgraph-latent": partial(_ours, bench), "re-read": partial(_again, bench)}
    hands |= {name: make(bench) for name, make in PEERS.items() if name not in missing()}
    sides: dict[str, Side] = {
        f"{length} {name}": partial(_side, bench, hand, length) for length in CONTEXTS for name, hand in hands.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # theirs, about renamed arguments and empty answers
        result.samples = interleave(bench.settings.slow_rounds, sides, bench.ticker)
    for length in CONTEXTS:
        again = result.samples[f"{length} re-read"]
        for name in hands:
            if name != "re-read":
                result.figures.append(ratio(f"{length:,} tokens: {name}", again, result.samples[f"{length} {name}"]))
    return result


def _side(bench: Bench, hand: Hand, length: int, number: int) -> float:
    context = bench.context(bench.settings.context(length), seed=8_000_000 + 100 * length + number)
    with bench.workspace.scope():
        return hand(context, user(QUESTIONS[2]))


def _ours(bench: Bench, context: list[Message], question: Message) -> float:
    return bench.first_token(bench.chat, [question], bench.chat.read(context)).seconds


def _again(bench: Bench, context: list[Message], question: Message) -> float:
    return bench.first_token(bench.text, [*context, question]).seconds


def _avp(bench: Bench) -> Hand:
    """`avp`'s connector over the same weights: the sender thinks latent steps, the receiver gets its context."""
    from avp.connectors.huggingface import HuggingFaceConnector

    connector = HuggingFaceConnector(model=bench.model.model, tokenizer=bench.model.tokenizer)

    def hand(context: list[Message], question: Message) -> float:
        thought = connector.think(context, steps=LATENT_STEPS)
        begin = time.perf_counter()
        connector.generate([question], context=thought, max_new_tokens=1, do_sample=False)
        return time.perf_counter() - begin

    return hand


def _latentmesh(bench: Bench) -> Hand:
    """`latentmesh`, over weights of its own; its use of `Cache.crop`, which fails on every hit, is repaired."""
    from latentmesh.core import LatentLLM
    from latentmesh.persistent_cache import GlobalPrefixCache, MemoryKVStore

    class Repaired(LatentLLM):
        def _prepare_past_kv(self, kv_data: Any) -> Any:
            cache = super()._prepare_past_kv(kv_data)
            remove = cache.crop
            cache.crop = lambda length: remove(min(0, length - cache.get_seq_length()))
            return cache

    llm = Repaired(bench.name, device=bench.model.device.type, dtype=bench.model.spec.dtype)

    def hand(context: list[Message], question: Message) -> float:
        llm.global_cache = GlobalPrefixCache(MemoryKVStore())
        note = llm.generate(context, max_new_tokens=1, temperature=0)
        conversation = [*context, assistant(note.text), question]
        begin = time.perf_counter()
        llm.generate(conversation, max_new_tokens=1, temperature=0)
        return time.perf_counter() - begin

    return hand


PEERS: dict[str, Callable[[Bench], Hand]] = {"avp": _avp, "latentmesh": _latentmesh}
VERSIONS = {"avp": "avp==0.6.2", "latentmesh": "latentmesh==0.5.3"}
"""The versions that this file was written for."""
