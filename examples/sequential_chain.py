"""Three agents in a row over one report: reader -> analyst -> writer.

Only the reader reads the report. Each next agent continues the KV cache that came along the edge, so what it reads is
its own instruction and nothing else. The last column says how the edge into each node was served.

    python examples/sequential_chain.py [--model FOLDER_OR_HUB_ID]
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


class State(TypedDict, total=False):
    report: str
    latent: Annotated[KVHandle | None, LatentChannel]
    analysis: str
    letter: str


def build(chat: ChatLatent) -> StateGraph:
    """The graph, not yet compiled."""
    builder = StateGraph(State)
    builder.add_node(
        "reader",
        LatentNode(chat, prompt=[("system", "You help a duty manager."), ("human", "{report}")], mode="read"),
    )
    builder.add_node("analyst", LatentNode(chat, prompt="What caused the incident?", writes="analysis"))
    builder.add_node("writer", LatentNode(chat, prompt="Say it to a customer in one sentence.", writes="letter"))
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "analyst")
    builder.add_edge("analyst", "writer")
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo's model when left out")
    options = parser.parse_args()

    with LatentWorkspace() as ws:
        chat = ChatLatent(model=options.model or str(demo_model(print)), workspace=ws, max_tokens=48)
        state = build(chat).compile().invoke({"report": REPORT})

        print(f"\nanalyst: {state['analysis']}\nwriter:  {state['letter']}\n")
        print(f"{'node':8} {'tokens read':>11} {'reused':>7}  route")
        route = "nothing inherited"
        for event in ws.tracer.events:
            if isinstance(event, Routed):
                route = f"{event.route}: {event.reason}"
            elif isinstance(event, Prefilled):
                print(f"{event.call_site.node:8} {event.num_tokens:11} {event.cache_read:7}  {route}")


if __name__ == "__main__":
    main()
