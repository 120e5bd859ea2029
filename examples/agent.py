"""An agent with two tools, in a conversation of two turns: LangChain's `create_agent` over a local model.

`ChatLatent` is a chat model like any other: tools reach its prompt, its calls come back parsed, tool results are read.
What a provider would bill again is still in memory: each model call reads only what is new since the last one, within
a turn and from turn to turn.

    python examples/agent.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

from common import chosen_model, show, show_totals, tool_first, worked_example
from langchain.agents import create_agent
from langchain.agents.middleware import ModelCallLimitMiddleware
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph

from langgraph_latent import ChatLatent, LatentWorkspace

STOCK = {"pallets": 40, "crates": 125}
HALLS = {"pallets": 3, "crates": 7}
QUESTIONS = ["How many pallets are in stock?", "Where are the pallets?"]


def stock_level(item: str) -> int:
    """Look up how many pieces of an item are in stock."""
    return STOCK.get(item.lower(), 0)


def location(item: str) -> str:
    """Look up the hall in which an item is stored."""
    return f"hall {HALLS[item.lower()]}" if item.lower() in HALLS else "nowhere"


def build(chat: ChatLatent) -> CompiledStateGraph:
    """The agent; its conversations are kept in memory."""
    example = worked_example(
        "How many ladders are in stock?", "stock_level", {"item": "ladders"}, "7", "There are 7 ladders in stock."
    )
    return create_agent(
        chat,
        tools=[stock_level, location],
        system_prompt="You answer questions about a warehouse." + example,
        middleware=[tool_first, ModelCallLimitMiddleware(run_limit=4, exit_behavior="end")],
        checkpointer=InMemorySaver(),
    )


def main() -> None:
    model = chosen_model(__doc__.splitlines()[0])
    with LatentWorkspace() as ws:
        agent = build(ChatLatent(model=model, workspace=ws, max_tokens=32))
        thread = {"configurable": {"thread_id": "warehouse"}}
        for question in QUESTIONS:
            before = len(agent.get_state(thread).values.get("messages", []))
            state = agent.invoke({"messages": [HumanMessage(question)]}, thread)
            show(state["messages"][before:])
        show_totals(ws)


if __name__ == "__main__":
    main()
