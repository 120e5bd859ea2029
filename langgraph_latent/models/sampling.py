"""How the next token is chosen, with transformers' own logits processors. It knows logits and token ids only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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

from langgraph_latent.errors import ConfigError


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
        allowed = {
            "temperature": (self.temperature >= 0, "0 (greedy) or above"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "0 (off) or above"),
            "max_tokens": (self.max_tokens >= 1, "1 or above"),
            "stop": (all(self.stop), "text that is not empty"),
        }
        for name, (is_allowed, meaning) in allowed.items():
            if not is_allowed:
                raise ConfigError(f"{name}={getattr(self, name)!r} is impossible; it must be {meaning}")


class Sampler:
    """Chooses tokens for one request; owns its random generator, so requests do not disturb one another."""

    def __init__(
        self,
        sampling: Sampling,
        defaults: GenerationConfig,
        device: torch.device,
        extra: Sequence[LogitsProcessor] = (),
    ) -> None:
        self._greedy = sampling.temperature == 0
        self._processors = LogitsProcessorList([*_penalties(defaults), *extra, *_warpers(sampling)])
        self._random = torch.Generator(device=device)
        if sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(sampling.seed)

    def pick(self, ids: Sequence[int], logits: torch.Tensor) -> int:
        """The next token after `ids`, from logits of shape (vocab,) in any dtype."""
        scores = logits.float().unsqueeze(0)
        if self._processors:
            context: Any = torch.tensor([ids], device=scores.device)
            scores = self._processors(context, scores)
        if self._greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._random))


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
