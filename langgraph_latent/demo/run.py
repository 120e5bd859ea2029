"""Runs the demo's two graphs, one after the other, and reads what they cost off the tracer's events.

It knows graphs and events; not the terminal: a `Watcher` is notified of what happens while it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from langchain_core.messages import AIMessageChunk
from langgraph.graph.state import CompiledStateGraph

from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.demo import REPORT
from langgraph_latent.demo.agents import AGENTS, latent_graph, text_graph
from langgraph_latent.demo.stats import AgentStats, DemoStats, EdgeStats, RunStats, Watcher
from langgraph_latent.events import Decoded, Loaded, Prefilled, Produced, Routed
from langgraph_latent.tracer import LatentTracer
from langgraph_latent.workspace.workspace import LatentWorkspace

WARM_UP = REPORT[:1000]
ANSWERS = {"analyst": "problem", "router": "team"}


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
    """A tracer that adds up each agent's figures."""

    def done(self, node: str, default: float) -> float:
        """When a node's last event came; `default` for a node that never called the model."""
        return max((event.time for event in self.events if event.call_site.node == node), default=default)

    def agent(self, node: str) -> AgentStats:
        mine = [event for event in self.events if event.call_site.node == node]
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
        arrived = [event for event in self.events if event.call_site.node == target]
        has_read = next(event.time for event in arrived if isinstance(event, Prefilled))
        route = next((event.route for event in arrived if isinstance(event, Routed)), "text")
        return EdgeStats(source, target, route, has_read - self.done(source, begin))


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
        begin = time.time()
        answers = _watch(graph, name, clock, watcher)
        total_s = time.time() - begin
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
    """Run a graph to its end and notify the watcher; the agents' answers."""
    answers: dict[str, str] = {}
    config: Any = {"configurable": {"thread_id": name}}
    stream = graph.stream({"report": REPORT}, config, stream_mode=["tasks", "messages"])
    for mode, news in cast("Iterator[tuple[str, Any]]", stream):
        if mode == "messages":
            message, metadata = news
            if isinstance(message, AIMessageChunk):
                watcher.agent_wrote(name, metadata["langgraph_node"], message.text)
        elif "input" in news:
            watcher.agent_started(name, news["name"])
        elif not news["error"]:  # the stream raises it next
            if news["name"] in ANSWERS:
                answers[news["name"]] = news["result"][ANSWERS[news["name"]]]
            watcher.agent_finished(name, clock.agent(news["name"]))
    return answers
