"""One report, read once; three analysts continue it side by side; an editor joins what they found.

All branches continue the same handle: it never changes, so none of them sees another. `LatentChannel(policy="collect")`
keeps the handles of all three, in a fixed order. The editor inherits them all: the first one's cache is continued, the
others follow as text (a cache can't be moved after another without loss), and the trace says so.

    python examples/fan_out_fan_in.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

import argparse
from typing import Annotated

from langgraph.graph import START, StateGraph
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentWorkspace
from langgraph_latent.demo import REPORT
from langgraph_latent.demo.model import demo_model
from langgraph_latent.events import Prefilled, Routed

QUESTIONS = {
    "causes": "What caused the incident? Answer in one sentence.",
    "damage": "What was damaged or lost? Answer in one sentence.",
    "people": "Which teams are involved? Answer in one sentence.",
}


class State(TypedDict, total=False):
    report: str
    context: Annotated[KVHandle | None, LatentChannel]
    findings: Annotated[list[KVHandle], LatentChannel(policy="collect")]
    causes: str
    damage: str
    people: str
    summary: str


def build(chat: ChatLatent) -> StateGraph:
    """The graph, not yet compiled."""
    builder = StateGraph(State)
    builder.add_node("reader", LatentNode(chat, prompt="{report}", mode="read", latent="context"))
    for name, question in QUESTIONS.items():
        node = LatentNode(chat, prompt=question, inherit="context", latent="findings", writes=name)
        builder.add_node(name, node)
        builder.add_edge("reader", name)
    question = "Sum up what we know in one sentence."
    builder.add_node(
        "editor", LatentNode(chat, prompt=question, inherit="findings", latent="context", writes="summary")
    )
    builder.add_edge(START, "reader")
    builder.add_edge(list(QUESTIONS), "editor")
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo's model when left out")
    options = parser.parse_args()

    with LatentWorkspace() as ws:
        chat = ChatLatent(model=options.model or str(demo_model(print)), workspace=ws, max_tokens=32)
        state = build(chat).compile().invoke({"report": REPORT})

        print()
        for name in (*QUESTIONS, "summary"):
            print(f"{name:8} {state[name]}")
        print(f"\n{'node':8} {'tokens read':>11} {'reused':>7}")
        for event in ws.tracer.events:
            if isinstance(event, Prefilled):
                print(f"{event.call_site.node:8} {event.num_tokens:11} {event.cache_read:7}")
        print("\nedges")
        for event in ws.tracer.events:
            if isinstance(event, Routed):
                print(f"{event.source:8} -> {event.call_site.node:8} {event.route}: {event.reason}")


if __name__ == "__main__":
    main()
