"""A supervisor and two workers, three agents over one copy of the weights: `create_supervisor` over a local model.

All three share one `ChatLatent`. Each has its own system prompt and tools, hence a prefix of its own in memory. When
the floor comes back to an agent, it reads only what is new to it.

    python examples/supervisor.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

from common import chosen_model, show, show_totals, tool_first, worked_example
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.graph.state import CompiledStateGraph
from langgraph_supervisor import create_handoff_tool, create_supervisor

from langgraph_latent import ChatLatent, LatentWorkspace

STOCK = {"pallets": 40, "crates": 125}
TRUCKS = {"hamburg": "14:30", "lyon": "09:15"}
QUESTIONS = ["How many pallets are in stock?", "When does the next truck to Hamburg leave?"]
LEAD = """You lead a warehouse: ask stock, or ask trucks. Example:
user: When does the next truck to Oslo leave?
assistant: <tool_call>
{"name": "transfer_to_trucks", "arguments": {}}
</tool_call>
user: How many ladders are in stock?
assistant: <tool_call>
{"name": "transfer_to_stock", "arguments": {}}
</tool_call>
user: <tool_response>
Successfully transferred to stock
</tool_response>
assistant: There are 7 ladders in stock.
assistant: There are 7 ladders in stock."""
LADDERS = worked_example(
    "How many ladders are in stock?", "stock_level", {"item": "ladders"}, "7", "There are 7 ladders in stock."
)
OSLO = worked_example(
    "When does the next truck to Oslo leave?",
    "next_truck",
    {"city": "Oslo"},
    "08:00",
    "The next truck to Oslo leaves at 08:00.",
)


def stock_level(item: str) -> int:
    """Look up how many pieces of an item are in stock."""
    return STOCK.get(item.lower(), 0)


def next_truck(city: str) -> str:
    """Look up when the next truck to a city leaves."""
    return TRUCKS.get(city.lower(), "no truck today")


def build(chat: ChatLatent) -> CompiledStateGraph:
    """The team."""
    stock_prompt, trucks_prompt = (
        "You know the stock of a warehouse." + LADDERS,
        "You know the trucks of a warehouse." + OSLO,
    )
    stock = create_agent(chat, tools=[stock_level], system_prompt=stock_prompt, middleware=[tool_first], name="stock")
    trucks = create_agent(chat, tools=[next_truck], system_prompt=trucks_prompt, middleware=[tool_first], name="trucks")
    hand_overs = [create_handoff_tool(agent_name=agent.name) for agent in (stock, trucks)]
    return create_supervisor(
        [stock, trucks],
        model=chat,
        tools=hand_overs,
        prompt=LEAD,
        add_handoff_back_messages=False,
    ).compile()


def main() -> None:
    model = chosen_model(__doc__.splitlines()[0])
    with LatentWorkspace() as ws:
        team = build(ChatLatent(model=model, workspace=ws, max_tokens=32))
        for question in QUESTIONS:
            state = team.invoke({"messages": [HumanMessage(question)]}, {"recursion_limit": 10})
            show(state["messages"])
        show_totals(ws)


if __name__ == "__main__":
    main()
