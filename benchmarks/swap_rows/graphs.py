"""Five graphs as people write them, each against a `model` that is any LangChain chat model. It knows LangGraph only.

An agent's order stands after the history that all share, as the last human message: `ChatHuggingFace` asks for one
there, and only what stands in front of it can be reused. `chain-in-front` is the counter-example.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.types import Command


@dataclass(frozen=True)
class Graph:
    """A graph, and what it is asked turn by turn.

    Attributes:
        build: the compiled graph of a model.
        turns: the user's words, one turn after another in one thread; the history comes with the first.
        has_goals: whether most of what its agents read was read before.
    """

    title: str
    build: Callable[[Any], Any]
    turns: Sequence[str]
    has_goals: bool = True


class State(MessagesState):
    """A shared history, notes that stay out of it, and workers that have answered."""

    notes: Annotated[list[str], operator.add]
    asked: Annotated[list[str], operator.add]


Node = Any
"""A function of the state. LangGraph's own type for it can't be named without its private parts."""


def agent(model: Any, order: str) -> Node:
    """A node that answers an order after the history, and adds both to it."""

    def node(state: State) -> dict[str, list[BaseMessage]]:
        asked = HumanMessage(order)
        return {"messages": [asked, model.invoke([*state["messages"], asked])]}

    return node


def single(model: Any) -> Any:
    """One agent that answers the history."""
    builder = StateGraph(State)
    builder.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "agent")
    return builder.compile(InMemorySaver())


CHAIN = {
    "analyst": "As the analyst, say what happened.",
    "planner": "As the planner, say what to do first.",
    "writer": "As the writer, answer the user.",
}


def chain(model: Any) -> Any:
    """Three agents, one after the other, over one history."""
    builder = StateGraph(State)
    builder.add_sequence([(name, agent(model, order)) for name, order in CHAIN.items()])
    builder.add_edge(START, next(iter(CHAIN)))
    return builder.compile(InMemorySaver())


def chain_in_front(model: Any) -> Any:
    """The same, but each agent's order stands in a system message in front of the history."""

    def node(order: str) -> Node:
        system, asked = SystemMessage(order), HumanMessage("Go on.")
        return lambda state: {"messages": [asked, model.invoke([system, *state["messages"], asked])]}

    builder = StateGraph(State)
    builder.add_sequence([(name, node(order)) for name, order in CHAIN.items()])
    builder.add_edge(START, next(iter(CHAIN)))
    return builder.compile(InMemorySaver())


WORKERS = {
    "logs": "As the logs worker, say what the logs show.",
    "network": "As the network worker, say what the network did.",
    "people": "As the people worker, say who must act.",
}
NUM_WORKERS = 2


def supervisor(model: Any) -> Any:
    """A supervisor that asks two workers, one after another, and then answers.

    Who is asked is the first worker that the supervisor's words name, else the first that was not asked yet.
    `langgraph_supervisor` hands over by tool calls, which `ChatHuggingFace` over a pipeline can't make.
    """

    def supervise(state: State) -> Command[Any]:
        left = [name for name in WORKERS if name not in state["asked"]]
        is_done = len(state["asked"]) == NUM_WORKERS
        order = HumanMessage("Answer the user." if is_done else f"Which worker is next: {', '.join(left)}?")
        reply = model.invoke([*state["messages"], order])
        update = {"messages": [order, reply]}
        if is_done:
            return Command(goto=END, update=update)
        chosen = min(left, key=lambda name: (reply.text.lower() + name).index(name))
        return Command(goto=chosen, update={**update, "asked": [chosen]})

    builder = StateGraph(State)
    builder.add_node("supervisor", supervise, destinations=(*WORKERS, END))
    builder.add_edge(START, "supervisor")
    for name, order in WORKERS.items():
        builder.add_node(name, agent(model, order))
        builder.add_edge(name, "supervisor")
    return builder.compile(InMemorySaver())


