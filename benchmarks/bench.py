"""What rows run: the library's chat models, stock transformers on the same weights, texts and fake states."""

from __future__ import annotations

import copy
import random
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from benchmarks.harness import Settings, Stopwatch, Ticker
from langgraph_latent import ChatLatent, KVHandle, LatentWorkspace
from langgraph_latent.demo import REPORT
from langgraph_latent.engine import cpu_thread
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.buffer import KVBuffer, LayerStore, capacity_for
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.pool import Namespace

QUESTIONS = ("What went wrong?", "What is urgent?", "Which team should act?", "What should it do?")
"""What the agents of a chain are asked; each is a suffix of at most 16 tokens with SmolLM2's template."""

TURN_WORDS = 100


class NoEnd(LogitsProcessor):
    """Forbids the tokens that end an answer, so that every side decodes as many tokens as it is asked for."""

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = list(ends)

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        return scores.index_fill(1, torch.tensor(self._ends, device=scores.device), float("-inf"))  # type: ignore[return-value]


class Answer(NamedTuple):
    """What an agent wrote. `seconds` is the whole call, `marks` when each token came; both from the call's start."""

    seconds: float
    marks: list[float]
    tokens: list[int]
    prompt: list[int]
    text: str
    handle: KVHandle


class FirstToken(NamedTuple):
    seconds: float
    token: list[int]


@dataclass
class Bench:
    """One model, in all the ways that rows run it.

    Attributes:
        chat: reuses caches.
        text: the same model and workspace, but re-reads every prompt from its first token: a text edge.
        model: the resident model under both.
        stock: plain transformers over the same weights.
    """

    settings: Settings
    name: str
    workspace: LatentWorkspace
    chat: ChatLatent
    text: ChatLatent
    model: ResidentModel
    stock: Stock
    ticker: Ticker

    @classmethod
    def open(cls, name: str, settings: Settings, ticker: Ticker) -> Bench:
        """Load the model. `close` gives it back."""
        workspace = LatentWorkspace()
        chat = ChatLatent(model=name, workspace=workspace).load()
        text = ChatLatent(model=name, workspace=workspace, reuse=False).load()
        model = chat.resident()
        bench = cls(settings, name, workspace, chat, text, model, Stock(model), ticker)
        bench._warm_up()
        return bench

    def _warm_up(self) -> None:
        """Do once, on a few tokens, what is slower the first time."""
        context, question = self.context(128, seed=9), user(QUESTIONS[0])
        with self.workspace.scope():
            handle = self.chat.read(context)
            self.first_token(self.chat, [question], handle)
            self.answer(self.text, [*context, question], 4)
            self.stock.generate(self.stock.prompt([*context, question]), 4)
            self.chat.export_kv_cache(handle)

    def close(self) -> None:
        self.workspace.close()

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.model.spec.identity, self.workspace.tenant)

    def fits(self, num_tokens: int) -> bool:
        """Whether the model takes a sequence of that many tokens."""
        return not self.model.spec.max_positions or num_tokens <= self.model.spec.max_positions

    def context(self, num_tokens: int, seed: int) -> list[Message]:
        """Messages whose prompt has at most, and nearly, `num_tokens` tokens; no two seeds share a beginning."""
        return self._filled(_document, num_tokens, seed)

    def conversation(self, num_tokens: int, seed: int) -> list[Message]:
        """The same as turns of a user and an assistant, who has the last word."""
        return self._filled(_turns, num_tokens, seed)

    def _filled(self, render: Callable[[Sequence[str]], list[Message]], num_tokens: int, seed: int) -> list[Message]:
        words = _words(num_tokens, seed)
        low, high = 1, len(words)
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.prompt_tokens(render(words[:middle])) <= num_tokens
            low, high = (middle, high) if fits else (low, middle - 1)
        return render(words[:low])

    def prompt_tokens(self, messages: Sequence[Message], *, reply: bool = False) -> int:
        return len(self.model.prompts.write(messages, reply=reply).tokens) // TOKEN_BYTES

    def first_token(self, chat: ChatLatent, messages: Sequence[Message], inherit: KVHandle | None = None) -> FirstToken:
        """Ask and wait for the first chunk of the stream, which holds one token."""
        begin = time.perf_counter()
        chunks = chat.stream(list(messages), inherit=inherit, max_tokens=1)
        reply = next(chunks)
        seconds = time.perf_counter() - begin
        for chunk in chunks:
            reply += chunk
        return FirstToken(seconds, list(self.workspace.handle(reply).token_ids[-1:]))

    def answer(
        self, chat: ChatLatent, messages: Sequence[Message], num_tokens: int, inherit: KVHandle | None = None
    ) -> Answer:
        """Decode exactly `num_tokens` tokens."""
        watch = Stopwatch()
        ends = NoEnd(sorted(self.model.end_tokens))
        options: dict[str, Any] = {"inherit": inherit, "max_tokens": num_tokens}
        reply = chat.invoke(list(messages), streamer=watch, logits_processor=[ends], **options)
        seconds = watch.now()
        handle = self.workspace.handle(reply)
        ids = list(handle.token_ids)
        assert len(watch.marks) == num_tokens, "every side decodes as many tokens as it is asked for"
        return Answer(seconds, watch.marks, ids[-num_tokens:], ids[:-num_tokens], reply.text, handle)

    def fake_state(self, num_tokens: int) -> KVState:
        """A state of the model's real layer shapes, random numbers: as good as a real one to hand over."""
        capacity, spec = capacity_for(num_tokens), self.model.spec
        stores = []
        for layer in spec.layers:
            keys, values = (
                torch.rand(1, layer.kv_heads, capacity, dim, device=self.model.device).to(getattr(torch, spec.dtype))
                for dim in (layer.key_dim, layer.value_dim)
            )
            stores.append(LayerStore(keys, values))
        return KVState(KVBuffer(stores), self.model.kinds, num_tokens)


