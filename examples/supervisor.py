"""A supervisor and two workers, three agents over one copy of the weights: `create_supervisor` over a local model.

All three share one `ChatLatent`. Each has its own system prompt and tools, hence a prefix of its own in memory; the
second question finds all that was read for the first one.

    python examples/supervisor.py [--model FOLDER_OR_HUB_ID]
"""

from __future__ import annotations

from common import TOOL_FIRST, chosen_model, show, worked_example
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langgraph.graph.state import CompiledStateGraph
from langgraph_supervisor import create_handoff_tool, create_supervisor

from langgraph_latent import ChatLatent, LatentWorkspace

STOCK = {"pallets": 40, "crates": 125}
TRUCKS = {"hamburg": "14:30", "lyon": "09:15"}
QUESTIONS = ["How many pallets are in stock?", "When does the next truck to Hamburg leave?"]
LADDERS = ("How many ladders are in stock?", "There are 7 ladders in stock.")
OSLO = ("When does the next truck to Oslo leave?", "The next truck to Oslo leaves at 08:00.")


def stock_level(item: str) -> int:
    """Look up how many pieces of an item are in stock."""
    return STOCK.get(item.lower(), 0)


def next_truck(city: str) -> str:
    """Look up when the next truck to a city leaves."""
    return TRUCKS.get(city.lower(), "no truck today")


def build(chat: ChatLatent) -> CompiledStateGraph:
    """The team."""
    example = worked_example(LADDERS[0], "stock_level", {"item": "ladders"}, "7", LADDERS[1])
    stock = create_agent(
        chat,
        tools=[stock_level],
        system_prompt="You know the stock of a warehouse." + example,
        middleware=[TOOL_FIRST],
        name="stock",
    )
    example = worked_example(OSLO[0], "next_truck", {"city": "Oslo"}, "08:00", OSLO[1])
    trucks = create_agent(
        chat,
        tools=[next_truck],
        system_prompt="You know the trucks of a warehouse." + example,
        middleware=[TOOL_FIRST],
        name="trucks",
    )
    hand_overs = [create_handoff_tool(agent_name="stock"), create_handoff_tool(agent_name="trucks")]
    examples = (
        worked_example(LADDERS[0], "transfer_to_stock", {}, "Successfully transferred to stock", LADDERS[1]),
        worked_example(OSLO[0], "transfer_to_trucks", {}, "Successfully transferred to trucks", OSLO[1]),
    )
    return create_supervisor(
        [stock, trucks],
        model=chat.bind_tools(hand_overs, stop=["\n{"]),  # one call is enough; this model would write several
        tools=hand_overs,
        prompt="You lead a warehouse." + "".join(examples),
        add_handoff_back_messages=False,
    ).compile()


def main() -> None:
    model = chosen_model(__doc__.splitlines()[0])
    with LatentWorkspace() as ws:
        team = build(ChatLatent(model=model, workspace=ws, max_tokens=32))
        for question in QUESTIONS:
            state = team.invoke({"messages": [HumanMessage(question)]}, {"recursion_limit": 10})
            show(state["messages"])


if __name__ == "__main__":
    main()
