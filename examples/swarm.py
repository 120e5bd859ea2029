"""Two agents that hand the conversation to each other: `create_swarm` over a local model.

Whoever has the floor looks the answer up, or passes the conversation on with a hand-over tool; the checkpointer
remembers who has it. Both agents share one `ChatLatent`, and what either has read of the conversation is still in
memory when it gets the floor again. A tool's result is the answer (`return_direct`), so every reply is a call.

    python examples/swarm.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

from common import chosen_model, show, show_totals, tool_first
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph.state import CompiledStateGraph
from langgraph_swarm import create_handoff_tool, create_swarm

from langgraph_latent import ChatLatent, LatentWorkspace

STOCK = {"pallets": 40, "crates": 125}
TRUCKS = {"hamburg": "at 14:30", "lyon": "at 09:15"}
QUESTIONS = ["When does the next truck to Hamburg leave?", "How many pallets are in stock?"]


@tool(return_direct=True)
def stock_level(item: str) -> str:
    """Look up how many pieces of an item are in stock."""
    return f"There are {STOCK.get(item.lower(), 'no')} {item} in stock."


@tool(return_direct=True)
def next_truck(city: str) -> str:
    """Look up when the next truck to a city leaves."""
    return f"The next truck to {city} leaves {TRUCKS.get(city.lower(), 'tomorrow')}."


def build(chat: ChatLatent) -> CompiledStateGraph:
    """The swarm; its conversations, and who has the floor, are kept in memory."""
    prompt = "You work in a warehouse."
    to_trucks = create_handoff_tool(agent_name="trucks", description="Ask about trucks")
    to_stock = create_handoff_tool(agent_name="stock", description="Ask about stock")
    stock = create_agent(
        chat, tools=[stock_level, to_trucks], system_prompt=prompt, middleware=[tool_first], name="stock"
    )
    trucks = create_agent(
        chat, tools=[next_truck, to_stock], system_prompt=prompt, middleware=[tool_first], name="trucks"
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
        show_totals(ws)


if __name__ == "__main__":
    main()
