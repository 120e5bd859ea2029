"""Runs the demo's two graphs, one after the other, and reads what they cost off the tracer's events.

It knows graphs and events; not the terminal: a `Watcher` is told what happens while it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from langchain_core.messages import AIMessageChunk
from langgraph.graph.state import CompiledStateGraph

from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.demo import REPORT
from langgraph_latent.demo.agents import AGENTS, latent_graph, text_graph
from langgraph_latent.events import Decoded, Event, Loaded, Prefilled, Produced, Routed
from langgraph_latent.tracer import LatentTracer
from langgraph_latent.workspace import LatentWorkspace

WARM_UP = REPORT[:1000]
ANSWERS = {"analyst": "problem", "router": "team"}


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
    """Is told how the demo gets on; this one does not listen."""

    def stage(self, text: str) -> None:
        """Something that takes a while begins."""

    def agent_started(self, run: str, agent: str) -> None:
        """An agent is at work."""

    def agent_wrote(self, run: str, agent: str, piece: str) -> None:
        """A few more characters of an agent's answer."""

    def agent_finished(self, run: str, stats: AgentStats) -> None:
        """An agent is done."""


def run_demo(
    model: str, *, max_tokens: int = 48, trace: Path | None = None, watcher: Watcher | None = None
) -> DemoStats:
    """Run both graphs over the bundled report, greedily.

    Weights are loaded once and used once before the clock runs; each run has a workspace, so no cache is shared.
    `trace` gets both runs' events as JSON lines, the run's name as their thread id.

    Raises:
        LatentError: the model can't be loaded, or its context is too short for the report.
    """
    watcher = watcher or Watcher()
    with ExitStack() as stack:
        keeper = stack.enter_context(LatentWorkspace())
        watcher.stage("loading the model")
        chat = ChatLatent(model=model, workspace=keeper, max_tokens=4).load()
        watcher.stage("warming up")
        chat.invoke(WARM_UP)
        loaded = next(event for event in keeper.tracer.events if isinstance(event, Loaded))
        text = _run("text", text_graph, model, max_tokens, trace, watcher)
        latent = _run("latent", latent_graph, model, max_tokens, trace, watcher)
        return DemoStats(model, loaded.device, loaded.dtype, loaded.duration_s, text, latent)


class _Clock(LatentTracer):
    """A tracer that also remembers when each event came."""

    def __init__(self, path: Path | None) -> None:
        super().__init__(path)
        self.timed: list[tuple[float, Event]] = []

    def emit(self, event: Event) -> None:
        self.timed.append((time.perf_counter(), event))
        super().emit(event)

    def first(self, kind: type[Event], node: str) -> tuple[float, Any]:
        return next((at, event) for at, event in self.timed if isinstance(event, kind) and event.origin.node == node)

    def done(self, node: str, default: float) -> float:
        """When a node's last event came; `default` for a node that never called the model."""
        return max((at for at, event in self.timed if event.origin.node == node), default=default)

    def agent(self, node: str) -> AgentStats:
        mine = [event for _, event in self.timed if event.origin.node == node]
        read = [event for event in mine if isinstance(event, Prefilled)]
        written = [event for event in mine if isinstance(event, Decoded)]
        return AgentStats(
            name=node,
            tokens_read=sum(event.num_tokens for event in read),
            tokens_reused=sum(event.cache_read for event in read),
            tokens_written=sum(event.num_tokens for event in written),
            prefill_s=sum(event.duration_s for event in read),
            decode_s=sum(event.duration_s for event in written),
        )

    def edge(self, source: str, target: str, begin: float) -> EdgeStats:
        first_token, _ = self.first(Prefilled, target)
        routes = [event.route for _, event in self.timed if isinstance(event, Routed) and event.origin.node == target]
        return EdgeStats(source, target, (routes or ["text"])[0], first_token - self.done(source, begin))


def _run(
    name: str,
    make_graph: Callable[[ChatLatent], CompiledStateGraph],
    model: str,
    max_tokens: int,
    trace: Path | None,
    watcher: Watcher,
) -> RunStats:
    clock = _Clock(trace)
    with LatentWorkspace(tracer=clock) as workspace:
        chat = ChatLatent(model=model, workspace=workspace, max_tokens=max_tokens, reuse=name != "text").load()
        graph = make_graph(chat)
        begin = time.perf_counter()
        answers = _watch(graph, name, clock, watcher)
        total_s = time.perf_counter() - begin
        last = [event.handle for event in clock.events if isinstance(event, Produced)][-1]
        return RunStats(
            name=name,
            agents=tuple(clock.agent(node) for node in AGENTS),
            edges=tuple(clock.edge(source, target, begin) for source, target in pairwise(AGENTS)),
            answers=answers,
            token_ids=tuple(workspace.handle(last).token_ids),
            total_s=total_s,
        )


def _watch(graph: CompiledStateGraph, name: str, clock: _Clock, watcher: Watcher) -> dict[str, str]:
    """Run a graph to its end, telling the watcher; the agents' answers."""
    answers: dict[str, str] = {}
    config: Any = {"configurable": {"thread_id": name}}
    for mode, news in graph.stream({"report": REPORT}, config, stream_mode=["tasks", "messages"]):
        if mode == "messages":
            message, metadata = news
            if isinstance(message, AIMessageChunk):
                watcher.agent_wrote(name, metadata["langgraph_node"], message.text)
        elif "input" in news:
            watcher.agent_started(name, news["name"])
        else:
            if news["name"] in ANSWERS:
                answers[news["name"]] = news["result"][ANSWERS[news["name"]]]
            watcher.agent_finished(name, clock.agent(news["name"]))
    return answers


def _plain(run: RunStats) -> dict[str, Any]:
    data = asdict(run)
    totals = {name: getattr(run, name) for name in ("tokens_read", "tokens_reused", "tokens_written")}
    return {"name": data.pop("name"), **totals, "num_tokens": len(data.pop("token_ids")), **data}
