"""How the next token is chosen, with transformers' own logits processors. It knows logits and token ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.logits_process import (
    LogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from langgraph_latent.checks import as_number, is_number, is_whole_number
from langgraph_latent.engine import cpu_thread
from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.tokens import TOKEN_BYTES

T = TypeVar("T")
NUMBERS = ("temperature", "top_p", "top_k", "seed", "max_tokens")
SPARE_TOKENS = 256
MIN_TEMPERATURE = 1e-4
"""Below, logits divided by it leave float32."""


@dataclass(frozen=True)
class Sampling:
    """One request's settings. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep every token.

    Raises `ConfigError` for values that mean nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    max_tokens: int = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in NUMBERS:
            object.__setattr__(self, name, as_number(getattr(self, name)))
        allowed = {
            "temperature": (
                is_number(self.temperature) and (self.temperature == 0 or self.temperature >= MIN_TEMPERATURE),
                f"a number, 0 (greedy), or {MIN_TEMPERATURE} and above",
            ),
            "top_p": (is_number(self.top_p) and 0 < self.top_p <= 1, "a number above 0 and at most 1"),
            "top_k": (is_whole_number(self.top_k, 0), "a whole number, 0 (off) or above"),
            "max_tokens": (is_whole_number(self.max_tokens, 1), "a whole number, 1 or above"),
            "seed": (
                self.seed is None or (is_whole_number(self.seed) and abs(self.seed) < 1 << 63),
                "a whole number or None",
            ),
            "stop": (all(isinstance(text, str) and text for text in self.stop), "text that is not empty"),
        }
        for name, (is_allowed, meaning) in allowed.items():
            if not is_allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is impossible; it must be {meaning}")
        for name in ("temperature", "top_p"):  # transformers takes no int
            object.__setattr__(self, name, float(getattr(self, name)))


class Sampler:
    """Chooses tokens for one request; owns its random generator, so requests do not disturb one another.

    Args:
        prompt: packed token ids that come before the first choice.
        defaults: the model's own generation defaults.
        constraint: processors of our own, applied after all others and before temperature.
        extra: the caller's transformers logits processors, applied after the defaults' penalties.

    `context` is every token so far, as transformers' processors and criteria take it: (1, seq), int64. `scores` are
    what the last one was chosen from: (1, vocab), float32.
    """

    def __init__(
        self,
        sampling: Sampling,
        defaults: GenerationConfig,
        device: torch.device,
        prompt: bytes,
        extra: Sequence[LogitsProcessor] = (),
        constraint: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._is_greedy = sampling.temperature == 0
        before, after = _penalties(defaults), [*constraint, *_warpers(sampling)]
        self._extra = LogitsProcessorList(extra)
        self._before = LogitsProcessorList(before if extra else [])
        self._after = LogitsProcessorList(after if extra else [*before, *after])
        self._length = len(prompt) // TOKEN_BYTES
        self._tokens = torch.empty((1, self._length + SPARE_TOKENS), dtype=torch.long, device=device)
        self._tokens[0, : self._length] = torch.frombuffer(bytearray(prompt), dtype=torch.int32)
        self._random = torch.Generator(device=device)
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    @property
    def context(self) -> Any:
        return self._tokens[:, : self._length]

    def pick(self, logits: torch.Tensor) -> int:
        """The next token, from logits of shape (vocab,) in any dtype; it joins the context.

        On a CPU, transformers' processors and draws run in the compute thread. The caller's processors run in the
        caller's thread: what they ask of a chat model, and how long they take, holds nobody else up.
        """
        self.scores: Any = logits.float().unsqueeze(0)
        if self._before:
            self._in_compute_thread(partial(self._process, self._before))
        self._process(self._extra)
        is_simple = self._is_greedy and not self._after
        token = self._choose() if is_simple else self._in_compute_thread(self._choose)
        if self._length == self._tokens.shape[1]:
            self._tokens = torch.cat([self._tokens, torch.empty_like(self._tokens)], dim=1)
        self._tokens[0, self._length] = token
        self._length += 1
        return token

    def _in_compute_thread(self, work: Callable[[], T]) -> T:
        return cpu_thread.run(work) if self.scores.device.type == "cpu" else work()

    def _process(self, processors: LogitsProcessorList) -> None:
        if processors:
            self.scores = processors(self.context, self.scores)

    def _choose(self) -> int:
        self._process(self._after)
        if self._is_greedy:
            # NumPy's, on a CPU: torch's would make a team of OpenMP threads wherever this runs, see cpu_thread.py
            return int(self.scores.numpy().argmax() if self.scores.device.type == "cpu" else self.scores.argmax())
        return int(torch.multinomial(self.scores.softmax(-1), 1, generator=self._random))


def _penalties(defaults: GenerationConfig) -> list[Any]:
    """The model's own generation defaults that also shape greedy decoding, as stock `generate` applies them."""
    processors: list[Any] = []
    if (defaults.repetition_penalty or 1.0) != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(penalty=defaults.repetition_penalty))
    if defaults.no_repeat_ngram_size:
        processors.append(NoRepeatNGramLogitsProcessor(defaults.no_repeat_ngram_size))
    return processors


def _warpers(sampling: Sampling) -> list[Any]:
    if sampling.temperature == 0:
        return []
    warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def end_tokens(defaults: GenerationConfig, eos_token: int | None) -> frozenset[int]:
    """Token ids that end an answer: a model's own list, or its one with the tokenizer's."""
    configured = defaults.eos_token_id
    ends = configured if isinstance(configured, list) else [configured, eos_token]
    return frozenset(token for token in ends if token is not None)
