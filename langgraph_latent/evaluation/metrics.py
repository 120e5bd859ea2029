"""What is measured of predictions and answers: distances, likelihoods, matches, and means with their intervals.

It knows tensors of log-probabilities and plain texts; no models and no handles.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import NamedTuple

import torch

from langgraph_latent.errors import ConfigError

ROUNDS = 2000
"""Samples of a bootstrap."""
INTERVAL = (0.025, 0.975)


class Estimate(NamedTuple):
    """A mean over `num` tasks, and its 95 % bootstrap interval."""

    num: int
    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean and its percentile interval (Efron 1979), the same in every run. Raises `ConfigError` for no values.

    Of one value it is that value: how it varies is not known then.
    """
    if not values:
        raise ConfigError("there is no mean of no values; measure at least one task")
    sample = torch.tensor(values, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    picks = (torch.randint(len(values), (len(values),), generator=random) for _ in range(ROUNDS))
    means = torch.stack([sample[pick].mean() for pick in picks])
    low, high = means.quantile(torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return Estimate(len(values), float(sample.mean()), low, high)


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Shannon entropy of each row in nats, (rows,), of log-probabilities (rows, vocab)."""
    return kl(log_probs, torch.zeros_like(log_probs)).neg()


def kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) of each row in nats, (rows,), of log-probabilities (rows, vocab)."""
    probs = reference.exp()
    return torch.where(probs > 0, probs * (reference - other), 0.0).sum(dim=-1)


class Fidelity(NamedTuple):
    """How far predictions after a hand-over are from those after the full text.

    Attributes:
        num_positions: over which `kl` and `agreement` are means: those of a given answer, else its first.
        kl: KL(text || latent) in nats.
        agreement: part of the positions where both have the same likeliest token.
        semantic_entropy: H(latent) - H(text) of the answer's first token in nats; above 0 the hand-over left doubt.
            (Not Farquhar's, Nature 2024, which is of meanings of sampled answers.)
        first_kl: KL(text || latent) of that token in nats, which also sees a prediction that is sure of something else.
    """

    num_positions: int
    kl: float
    agreement: float
    semantic_entropy: float
    first_kl: float

    @classmethod
    def of(cls, text: torch.Tensor, latent: torch.Tensor) -> Fidelity:
        """Of log-probabilities at the same positions, (positions, vocab)."""
        far, doubt = kl(text, latent), entropy(latent[:1]) - entropy(text[:1])
        same = text.argmax(dim=-1) == latent.argmax(dim=-1)
        return cls(len(text), float(far.mean()), float(same.double().mean()), float(doubt), float(far[0]))


class Score(NamedTuple):
    """How likely a given answer is, by teacher forcing.

    Attributes:
        num_tokens: of the answer.
        likelihood: mean log-probability of a token in nats.
        total: the sum of them.
        exact_match: each token is the likeliest one: decoding by argmax begins with this answer.
    """

    num_tokens: int
    likelihood: float
    total: float
    exact_match: bool

    @classmethod
    def of(cls, log_probs: torch.Tensor, ids: Sequence[int]) -> Score:
        """Of the answer's token ids and the log-probabilities at their positions, (ids, vocab)."""
        wanted = torch.tensor(ids)
        each = log_probs.gather(-1, wanted[:, None])
        is_likeliest = bool((log_probs.argmax(dim=-1) == wanted).all())
        return cls(len(ids), float(each.mean()), float(each.sum()), is_likeliest)


class Measured(NamedTuple):
    """What a hand-over does to a prediction; `score` is None where no answer was given."""

    fidelity: Fidelity
    score: Score | None

    @classmethod
    def of(cls, text: torch.Tensor, latent: torch.Tensor, answer: Sequence[int]) -> Measured:
        """Of log-probabilities at the positions of an answer's token ids, or at the first one where there are none."""
        return cls(Fidelity.of(text, latent), Score.of(latent, answer) if answer else None)


class TextMatch(NamedTuple):
    """How a decoded answer compares with a given one, as text.

    Attributes:
        exact_match: they are equal but for case, punctuation, articles and spaces, as in SQuAD (arXiv 1606.05250).
        rouge_l: F1 of their longest common subsequence of words, 0 to 1 (Lin 2004, with beta = 1).
    """

    exact_match: bool
    rouge_l: float

    @classmethod
    def of(cls, decoded: str, answer: str) -> TextMatch:
        return cls(_normalised(decoded) == _normalised(answer), rouge_l(decoded, answer))


def rouge_l(decoded: str, answer: str) -> float:
    """ROUGE-L of two texts, words in lower case; texts without words are equal or not."""
    a, b = (re.findall(r"\w+", text.lower()) for text in (decoded, answer))
    if not a or not b:
        return float(a == b)
    return 2 * _num_common(a, b) / (len(a) + len(b))


def _num_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0  # row[i] of the word before
        for index, other in enumerate(b, 1):
            before, row[index] = row[index], before + 1 if word == other else max(row[index], row[index - 1])
    return row[-1]


def _normalised(text: str) -> str:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())
