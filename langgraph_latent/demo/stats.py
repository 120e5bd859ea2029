"""What the demo measures, as plain values, and who is notified while it runs. No torch, no graphs, no terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class AgentStats:
    """What one agent did in one run. Read: went through the model; reused: came with the cache; times in seconds."""

    name: str
    tokens_read: int
    tokens_reused: int
    tokens_written: int
    prefill_s: float
    decode_s: float


@dataclass(frozen=True)
class EdgeStats:
    """`handover_s`: from the sender being done until the receiver has read all it needs for its first token."""

    source: str
    target: str
    route: str
    handover_s: float


@dataclass(frozen=True)
class RunStats:
    """One graph, once. `token_ids`: all that its last agent saw and wrote."""

    name: str
    agents: tuple[AgentStats, ...]
    edges: tuple[EdgeStats, ...]
    answers: dict[str, str]
    token_ids: tuple[int, ...]
    total_s: float

    @property
    def tokens_read(self) -> int:
        return sum(agent.tokens_read for agent in self.agents)

    @property
    def tokens_reused(self) -> int:
        return sum(agent.tokens_reused for agent in self.agents)

    @property
    def tokens_written(self) -> int:
        return sum(agent.tokens_written for agent in self.agents)


@dataclass(frozen=True)
class DemoStats:
    """Both runs, and the model they share."""

    model: str
    device: str
    dtype: str
    load_s: float
    text: RunStats
    latent: RunStats

    @property
    def runs(self) -> tuple[RunStats, RunStats]:
        return self.text, self.latent

    @property
    def same_tokens(self) -> bool:
        """Whether both runs saw and wrote the same tokens, from the first to the last."""
        return self.text.token_ids == self.latent.token_ids

    @property
    def same_answers(self) -> bool:
        return self.text.answers == self.latent.answers

    def to_dict(self) -> dict[str, Any]:
        """Plain data, JSON-ready; ratios are text over latent, so above 1 where latent edges are cheaper."""
        edges = zip(self.text.edges, self.latent.edges, strict=True)
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "load_s": self.load_s,
            "runs": [_plain(run) for run in self.runs],
            "ratios": {
                "handover": {f"{a.source} -> {a.target}": a.handover_s / b.handover_s for a, b in edges},
                "tokens_read": self.text.tokens_read / self.latent.tokens_read,
                "total": self.text.total_s / self.latent.total_s,
            },
            "same_tokens": self.same_tokens,
            "same_answers": self.same_answers,
        }


class Watcher:
    """Is notified of how the demo gets on; this one ignores it."""

    def stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def agent_started(self, run: str, agent: str) -> None:
        """An agent is at work."""

    def agent_wrote(self, run: str, agent: str, piece: str) -> None:
        """A few more characters of an agent's answer."""

    def agent_finished(self, run: str, stats: AgentStats) -> None:
        """An agent is done."""


def _plain(run: RunStats) -> dict[str, Any]:
    data = asdict(run)
    totals = {name: getattr(run, name) for name in ("tokens_read", "tokens_reused", "tokens_written")}
    return {"name": data.pop("name"), **totals, "num_tokens": len(data.pop("token_ids")), **data}
