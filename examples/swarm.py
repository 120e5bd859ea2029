"""Two agents that hand the conversation to each other: `create_swarm` over a local model.

Whoever has the floor answers, or passes the conversation on with a hand-over tool; the checkpointer remembers who has
it. Both agents share one `ChatLatent`, and what either has read of the conversation is still in memory when it gets the
floor again.

    python examples/swarm.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

from common import TOOL_FIRST, chosen_model, show, worked_example
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph
from langgraph_swarm import create_handoff_tool, create_swarm

from langgraph_latent import ChatLatent, LatentWorkspace

STOCK = {"pallets": 40, "crates": 125}
TRUCKS = {"hamburg": "14:30", "lyon": "09:15"}
QUESTIONS = ["When does the next truck to Hamburg leave?", "How many pallets are in stock?"]


def stock_level(item: str) -> int:
    """Look up how many pieces of an item are in stock."""
    return STOCK.get(item.lower(), 0)


def next_truck(city: str) -> str:
    """Look up when the next truck to a city leaves."""
    return TRUCKS.get(city.lower(), "no truck today")


def build(chat: ChatLatent) -> CompiledStateGraph:
    """The swarm; its conversations, and who has the floor, are kept in memory."""
    example = worked_example(
        "How many ladders are in stock?", "stock_level", {"item": "ladders"}, "7", "There are 7 ladders in stock."
    )
    stock = create_agent(
        chat,
        tools=[stock_level, create_handoff_tool(agent_name="trucks", description="Ask about trucks")],
        system_prompt="You know the stock of a warehouse." + example,
        middleware=[TOOL_FIRST],
        name="stock",
    )
    example = worked_example(
        "When does the next truck to Oslo leave?",
        "next_truck",
        {"city": "Oslo"},
        "08:00",
        "The next truck to Oslo leaves at 08:00.",
    )
    trucks = create_agent(
        chat,
        tools=[next_truck, create_handoff_tool(agent_name="stock", description="Ask about stock")],
        system_prompt="You know the trucks of a warehouse." + example,
        middleware=[TOOL_FIRST],
        name="trucks",
    )
    return create_swarm([stock, trucks], default_active_agent="stock").compile(checkpointer=InMemorySaver())


def main() -> None:
    model = chosen_model(__doc__.splitlines()[0])
    with LatentWorkspace() as ws:
        swarm = build(ChatLatent(model=model, workspace=ws, max_tokens=32))
        thread = {"configurable": {"thread_id": "warehouse"}, "recursion_limit": 10}
        for question in QUESTIONS:
            before = len(swarm.get_state(thread).values.get("messages", []))
            state = swarm.invoke({"messages": [HumanMessage(question)]}, thread)
            show(state["messages"][before:])
            print(f"{'':10} ({state['active_agent']} has the floor)")


if __name__ == "__main__":
    main()