class Stock:
    """Plain transformers over the resident model's own weights: template, tokenizer, `generate`, `DynamicCache`.

    `model` has modules and a config of its own, with the attention that the model was loaded with and not ours. It
    generates in the thread in which our models run: with OpenMP threads under two threads of one process, both sides
    would be slower.
    """

    def __init__(self, model: ResidentModel) -> None:
        shared = {id(tensor): tensor for tensor in (*model.model.parameters(), *model.model.buffers())}
        self.model = cast(Any, copy.deepcopy(model.model, shared))
        self.model.set_attn_implementation(model.spec.attention)
        generate = self.model.generate
        self.model.generate = lambda *call, **options: cpu_thread.run(lambda: generate(*call, **options))
        self._tokenizer: Any = model.tokenizer
        self._ends = sorted(model.end_tokens)
        self._cache_argument = model.cache_argument

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def generate(self, ids: Sequence[int], num_tokens: int, cache: DynamicCache | None = None) -> list[int]:
        """Greedy `generate` of exactly `num_tokens` tokens; `cache` holds a prefix of `ids`, where one is given."""
        inputs = torch.tensor([ids], device=self.model.device)
        known = {} if cache is None else {self._cache_argument: cache}
        out = self.model.generate(
            inputs,
            attention_mask=torch.ones_like(inputs),
            max_new_tokens=num_tokens,
            do_sample=False,
            logits_processor=LogitsProcessorList([NoEnd(self._ends)]) if num_tokens > 1 else None,
            **known,
        )
        return list(out[0, len(ids) :].tolist())

    def first_token(self, messages: Sequence[Message]) -> FirstToken:
        begin = time.perf_counter()
        token = self.generate(self.prompt(messages), 1)
        return FirstToken(time.perf_counter() - begin, token)

    def cache(self, state: KVState) -> DynamicCache:
        """A `DynamicCache` with copies of a state's keys and values."""
        cache = DynamicCache(config=self.model.config)
        for index, (keys, values) in enumerate(state.layers()):
            cache.update(keys, values, index)
            layer: Any = cache.layers[index]
            if hasattr(layer, "cumulative_length"):  # a sliding window, of which only the end is given
                layer.cumulative_length = state.num_tokens
        return cache

    def fork(self, cache: DynamicCache) -> DynamicCache:
        """A cache that shares the other's tensors; its layers replace them as they grow; the other stays as it is."""
        shallow = copy.copy(cache)
        shallow.layers = [copy.copy(layer) for layer in cache.layers]
        return shallow


def _words(num_words: int, seed: int) -> list[str]:
    """At least `num_words` words of the demo's report, its sentences in an order of the seed's own."""
    sentences = re.split(r"(?<=[.:])\s+", REPORT)
    shuffled = random.Random(seed)
    words: list[str] = []
    while len(words) < num_words:
        shuffled.shuffle(sentences)
        words += " ".join(sentences).split()
    return [f"Report-{seed}:", *words]


def _document(words: Sequence[str]) -> list[Message]:
    return [{"role": "system", "content": f"{words[0]} {' '.join(words[1:])}"}]


def _turns(words: Sequence[str]) -> list[Message]:
    parts = [" ".join(words[at : at + TURN_WORDS]) for at in range(0, len(words), TURN_WORDS)]
    return [turn for part in parts for turn in (user("Tell me more."), assistant(part))]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}