BRANCHES = {
    "cause": "What was the cause?",
    "damage": "What was the damage?",
    "remedy": "What is the remedy?",
}


def fan_out(model: Any) -> Any:
    """A plan, three branches at a time, and a join that reads what they noted."""

    def branch(question: str) -> Node:
        return lambda state: {"notes": [model.invoke([*state["messages"], HumanMessage(question)]).text]}

    def join(state: State) -> dict[str, list[BaseMessage]]:
        return agent(model, "\n".join(["Answer the user. Notes:", *state["notes"]]))(state)

    builder = StateGraph(State)
    builder.add_node("plan", agent(model, "Say what must be found out."))
    builder.add_node("join", join)
    builder.add_edge(START, "plan")
    for name, question in BRANCHES.items():
        builder.add_node(name, branch(question))
        builder.add_edge("plan", name)
    builder.add_edge([*BRANCHES], "join")
    return builder.compile(InMemorySaver())


NUM_DRAFTS = 3
CRITIC = "As the critic, say what the draft lacks."


def loop(model: Any) -> Any:
    """A writer and a critic in turn, until there are three drafts."""

    def has_drafts(state: State) -> str:
        num_rounds = sum(isinstance(message, HumanMessage) and message.text == CRITIC for message in state["messages"])
        return END if num_rounds == NUM_DRAFTS else "writer"

    builder = StateGraph(State)
    builder.add_node("writer", agent(model, "As the writer, write the next draft."))
    builder.add_node("critic", agent(model, CRITIC))
    builder.add_edge(START, "writer")
    builder.add_edge("writer", "critic")
    builder.add_conditional_edges("critic", has_drafts, ["writer", END])
    return builder.compile(InMemorySaver())


def tool_loop(model: Any, tools: Sequence[Any], rounds: int) -> Any:
    """An agent that calls a tool `rounds` times, reading what each call gave, and then answers."""
    forced = model.bind_tools(tools, tool_choice=tools[0].name)
    free = model.bind_tools(tools)
    known = {tool.name: tool for tool in tools}

    def last_calls(state: State) -> list[ToolCall]:
        message = state["messages"][-1]
        return message.tool_calls if isinstance(message, AIMessage) else []

    def num_calls(state: State) -> int:
        return sum(isinstance(message, AIMessage) and bool(message.tool_calls) for message in state["messages"])

    def act(state: State) -> dict[str, list[BaseMessage]]:
        chosen = forced if num_calls(state) < rounds else free
        return {"messages": [chosen.invoke(state["messages"])]}

    def use(state: State) -> dict[str, list[BaseMessage]]:
        return {"messages": [known[call["name"]].invoke(call) for call in last_calls(state)]}

    def is_over(state: State) -> str:
        return "tools" if last_calls(state) and num_calls(state) <= rounds else END

    builder = StateGraph(State)
    builder.add_node("agent", act)
    builder.add_node("tools", use)
    builder.add_edge(START, "agent")
    builder.add_conditional_edges("agent", is_over, ["tools", END])
    builder.add_edge("tools", "agent")
    return builder.compile(InMemorySaver())


GRAPHS = {
    "single": Graph(
        "single agent, 4 turns",
        single,
        ("What went wrong?", "What is urgent?", "Which team should act?", "What should it do?"),
    ),
    "chain": Graph("chain of 3 agents, 2 turns", chain, ("What went wrong?", "What should be done?")),
    "supervisor": Graph("supervisor and 2 workers", supervisor, ("What went wrong, and who should act?",)),
    "fan-out": Graph("plan, 3 branches, join", fan_out, ("What went wrong?",)),
    "loop": Graph("writer and critic, 3 rounds", loop, ("Write a note on what went wrong.",)),
    "chain-in-front": Graph(
        "the chain, each agent's order in front of the history",
        chain_in_front,
        ("What went wrong?", "What should be done?"),
        has_goals=False,
    ),
}
