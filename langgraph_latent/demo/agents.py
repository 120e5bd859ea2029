"""The demo's three agents as two LangGraph graphs: the edges of one carry text, those of the other KV caches.

Both ask the same model the same questions in the same order, so every answer has the same tokens before it.
"""

from collections.abc import Callable
from typing import Annotated, Any

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from typing_extensions import TypedDict

from langgraph_latent.channel import LatentChannel
from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.node import LatentNode

AGENTS = ("reader", "analyst", "router")
READER = "You answer questions about this report in one sentence.\n\n{report}"
ANALYST = "What is the most urgent problem?"
ROUTER = "Which team should handle the follow-up?"


class TextState(TypedDict, total=False):
    """What the agents hand on is the whole conversation so far."""

    report: str
    messages: Annotated[list[AnyMessage], add_messages]
    problem: str
    team: str


class LatentState(TypedDict, total=False):
    """What the agents hand on is the handle of a KV cache."""

    report: str
    latent: Annotated[KVHandle | None, LatentChannel]
    problem: str
    team: str


def text_graph(chat: ChatLatent) -> CompiledStateGraph:
    """Each agent gets all messages and reads them again. The reader, who has nothing to say, passes the report on."""

    def reader(state: TextState) -> dict[str, Any]:
        return {"messages": [SystemMessage(READER.format(report=state["report"]))]}

    def agent(question: str, writes: str) -> Callable[[TextState], dict[str, Any]]:
        def ask(state: TextState) -> dict[str, Any]:
            asked = HumanMessage(question)
            reply = chat.invoke([*state["messages"], asked])
            return {"messages": [asked, reply], writes: reply.text}

        return ask

    return _chain(TextState, [reader, agent(ANALYST, "problem"), agent(ROUTER, "team")])


def latent_graph(chat: ChatLatent) -> CompiledStateGraph:
    """Each agent continues the KV cache of the one before it and reads nothing but its own question."""
    reader = LatentNode(chat, prompt=[("system", READER)], mode="read")
    analyst = LatentNode(chat, prompt=ANALYST, writes="problem")
    router = LatentNode(chat, prompt=ROUTER, writes="team")
    return _chain(LatentState, [reader, analyst, router])


def _chain(state: type[Any], nodes: list[Any]) -> CompiledStateGraph:
    builder = StateGraph(state)
    builder.add_sequence(list(zip(AGENTS, nodes, strict=True)))
    builder.add_edge(START, AGENTS[0])
    return builder.compile()
