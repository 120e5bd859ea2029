"""A draft/critique loop that survives kill -9: run it, kill it at any time, run it again.

The checkpoints are in an SQLite file and hold handles, never tensors. After a kill, the new process finds a handle
whose tensors are gone, rebuilds them from the handle and goes on; the answer is the one that an undisturbed run gives.
What had to be rebuilt is printed at the end, from the trace.

    python examples/checkpointed_loop.py [--model FOLDER_OR_HUB_ID] [--db FILE] [--thread NAME] [--rounds N] ...
"""

from __future__ import annotations

import argparse
from typing import Annotated

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentWorkspace
from langgraph_latent.demo.model import demo_model
from langgraph_latent.events import Rebuilt

TASK = [
    SystemMessage("You write short notices for the staff of a warehouse."),
    HumanMessage("Write a notice: the door of cold room C2 leaks, so keep it closed until Monday."),
]
CRITICISE = [HumanMessage("Name one thing that is wrong or missing in this notice.")]
IMPROVE = [HumanMessage("Write the notice again, with that repaired.")]


class State(TypedDict, total=False):
    latent: Annotated[KVHandle | None, LatentChannel]
    draft: str
    critique: str
    round: int


def build(chat: ChatLatent, rounds: int) -> StateGraph:
    """The graph, not yet compiled. Its nodes are plain functions that hand `inherit=` what the state holds."""

    def draft(state: State) -> State:
        reply = chat.invoke(IMPROVE if state.get("latent") else TASK, inherit=state.get("latent"))
        return {"latent": chat.handle(reply), "draft": reply.text, "round": state.get("round", 0) + 1}

    def critic(state: State) -> State:
        reply = chat.invoke(CRITICISE, inherit=state["latent"])
        return {"latent": chat.handle(reply), "critique": reply.text}

    builder = StateGraph(State)
    builder.add_node("draft", draft)
    builder.add_node("critic", critic)
    builder.add_edge(START, "draft")
    builder.add_conditional_edges("draft", lambda state: END if state["round"] >= rounds else "critic", ["critic", END])
    builder.add_edge("critic", "draft")
    return builder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id; the demo's model when left out")
    parser.add_argument("--db", default="checkpointed_loop.sqlite", help="file of the checkpoints (%(default)s)")
    parser.add_argument("--thread", default="notice", help="which run to start or resume (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="drafts to write (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=40, help="length of an answer (%(default)s)")
    options = parser.parse_args()

    with SqliteSaver.from_conn_string(options.db) as saver, LatentWorkspace() as ws:
        model = options.model or str(demo_model(print))
        chat = ChatLatent(model=model, workspace=ws, max_tokens=options.max_tokens)
        graph = build(chat, options.rounds).compile(checkpointer=saver)
        config = {"configurable": {"thread_id": options.thread}, "recursion_limit": 2 * options.rounds + 1}
        before = graph.get_state(config)
        if before.next:
            print(f"resuming {options.thread!r} before {before.next[0]!r}", flush=True)
        if before.next or not before.values:
            begin = None if before.next else {"round": 0}
            # durability="sync": a step is on disk before the next one begins
            for step in graph.stream(begin, config, stream_mode="updates", durability="sync"):
                for node, update in step.items():
                    said = update.get("draft") or update.get("critique")
                    print(f"[{node}] {' '.join(said.split())}", flush=True)

        print(f"\nanswer: {' '.join(graph.get_state(config).values['draft'].split())}")
        for event in ws.tracer.events:
            if isinstance(event, Rebuilt):
                print(
                    f"rebuilt: {event.num_tokens} tokens of {event.handle} for {event.call_site.node!r}: {event.reason}"
                )


if __name__ == "__main__":
    main()
