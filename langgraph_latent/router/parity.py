"""Whether latent steps may be trusted: what was measured of a model's answers with them and without. Plain values.

It knows how a measurement is kept and what it permits; `evaluation.measure.measure_parity` makes it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from langgraph_latent.disk_cache import DiskCache

FILE = "parity.json"


@dataclass(frozen=True)
class Parity:
    """How answers after latent steps compare with those after a plain prefill, on a calibration set.

    Attributes:
        num_tasks: in the set.
        steps: latent steps.
        gain: mean difference of the given answers' log-likelihood, nats a token; below 0 the steps lose.
        low, high: its 95 % bootstrap interval.
    """

    num_tasks: int
    steps: int
    gain: float
    low: float
    high: float

    @property
    def refusal(self) -> str:
        """Why latent steps are not to be used; "" where they lose nothing."""
        if self.gain >= 0:
            return ""
        return (
            f"latent steps lose against reading: {self.gain:+.3f} nats a token ({self.low:+.3f} to {self.high:+.3f}, "
            f"{self.num_tasks} tasks, {self.steps} steps)"
        )


def remember_parity(identity: str, parity: Parity) -> None:
    """Keep what was measured of a model, for all processes."""
    DiskCache(FILE).put(f"{identity} {parity.steps}", asdict(parity))


def parity_refusal(identity: str, steps: int) -> str:
    """Why `steps` latent steps of a model are not to be used; "" where a measurement says that they lose nothing."""
    try:
        known = Parity(**DiskCache(FILE).get(f"{identity} {steps}"))
    except TypeError:
        return (
            f"it was never measured that {steps} latent steps lose nothing with this model: run "
            f"evaluation.measure.measure_parity(), or `langgraph-latent measure MODEL TASKS.jsonl --think {steps}`"
        )
    return known.refusal
