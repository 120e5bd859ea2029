"""`LatentNode` and plain node functions in real graphs on tiny random models."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from langchain_core.caches import InMemoryCache as LLMCache
from langchain_core.globals import set_llm_cache
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import CachePolicy
from pydantic import BaseModel
from transformers import AutoModelForCausalLM
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentState, LatentWorkspace
from langgraph_latent.errors import ConfigError, HandleError, PromptError
from langgraph_latent.events import Decoded, Event, Prefilled, Produced, Routed

REPORT = "the team reads the report and hands over what it knows {in braces}"
QUESTION = "which team decides?"


class State(TypedDict, total=False):
    report: str
    latent: Annotated[KVHandle | None, LatentChannel]
    answer: str


def alone(chat: ChatLatent, *messages: BaseMessage | str, **options: Any) -> str:
    """The answer of a workspace that has seen nothing else; strings are human messages."""
    prompt = [HumanMessage(message) if isinstance(message, str) else message for message in messages]
    with LatentWorkspace(memory="1GiB") as fresh:
        return ChatLatent(model=chat.model, workspace=fresh, max_tokens=chat.max_tokens).invoke(prompt, **options).text


def assert_greedy(chat: ChatLatent, handle: KVHandle) -> None:
    """Every token that a handle says was sampled is the one plain transformers finds likeliest, in one full forward."""
    model = AutoModelForCausalLM.from_pretrained(chat.model)
    with torch.no_grad():
        best = model(torch.tensor([handle.token_ids])).logits[0].argmax(-1).tolist()
    position = 0
    for segment in handle.segments:
        end = position + segment.num_tokens
        if segment.kind == "generated":
            assert tuple(best[position - 1 : end - 1]) == handle.token_ids[position:end]
        position = end


def events(ws: LatentWorkspace, kind: type[Event], node: str) -> list[Any]:
    """The events of one kind that happened in one node."""
    return [event for event in ws.tracer.events if isinstance(event, kind) and event.call_site.node == node]


def chain(reader: Any, answerer: Any, schema: type = State) -> StateGraph:
    builder = StateGraph(schema)
    builder.add_node("reader", reader)
    builder.add_node("answerer", answerer)
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "answerer")
    return builder


def reader_and_answerer(chat: ChatLatent) -> StateGraph:
    return chain(LatentNode(chat, prompt="{report}", mode="read"), LatentNode(chat, prompt=QUESTION, writes="answer"))


def test_chain_answers_as_one_prompt_and_reads_only_the_question(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    state = reader_and_answerer(tiny_chat).compile().invoke({"report": REPORT})
    assert state["answer"] == alone(tiny_chat, REPORT, QUESTION)
    (read,), (answered,) = events(ws, Prefilled, "reader"), events(ws, Prefilled, "answerer")
    assert (read.cache_read, answered.cache_read) == (0, read.num_tokens)
    (routed,) = events(ws, Routed, "answerer")
    assert (routed.source, routed.route, routed.level) == ("reader", "cache", 0)
    assert state["latent"].source == "answerer"
    assert [segment.source for segment in state["latent"].segments] == ["reader", "answerer", "answerer"]


def test_chain_answers_as_one_prompt_on_the_real_model(smol_chat: ChatLatent) -> None:
    report = "Only Facilities Maintenance may order a new door seal. The seal of room C2 is worn."
    state = reader_and_answerer(smol_chat).compile().invoke({"report": report})
    assert state["answer"] == alone(smol_chat, report, QUESTION)


async def test_async_graph_gives_the_same(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    state = await reader_and_answerer(tiny_chat).compile().ainvoke({"report": REPORT})
    assert state["answer"] == alone(tiny_chat, REPORT, QUESTION)
    assert events(ws, Prefilled, "answerer")[0].cache_read == events(ws, Prefilled, "reader")[0].num_tokens


def test_plain_function_with_indexed_state_works_before_and_after_the_key_is_written(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    def node(text: str) -> Callable[[State], State]:
        def speak(state: State) -> State:
            reply = tiny_chat.invoke([HumanMessage(text)], inherit=state["latent"])
            return {"latent": ws.handle(reply), "answer": reply.text}

        return speak

    state = chain(node(REPORT), node(QUESTION)).compile().invoke({"report": ""})
    assert_greedy(tiny_chat, state["latent"])
    assert [segment.source for segment in state["latent"].segments] == ["reader"] * 2 + ["answerer"] * 2


async def test_async_plain_function_is_known_by_its_node(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    async def read(state: State) -> State:
        return {"latent": await tiny_chat.aread([HumanMessage(REPORT)])}

    async def answer(state: State) -> State:
        reply = await tiny_chat.ainvoke([HumanMessage(QUESTION)], inherit=state["latent"])
        return {"latent": ws.handle(reply), "answer": reply.text}

    state = await chain(read, answer).compile().ainvoke({"report": ""})
    assert state["answer"] == alone(tiny_chat, REPORT, QUESTION)
    assert [segment.source for segment in state["latent"].segments] == ["reader", "answerer", "answerer"]


def test_conversation_in_latent_state_reads_only_the_new_turn(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    builder = StateGraph(LatentState)
    builder.add_node("chat", LatentNode(tiny_chat, prompt=lambda state: state["messages"][-1:], writes="messages"))
    builder.add_edge(START, "chat")
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    for number, text in enumerate(["the report", "which team?", "and then?"]):
        state = graph.invoke({"messages": [HumanMessage(text)]}, config)
        assert_greedy(tiny_chat, state["latent"])
        prefilled = events(ws, Prefilled, "chat")[-1]
        assert (prefilled.cache_read > 0) is (number > 0)
        assert prefilled.num_tokens < 30
        assert prefilled.call_site.thread_id == "1"
    said = [message.text for message in graph.get_state(config).values["messages"]]
    assert said == [message["content"] for message in state["latent"].messages]
    assert len(said) == 6


def test_messages_of_a_plain_messages_graph_reuse_the_prefix_without_any_handle(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    """The drop-in case: `chat.invoke(state["messages"])`, no handle anywhere."""
    builder = StateGraph(LatentState)
    builder.add_node("chat", lambda state: {"messages": [tiny_chat.invoke(state["messages"])]})
    builder.add_edge(START, "chat")
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    graph.invoke({"messages": [HumanMessage(REPORT)]}, config)
    reply = graph.invoke({"messages": [HumanMessage(QUESTION)]}, config)["messages"][-1]
    assert reply.usage_metadata["input_token_details"]["cache_read"] > 40
    assert reply.text == alone(tiny_chat, REPORT, AIMessage(alone(tiny_chat, REPORT)), QUESTION)


@pytest.mark.parametrize("mode", ["sync", "async"])
async def test_messages_mode_streams_the_nodes_answer_piece_by_piece(tiny_chat: ChatLatent, mode: str) -> None:
    graph = reader_and_answerer(tiny_chat).compile()
    if mode == "sync":
        parts = list(graph.stream({"report": REPORT}, stream_mode=["messages", "values"]))
    else:
        parts = [part async for part in graph.astream({"report": REPORT}, stream_mode=["messages", "values"])]
    pieces = [part for kind, part in parts if kind == "messages"]
    final = [part for kind, part in parts if kind == "values"][-1]
    chunks = [chunk for chunk, _ in pieces]
    assert len(chunks) > 2
    assert all(isinstance(chunk, AIMessageChunk) for chunk in chunks)
    assert "".join(chunk.text for chunk in chunks) == final["answer"] == alone(tiny_chat, REPORT, QUESTION)
    assert {metadata["langgraph_node"] for _, metadata in pieces} == {"answerer"}
    with_usage = [chunk for chunk in chunks if chunk.usage_metadata]
    assert len(with_usage) == 1
    assert with_usage[0].response_metadata["kv_handle"] == final["latent"].id


def test_updates_and_values_carry_the_handle(tiny_chat: ChatLatent) -> None:
    graph = reader_and_answerer(tiny_chat).compile()
    updates = list(graph.stream({"report": REPORT}, stream_mode="updates"))
    assert [list(update) for update in updates] == [["reader"], ["answerer"]]
    assert isinstance(updates[0]["reader"]["latent"], KVHandle)
    assert set(updates[1]["answerer"]) == {"latent", "answer"}
    values = list(graph.stream({"report": REPORT}, stream_mode="values"))
    assert [value["latent"] and value["latent"].source for value in values] == [None, "reader", "answerer"]


def test_events_name_node_thread_and_run(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    graph = reader_and_answerer(tiny_chat).compile(checkpointer=InMemorySaver())
    graph.invoke({"report": REPORT}, {"configurable": {"thread_id": "t-1"}})
    for kind, node in [(Prefilled, "reader"), (Produced, "reader"), (Routed, "answerer"), (Decoded, "answerer")]:
        (event,) = events(ws, kind, node)
        assert event.call_site.thread_id == "t-1"
        assert event.call_site.run_id


def test_one_node_object_may_serve_under_two_names(tiny_chat: ChatLatent) -> None:
    node = LatentNode(tiny_chat, prompt=QUESTION, writes="answer")
    state = chain(node, node).compile().invoke({"report": ""})
    assert [segment.source for segment in state["latent"].segments] == ["reader"] * 2 + ["answerer"] * 2


@pytest.mark.parametrize(
    "prompt",
    [
        [("system", "the team"), ("human", "{report}")],
        [SystemMessage("the team"), ("human", "{report}")],
        ChatPromptTemplate.from_messages([("system", "the team"), ("human", "{report}")]),
        lambda state: [SystemMessage("the team"), HumanMessage(state["report"])],
    ],
)
def test_every_form_of_prompt_gives_the_same_answer(tiny_chat: ChatLatent, prompt: Any) -> None:
    update = LatentNode(tiny_chat, prompt=prompt, writes="answer").invoke({"report": REPORT})
    assert update["answer"] == alone(tiny_chat, SystemMessage("the team"), REPORT)


def test_missing_prompt_key_is_named_with_the_keys_there_are(tiny_chat: ChatLatent) -> None:
    builder = StateGraph(State)
    builder.add_node("reader", LatentNode(tiny_chat, prompt="{reprot}", mode="read"))
    builder.add_edge(START, "reader")
    with pytest.raises(PromptError, match=r"'reprot'.*report"):
        builder.compile().invoke({"report": REPORT})


def test_wrong_options_are_refused_when_the_node_is_made(tiny_chat: ChatLatent) -> None:
    with pytest.raises(ConfigError, match="read, think, decode"):
        LatentNode(tiny_chat, prompt="x", mode="reed")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="writes"):
        LatentNode(tiny_chat, prompt="x", mode="read", writes="answer")
    with pytest.raises(ConfigError, match="max_token"):
        LatentNode(tiny_chat, prompt="x", max_token=3)


def test_decoding_options_reach_the_model(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    LatentNode(tiny_chat, prompt=QUESTION, max_tokens=3).invoke({})
    (decoded,) = [event for event in ws.tracer.events if isinstance(event, Decoded)]
    assert decoded.num_tokens <= 3


def test_node_can_start_afresh_or_inherit_other_keys(tiny_chat: ChatLatent) -> None:
    one, two = tiny_chat.read([HumanMessage("the report")]), tiny_chat.read([HumanMessage("the answer")])
    state = {"latent": one, "a": one, "b": [two]}
    for inherit, inherited in [
        ((), []),
        ("append", ["the report"]),
        ("a", ["the report"]),
        (["b", "a"], ["the answer", "the report"]),
        (["nowhere"], []),
    ]:
        node = LatentNode(tiny_chat, prompt=QUESTION, writes="answer", inherit=inherit)
        assert node.invoke(state)["answer"] == alone(tiny_chat, *inherited, QUESTION)


def test_what_is_no_handle_under_an_inherited_key_is_a_typed_error(tiny_chat: ChatLatent) -> None:
    with pytest.raises(HandleError, match="str"):
        LatentNode(tiny_chat, prompt=QUESTION, inherit="report").invoke({"report": REPORT})


@dataclass
class DataclassState:
    report: str = ""
    latent: Annotated[KVHandle | None, LatentChannel] = None
    answer: str = ""


class PydanticState(BaseModel):
    report: str = ""
    latent: Annotated[KVHandle | None, LatentChannel] = None
    answer: str = ""


@pytest.mark.parametrize("schema", [DataclassState, PydanticState])
def test_dataclass_and_pydantic_states_work_like_typed_dicts(tiny_chat: ChatLatent, schema: type) -> None:
    graph = chain(
        LatentNode(tiny_chat, prompt="{report}", mode="read"),
        LatentNode(tiny_chat, prompt=QUESTION, writes="answer"),
        schema,
    ).compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke({"report": REPORT}, config)["answer"] == alone(tiny_chat, REPORT, QUESTION)
    assert isinstance(graph.get_state(config).values["latent"], KVHandle)


def test_a_chat_model_for_the_default_workspace_serves_a_graph(tiny_folder: Callable[..., Path]) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama")), max_tokens=12)
    try:
        state = reader_and_answerer(chat).compile().invoke({"report": REPORT})
        assert state["answer"] == alone(chat, REPORT, QUESTION)
    finally:
        LatentWorkspace.default().close()


# -- caches of LangGraph and LangChain ---------------------------------------------------------------------------------


def asking(chat: ChatLatent, **options: Any) -> StateGraph:
    builder = StateGraph(State)
    node = LatentNode(chat, **{"prompt": "{report}", "writes": "answer", **options})
    builder.add_node("node", node, cache_policy=CachePolicy())
    return builder.add_edge(START, "node")


def closure(text: str) -> Callable[[Any], list[BaseMessage]]:
    return lambda state: [HumanMessage(f"{text} {state['report']}")]


def test_nodes_that_differ_do_not_share_results_in_a_node_cache(tiny_folder: Callable[..., Path]) -> None:
    """langgraph#8753: nodes of one name in graphs that share a cache."""
    cache = InMemoryCache()
    with LatentWorkspace() as ws, LatentWorkspace(tenant="acme") as acme:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=6)
        other = ChatLatent(model=str(tiny_folder("llama", seed=1)), workspace=ws, max_tokens=6)
        tenant = ChatLatent(model=chat.model, workspace=acme, max_tokens=6)
        graphs = [
            asking(chat),
            asking(other),
            asking(tenant),
            asking(chat, prompt="say: {report}"),
            asking(chat, prompt=[("system", "be brief"), ("human", "{report}")]),
            asking(chat, prompt=closure("a")),
            asking(chat, prompt=closure("b")),
            asking(chat, max_tokens=3),
            asking(chat, mode="read", writes=None),
            asking(chat, mode="think", writes=None, steps=2),
            asking(chat, inherit=()),
            asking(ChatLatent(model=chat.model, workspace=ws, max_tokens=6, stop=["e"])),
        ]
        names = {graph.nodes["node"].runnable.__qualname__ for graph in graphs}
        assert len(names) == len(graphs)
        alone = [graph.compile().invoke({"report": "hi"}) for graph in graphs]
        shared = [graph.compile(cache=cache).invoke({"report": "hi"}) for graph in graphs]
        assert shared == alone
        decoded = len(ws.tracer.events)
        assert [graph.compile(cache=cache).invoke({"report": "hi"}) for graph in graphs] == alone
        assert len(ws.tracer.events) == decoded
        assert asking(chat).nodes["node"].runnable.__qualname__ == graphs[0].nodes["node"].runnable.__qualname__
        assert asking(chat, prompt=closure("a")).nodes["node"].runnable.__qualname__ in names


async def test_a_reply_that_langchain_cached_in_another_process_is_read_as_a_message(
    tiny_folder: Callable[..., Path],
) -> None:
    """Two workspaces play two processes: the second does not know the handle of the first."""
    set_llm_cache(LLMCache())
    try:
        states = []
        for number in range(3):
            with LatentWorkspace() as ws:
                chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=6)
                graph = chain(
                    LatentNode(chat, prompt="{report}", writes="answer"),
                    LatentNode(chat, prompt=QUESTION, writes="answer", temperature=0),
                ).compile()
                call = {"report": "hi"}
                states.append(await graph.ainvoke(call) if number == 2 else graph.invoke(call))
        set_llm_cache(None)
        report, reply, *_ = states[0]["latent"].messages
        for state in states[1:]:
            assert list(state["latent"].messages[:2]) == [report, reply]
            assert state["answer"] == alone(chat, report["content"], AIMessage(reply["content"]), QUESTION)
    finally:
        set_llm_cache(None)
