"""What one question gave in one row, and what all of a row's give together, with bootstrap intervals.

It knows no models. A unit is what is drawn by chance: a document, or a case of several; its questions belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from langgraph_latent.evaluation.metrics import Score, entropy, kl

NUM_DRAWS = 2000


class Sample(NamedTuple):
    """One question in one row; distributions are compared over the answer's tokens, means over them.

    Attributes:
        unit: what it belongs to.
        exact: 1 where every token of the answer is the likeliest one, else 0.
        log_prob: of the answer, per token.
        kl: KL(full text || this row).
        kl_without: KL(full text || no context), of the same question.
        entropy: H(this row) - H(full text).
    """

    unit: str
    kind: str
    question: str
    exact: float
    log_prob: float
    kl: float
    kl_without: float
    entropy: float


class Cost(NamedTuple):
    """What one hand-over took: seconds until the receiver can run, and bytes."""

    unit: str
    seconds: float
    num_bytes: float


class Interval(NamedTuple):
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass
class Tally:
    """All samples and costs of a row."""

    samples: list[Sample] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)


def answered(
    unit: str,
    kind: str,
    question: str,
    answer: Sequence[int],
    logs: torch.Tensor,
    full: torch.Tensor,
    none: torch.Tensor,
) -> Sample:
    """A question's sample from log-probabilities, (answer tokens, vocab): of this row, of full text, of no context."""
    score = Score.of(logs, answer)
    return Sample(
        unit,
        kind,
        question,
        exact=float(score.exact_match),
        log_prob=score.likelihood,
        kl=divergence(full, logs),
        kl_without=divergence(full, none),
        entropy=float((entropy(logs) - entropy(full)).mean()),
    )


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """KL(p || q) of log-probabilities, (tokens, vocab), per token; 0 where rounding makes it less."""
    return max(0.0, kl(p, q).mean().item())


COLUMNS = ("exact", "log_prob", "kl", "kept", "entropy", "seconds", "num_bytes")


def estimates(tally: Tally) -> dict[str, Interval]:
    """Every column of a row."""
    return {name: estimate(tally, name) for name in COLUMNS}


def estimate(tally: Tally, column: str) -> Interval:
    """A column: the mean over its questions or hand-overs; "kept" is 1 - (sum of `kl`) / (sum of `kl_without`)."""
    if column in Cost._fields:
        return ratio((cost.unit, getattr(cost, column), 1.0) for cost in tally.costs)
    if column == "kept":
        return ratio((each.unit, each.kl_without - each.kl, each.kl_without) for each in tally.samples)
    return ratio((each.unit, getattr(each, column), 1.0) for each in tally.samples)


def difference(one: Tally, other: Tally, value: Callable[[Sample], float]) -> Interval:
    """By how much one row's value is above the other's on the questions of both."""
    known = {(each.unit, each.question): value(each) for each in other.samples}
    pairs = [(each.unit, value(each) - known[each.unit, each.question]) for each in one.samples if _key(each) in known]
    return ratio((unit, change, 1.0) for unit, change in pairs)


def _key(sample: Sample) -> tuple[str, str]:
    return sample.unit, sample.question


def ratio(parts: Iterable[tuple[str, float, float]]) -> Interval:
    """A ratio of sums over (unit, over, under), with an interval from draws of whole units, with replacement."""
    sums: dict[str, list[float]] = {}
    for unit, over, under in parts:
        total = sums.setdefault(unit, [0.0, 0.0])
        total[0] += over
        total[1] += under
    table = torch.tensor(list(sums.values()), dtype=torch.float64)
    value = _divided(table.sum(0)[None])[0].item()
    draws = torch.randint(len(table), (NUM_DRAWS, len(table)), generator=torch.Generator().manual_seed(0))
    low, high = _divided(table[draws].sum(1)).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(value, low, high)


def _divided(sums: torch.Tensor) -> torch.Tensor:
    """Over by under, (draws,); 0 where there is nothing below."""
    return torch.where(sums[:, 1] == 0, torch.zeros_like(sums[:, 0]), sums[:, 0] / sums[:, 1])
