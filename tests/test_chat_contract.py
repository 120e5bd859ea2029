"""What a chat model owes LangChain and LangGraph beyond the standard tests: caches, limits, traces, agents."""

from __future__ import annotations

import asyncio
import copy
import operator
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy
import pytest
import torch
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.caches import InMemoryCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, AIMessageChunk, AnyMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command, interrupt
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm
from pydantic import BaseModel, ValidationError
from transformers import MaxLengthCriteria

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentWorkspace
from langgraph_latent.chat_model import CALL_OPTIONS
from langgraph_latent.errors import ConfigError, ModelLoadError, RequestTimeoutError, UnknownHandleError

STORY = "the team that reads the report hands over what it knows to the team that decides. "


class Ticket(BaseModel):
    """Where a report goes."""

    team: Literal["care", "store"]


def route(team: Literal["care", "store"]) -> str:
    """Route a report to a team."""
    return f"routed to {team}"


def summed(chunks: Iterator[Any]) -> AIMessageChunk:
    return reduce(operator.add, chunks)


def cache_read(reply: AIMessage) -> int:
    assert reply.usage_metadata is not None
    return reply.usage_metadata["input_token_details"]["cache_read"]


# -- limits and caches of LangChain's own ---------------------------------------------------------------------------


class CountingLimiter(BaseRateLimiter):
    """Lets everything pass, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.count += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire()


def test_every_request_asks_the_rate_limiter_once(tiny_chat: ChatLatent) -> None:
    limiter = CountingLimiter()
    chat = tiny_chat.model_copy(update={"rate_limiter": limiter})
    chat.invoke(STORY)
    list(chat.stream(STORY))
    asyncio.run(chat.ainvoke(STORY))
    assert limiter.count == 3


@pytest.fixture
def cached(tiny_chat: ChatLatent) -> tuple[ChatLatent, CountingLimiter]:
    """A chat model with a response cache; the limiter counts what was really generated."""
    limiter = CountingLimiter()
    return tiny_chat.model_copy(update={"rate_limiter": limiter, "cache": InMemoryCache()}), limiter


def test_a_hit_of_the_response_cache_generates_nothing_and_its_handle_works(
    cached: tuple[ChatLatent, CountingLimiter], ws: LatentWorkspace
) -> None:
    chat, limiter = cached
    first, again = chat.invoke(STORY), chat.invoke(STORY)
    assert limiter.count == 1
    assert again.text == first.text
    assert ws.handle(again) == ws.handle(first)
    assert chat.invoke("and?", inherit=again).text == chat.invoke("and?", inherit=first, seed=1).text
    with LatentWorkspace() as other:
        moved = ChatLatent(model=chat.model, workspace=other, cache=chat.cache, max_tokens=12)
        with pytest.raises(UnknownHandleError):
            moved.handle(again)


def test_call_options_are_part_of_the_response_caches_key(
    cached: tuple[ChatLatent, CountingLimiter], ws: LatentWorkspace
) -> None:
    chat, limiter = cached
    docs = [chat.read("report one"), chat.read("report two")]
    calls: list[dict[str, Any]] = [
        {},
        {"inherit": docs[0]},
        {"inherit": docs[1]},
        {"inherit": docs},
        {"seed": 1},
        {"seed": 2},
        {"max_tokens": 5},
        {"stop": ["zzz"]},
        {"template_options": {"loud": True}},
        {"response_format": {"type": "text"}},
    ]
    for number, options in enumerate(calls, start=1):
        chat.invoke(STORY, **options)
        chat.invoke(STORY, **options)
        assert limiter.count == number, options
    chat.bind_tools([route]).invoke(STORY)
    chat.bind_tools([route], tool_choice="none").invoke(STORY)
    assert limiter.count == len(calls) + 2


def test_what_transformers_objects_do_is_never_cached(cached: tuple[ChatLatent, CountingLimiter]) -> None:
    """A criterion or processor is known by its address only, which another one may have later."""
    chat, limiter = cached
    same: dict[str, Any] = {"logits_processor": [lambda ids, scores: scores]}
    chat.invoke(STORY, **same)
    chat.invoke(STORY, **same)
    assert limiter.count == 2


def test_a_changed_option_of_the_chat_model_is_another_key(cached: tuple[ChatLatent, CountingLimiter]) -> None:
    chat, limiter = cached
    chat.invoke(STORY)
    other = chat.model_copy(update={"max_tokens": 5})
    chat.max_tokens = 4
    assert chat.invoke(STORY).usage_metadata["output_tokens"] == 4
    assert other.invoke(STORY).usage_metadata["output_tokens"] == 5
    assert limiter.count == 3


def test_tenants_never_share_a_response(tiny_folder: Callable[..., Path]) -> None:
    cache, limiter = InMemoryCache(), CountingLimiter()
    for tenant in ("a", "b", None):
        with LatentWorkspace(tenant=tenant) as ws:
            ChatLatent(
                model=str(tiny_folder("llama")), workspace=ws, cache=cache, rate_limiter=limiter, max_tokens=4
            ).invoke(STORY)
    assert limiter.count == 3


# -- what a reply says about itself ---------------------------------------------------------------------------------

METADATA = {"model_name", "model_provider", "finish_reason", "kv_handle", "kv_route"}


@pytest.mark.parametrize("version", ["v0", "v1"])
def test_a_reply_says_how_it_ended_and_what_it_read(tiny_chat: ChatLatent, version: str) -> None:
    chat = tiny_chat.model_copy(update={"output_version": version})
    stop = tiny_chat.invoke(STORY).text[2:4]
    calling = chat.bind_tools([route], tool_choice="route").bind(max_tokens=120)
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("length", chat, {"max_tokens": 2}),
        ("stop", chat, {"stop": [stop]}),
        ("tool_calls", calling, {}),
    ]
    for reason, model, options in cases:
        invoked, chunks = model.invoke(STORY, **options), list(model.stream(STORY, **options))
        streamed = summed(chunks)
        for reply in (invoked, streamed):
            assert set(reply.response_metadata) >= METADATA
            assert reply.response_metadata["finish_reason"] == reason
            assert reply.response_metadata["model_name"] == chat.model
            assert reply.response_metadata["model_provider"] == "langgraph-latent"
        assert sum(bool(chunk.usage_metadata) for chunk in chunks) == 1
        for count in ("input_tokens", "output_tokens", "total_tokens"):
            assert streamed.usage_metadata[count] == invoked.usage_metadata[count]
        assert streamed.usage_metadata["input_tokens"] > cache_read(streamed) >= cache_read(invoked)
        assert streamed.tool_calls == invoked.tool_calls


def test_blocks_of_version_1_say_the_same_and_can_be_sent_back(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 4: `content` as a list of blocks is history like any other."""
    chat = tiny_chat.model_copy(update={"output_version": "v1"})
    plain = tiny_chat.bind_tools([route], tool_choice="any").invoke(STORY, max_tokens=120)
    calling = chat.bind_tools([route], tool_choice="any").bind(max_tokens=120)
    text = tiny_chat.invoke(STORY).text
    for said, called in (
        (chat.invoke(STORY), calling.invoke(STORY)),
        (summed(chat.stream(STORY)), summed(calling.stream(STORY))),
    ):
        assert isinstance(said.content, list)
        assert said.text == text
        assert [block["type"] for block in called.content_blocks] == ["tool_call"]
        assert called.tool_calls == plain.tool_calls
        for reply, like in ((said, AIMessage(text)), (called, plain)):
            again = chat.invoke([HumanMessage(STORY), reply, HumanMessage("and?")])
            sent = [HumanMessage(STORY), like, HumanMessage("and?")]
            assert ws.handle(again).messages == ws.handle(tiny_chat.invoke(sent)).messages


def test_streaming_can_be_switched_off(tiny_chat: ChatLatent) -> None:
    whole = tiny_chat.model_copy(update={"disable_streaming": True})
    assert len(list(whole.stream(STORY))) == 1
    partly = tiny_chat.model_copy(update={"disable_streaming": "tool_calling"})
    assert len(list(partly.stream(STORY))) > 2
    assert len(list(partly.bind_tools([route]).stream(STORY))) == 1


class Traced(BaseCallbackHandler):
    """Keeps what a tracer gets when a call starts."""

    def __init__(self) -> None:
        self.metadata: dict[str, Any] = {}
        self.options: dict[str, Any] = {}

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.metadata, self.options = kwargs["metadata"], kwargs["options"]


def test_traces_name_the_model_and_its_options(tiny_chat: ChatLatent) -> None:
    traced = Traced()
    tiny_chat.invoke(STORY, {"callbacks": [traced]}, stop=["x"], max_tokens=3, temperature=0.5)
    named = {name: value for name, value in traced.metadata.items() if name.startswith("ls_")}
    assert named.pop("ls_integration")
    assert named == {
        "ls_provider": "langgraph-latent",
        "ls_model_name": tiny_chat.model,
        "ls_model_type": "chat",
        "ls_temperature": 0.5,
        "ls_max_tokens": 3,
        "ls_stop": ["x"],
    }
    own = tiny_chat._get_ls_params()
    assert (own["ls_temperature"], own["ls_max_tokens"]) == (0.0, 12)


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_traces_name_the_schema_of_structured_output(tiny_chat: ChatLatent, method: Any) -> None:
    traced = Traced()
    chat = tiny_chat.model_copy(update={"max_tokens": 60})
    chat.with_structured_output(Ticket, method=method, include_raw=True).invoke(STORY, {"callbacks": [traced]})
    form = traced.options["ls_structured_output_format"]
    assert form["kwargs"]["method"] == method
    assert form["schema"]["title"] == "Ticket"


def test_the_profile_tells_the_models_length_once_it_is_loaded(tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace() as ws:
        folder, short = str(tiny_folder("llama")), str(tiny_folder("llama", max_position_embeddings=64))
        chat = ChatLatent(model=folder, workspace=ws)
        assert chat.profile["tool_calling"]
        assert chat.profile["structured_output"]
        assert "max_input_tokens" not in chat.profile
        assert chat.load().profile["max_input_tokens"] == chat.spec.max_positions == 2048
        other = chat.model_copy(update={"model": short})
        assert other.load().profile["max_input_tokens"] == 64
        assert chat.profile["max_input_tokens"] == 2048
        given = {**chat.profile, "max_input_tokens": 99}
        assert ChatLatent(model=folder, workspace=ws, profile=given).load().profile == given
        assert ChatLatent(model=folder, workspace=ws, profile={}).load().profile == {}
        assert chat.model_copy(update={"profile": given}).load().profile == given


# -- as a value -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_chat_model_survives_serialization_without_its_workspace(tiny_chat: ChatLatent) -> None:
    chat = tiny_chat.model_copy(update={"temperature": 0.7, "stop": ["x"], "template_options": {"a": 1}})
    text = dumps(chat)
    assert "workspace" not in text
    back = loads(text, allowed_objects=[ChatLatent], valid_namespaces=["langgraph_latent"])
    assert back.workspace is None
    assert back.asdict() == chat.asdict()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda chat: chat.model_copy(update={"max_tokens": 12})])
def test_a_copy_works_beside_the_original_and_after_it(tiny_chat: ChatLatent, copied: Callable[..., Any]) -> None:
    expected = tiny_chat.invoke(STORY).text
    other = copied(tiny_chat)
    tiny_chat.close()
    assert other.workspace is tiny_chat.workspace
    for each in (other, copied(tiny_chat)):
        assert each.invoke(STORY).text == expected


WATCHED: list[str] | None = None


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if WATCHED is not None and event in ("open", "os.listdir", "os.scandir", "os.mkdir", "import"):
        WATCHED.append(f"{event} {arguments[:1]}")


@contextmanager
def file_accesses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is opened, listed, imported (an audit hook, which stays) or asked of the file system (patches)."""
    global WATCHED
    sys.addaudithook(_watch)
    seen: list[str] = []
    for name in ("stat", "lstat", "access"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, real=real, **k: (seen.append(str(a[0])), real(*a, **k))[1])
    WATCHED = seen
    try:
        yield seen
    finally:
        WATCHED = None


def test_construction_touches_no_file_and_loads_nothing(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(tiny_folder("llama"))
    ChatLatent(model=folder)
    with file_accesses(monkeypatch) as seen:
        chats = [ChatLatent(model=folder, temperature=0.5, stop=["x"]) for _ in range(1000)]
        assert not seen
        open(__file__).close()
        Path(__file__).exists()
        assert len(seen) >= 2  # it would have been noticed
    assert {chat._lease.workspace for chat in chats} == {None}


# -- options per call -----------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% if loud %}LOUD LOUD LOUD{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HOT = {"temperature": 3.0, "seed": 3}


class Noted:
    """A transformers streamer that counts."""

    def __init__(self) -> None:
        self.count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += 1

    def end(self) -> None:
        self.count += 100


def _greedy_again(chat: ChatLatent, greedy: AIMessage, **options: Any) -> bool:
    return chat.invoke(STORY, **HOT, **options).text == greedy.text


def _streams(chat: ChatLatent) -> bool:
    noted = Noted()
    chat.invoke(STORY, streamer=noted)
    return noted.count == 1 + 12 + 100


def _times_out(chat: ChatLatent) -> bool:
    with pytest.raises(RequestTimeoutError):
        chat.invoke(STORY, timeout=1e-9)
    return True


def _only_one(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.arange(scores.shape[-1]) == 70, 0.0, -torch.inf).expand_as(scores)


def _length(reply: AIMessage) -> int:
    assert reply.usage_metadata is not None
    return reply.usage_metadata["output_tokens"]


def _forced(chat: ChatLatent, **options: Any) -> list[Any]:
    tools = chat.bind_tools([route]).kwargs["tools"]
    return chat.invoke(STORY, max_tokens=120, tools=tools, tool_choice="any", **options).tool_calls


OVERRIDES: dict[str, Callable[[ChatLatent, AIMessage], bool]] = {
    "inherit": lambda chat, greedy: cache_read(chat.invoke("x", inherit=greedy)) > 20,
    "temperature": lambda chat, greedy: chat.invoke(STORY, temperature=3.0, seed=3).text != greedy.text,
    "top_p": lambda chat, greedy: _greedy_again(chat, greedy, top_p=1e-6),
    "top_k": lambda chat, greedy: _greedy_again(chat, greedy, top_k=1),
    "seed": lambda chat, greedy: len({chat.invoke(STORY, temperature=3.0, seed=seed).text for seed in (1, 1, 2)}) == 2,
    "max_tokens": lambda chat, greedy: _length(chat.invoke(STORY, max_tokens=3)) == 3,
    "stop": lambda chat, greedy: chat.invoke(STORY, stop=[greedy.text[1:3]]).text == greedy.text[:1],
    "timeout": lambda chat, greedy: _times_out(chat),
    "template_options": lambda chat, greedy: (
        chat.handle(chat.invoke(STORY, template_options={"loud": True})).num_tokens > chat.handle(greedy).num_tokens + 5
    ),
    "tools": lambda chat, greedy: len(_forced(chat)) == 1,
    "tool_choice": lambda chat, greedy: _forced(chat)[0]["name"] == "route",
    "parallel_tool_calls": lambda chat, greedy: len(_forced(chat, parallel_tool_calls=False)) == 1,
    "response_format": lambda chat, greedy: chat.invoke(STORY, response_format={"type": "json_object"}).text.startswith(
        "{"
    ),
    "logits_processor": lambda chat, greedy: len(set(chat.invoke(STORY, logits_processor=[_only_one]).text)) == 1,
    "stopping_criteria": lambda chat, greedy: (
        _length(chat.invoke(STORY, stopping_criteria=[MaxLengthCriteria(greedy.usage_metadata["input_tokens"] + 4)]))
        == 4
    ),
    "streamer": lambda chat, greedy: _streams(chat),
}


def test_every_call_option_has_a_row() -> None:
    assert set(OVERRIDES) == set(CALL_OPTIONS)


@pytest.mark.parametrize("option", OVERRIDES)
def test_a_call_overrides_it(option: str, tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", template=TEMPLATE)), workspace=ws, max_tokens=12)
    greedy = chat.invoke(STORY)
    assert OVERRIDES[option](chat, greedy)
    assert chat.invoke(STORY).text == greedy.text


# -- in chains and graphs -------------------------------------------------------------------------------------------


def test_it_is_a_runnable_like_any_other(tiny_chat: ChatLatent) -> None:
    expected = tiny_chat.invoke(STORY, max_tokens=5).text
    chain = ChatPromptTemplate.from_messages([("human", "{story}")]) | tiny_chat.bind(max_tokens=5) | StrOutputParser()
    assert chain.invoke({"story": STORY}) == expected
    assert "".join(chain.stream({"story": STORY})) == expected
    assert asyncio.run(chain.abatch([{"story": STORY}] * 3)) == [expected] * 3


def test_retries_and_fallbacks_take_over(tiny_chat: ChatLatent) -> None:
    failures = [True]

    def fail_once(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if failures:
            raise ZeroDivisionError(failures.pop())
        return scores

    expected = tiny_chat.invoke(STORY).text
    retrying = tiny_chat.bind(logits_processor=[fail_once]).with_retry(wait_exponential_jitter=False)
    assert retrying.invoke(STORY).text == expected
    absent = ChatLatent(model="/models/of-no-one", workspace=tiny_chat.workspace)
    with pytest.raises(ModelLoadError):
        absent.invoke(STORY)
    assert absent.with_fallbacks([tiny_chat]).invoke(STORY).text == expected


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


def test_messages_mode_streams_tokens_of_a_node_that_invokes(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 16."""

    def node(state: Talk) -> dict[str, Any]:
        return {"messages": [tiny_chat.invoke(state["messages"])]}

    async def anode(state: Talk) -> dict[str, Any]:
        return {"messages": [await tiny_chat.ainvoke(state["messages"])]}

    def graph(of: Any) -> Any:
        return StateGraph(Talk).add_node("talk", of).add_edge(START, "talk").add_edge("talk", END).compile()

    asked: Any = {"messages": [HumanMessage(STORY)]}
    expected = tiny_chat.invoke(STORY)

    async def collect() -> list[Any]:
        return [pair async for pair in graph(anode).astream(asked, stream_mode="messages")]

    for pairs in (list(graph(node).stream(asked, stream_mode="messages")), asyncio.run(collect())):
        chunks = [chunk for chunk, _ in pairs if isinstance(chunk, AIMessageChunk)]
        assert len(chunks) > 2
        assert {metadata["langgraph_node"] for _, metadata in pairs} == {"talk"}
        whole = summed(iter(chunks))
        assert whole.text == expected.text
        assert whole.usage_metadata["total_tokens"] == expected.usage_metadata["total_tokens"]
        assert ws.handle(whole).tokens == ws.handle(expected).tokens


def test_the_functional_api_calls_it_in_tasks(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    @task
    def read(report: str) -> KVHandle:
        return tiny_chat.read(report)

    @task
    def answer(handle: KVHandle, question: str) -> AIMessage:
        return tiny_chat.invoke(question, inherit=handle)

    @entrypoint(checkpointer=InMemorySaver())
    def flow(report: str) -> list[AIMessage]:
        handle = read(report).result()
        return [future.result() for future in [answer(handle, question) for question in ("one?", "two?")]]

    replies = flow.invoke(STORY, {"configurable": {"thread_id": "t"}})
    doc = tiny_chat.read(STORY)
    for reply, question in zip(replies, ("one?", "two?"), strict=True):
        assert cache_read(reply) >= doc.num_tokens
        assert reply.text == tiny_chat.invoke(question, inherit=doc).text


@pytest.mark.filterwarnings("ignore:create_react_agent has been moved")  # langgraph-supervisor calls it
def test_agents_supervisors_and_swarms_run_through(tiny_chat: ChatLatent) -> None:
    chat = tiny_chat.model_copy(update={"max_tokens": 4})
    asked: Any = {"messages": [HumanMessage(STORY)]}
    agents = [create_agent(chat, [route], name=name, system_prompt=f"You are {name}.") for name in ("care", "store")]
    supervisor = create_supervisor(agents, model=chat, prompt="You supervise.").compile()
    handoff = create_agent(chat, [create_handoff_tool(agent_name="store")], name="care")
    swarm = create_swarm([handoff, agents[1]], default_active_agent="care").compile(checkpointer=InMemorySaver())
    for graph in (agents[0], supervisor, swarm):
        config: Any = {"recursion_limit": 12, "configurable": {"thread_id": "t"}}
        last = graph.invoke(asked, config)["messages"][-1]
        assert isinstance(last, AIMessage)
        assert last.response_metadata["finish_reason"] in ("stop", "length")
        assert asyncio.run(graph.ainvoke(asked, config))["messages"]


@pytest.mark.parametrize("strategy", [ToolStrategy, ProviderStrategy])
def test_an_agent_answers_in_a_schema(tool_chat: ChatLatent, strategy: Any) -> None:
    agent = create_agent(tool_chat, response_format=strategy(Ticket), system_prompt="You route reports.")
    asked: Any = {"messages": [HumanMessage("The cold store in hall 3 lost power. Which team, care or store?")]}
    state = agent.invoke(asked, {"recursion_limit": 8})
    assert isinstance(state["structured_response"], Ticket)


class Paused(TypedDict, total=False):
    latent: Annotated[KVHandle | None, LatentChannel]
    question: str
    answer: str


@pytest.mark.parametrize("expiry", ["nothing", "evicted", "cleared", "other process"])
def test_a_handle_that_expires_during_an_interrupt_gives_the_same_answer(
    tiny_folder: Callable[..., Path], expiry: str
) -> None:
    """Field case 51."""
    folder, saver, config = str(tiny_folder("llama")), InMemorySaver(), {"configurable": {"thread_id": "t"}}

    def graph(ws: LatentWorkspace) -> Any:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=12)

        def read(state: Paused) -> dict[str, Any]:
            return {"latent": chat.read(STORY)}

        def ask(state: Paused) -> dict[str, Any]:
            reply = chat.invoke(interrupt("what?"), inherit=state["latent"])
            return {"answer": reply.text, "latent": chat.handle(reply)}

        builder = StateGraph(Paused).add_node("read", read).add_node("ask", ask)
        return builder.add_edge(START, "read").add_edge("read", "ask").compile(checkpointer=saver)

    with LatentWorkspace() as ws, LatentWorkspace() as other:
        assert "__interrupt__" in graph(ws).invoke({"question": "?"}, config)
        handle = graph(ws).get_state(config).values["latent"]
        if expiry == "evicted":
            ws.evict(handle)
        elif expiry != "nothing":
            ws.pool.clear()
        resumed = graph(other if expiry == "other process" else ws).invoke(Command(resume="and then?"), config)
        assert ws.pool.has(handle.id) == (expiry == "nothing")
        with LatentWorkspace() as fresh:
            chat = ChatLatent(model=folder, workspace=fresh, max_tokens=12, reuse=False)
            expected = chat.invoke([HumanMessage(STORY), HumanMessage("and then?")])
        assert resumed["answer"] == expected.text


ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024, "rope_theta": 1e4},
    "llama3": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
        "rope_theta": 1e4,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_with_scaled_positions_only_a_prefix_is_reused(
    kind: str, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 61: the second handle's cache is not moved to other positions; its messages are read again."""
    chat = ChatLatent(model=str(tiny_folder("llama", rope_parameters=ROPES[kind])), workspace=ws, max_tokens=12)
    one, two = chat.read("report one: " + STORY), chat.read("report two: " + STORY)
    joined = chat.invoke("compare", inherit=[one, two])
    assert joined.response_metadata["kv_route"]["code"] == "not_first"
    assert cache_read(joined) == one.num_tokens
    with LatentWorkspace() as empty:
        alone = ChatLatent(model=chat.model, workspace=empty, max_tokens=12, reuse=False)
        sent = [HumanMessage("report one: " + STORY), HumanMessage("report two: " + STORY), HumanMessage("compare")]
        assert joined.text == alone.invoke(sent).text


@pytest.mark.parametrize("by", ["messages", "handle"])
def test_two_agents_that_alternate_keep_both_histories_cached(
    by: str, tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    """Field case 62: each turn reuses all of its own agent's history."""
    systems = {name: SystemMessage(f"You {name}. {STORY}") for name in ("plan", "review")}
    histories: dict[str, list[AnyMessage]] = {name: [system] for name, system in systems.items()}
    replies: dict[str, AIMessage] = {}
    for turn in range(4):
        for name, history in histories.items():
            question = HumanMessage(f"turn {turn} of {name}")
            if by == "handle" and turn:
                reply = tiny_chat.invoke([question], inherit=replies[name])
                covered = replies[name].usage_metadata["total_tokens"] - 1  # the last sampled token is not in the cache
            else:
                reply = tiny_chat.invoke([*history, question])
                covered = replies[name].usage_metadata["input_tokens"] if turn else 0
            assert cache_read(reply) >= covered, turn
            replies[name] = reply
            history += [question, reply]


# -- numbers of another type -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "means"),
    [
        ("temperature", 1, 1.0),
        ("temperature", numpy.float32(0.5), 0.5),
        ("temperature", "0.5", 0.5),
        ("top_p", 1, 1.0),
        ("top_k", 3.0, 3),
        ("max_tokens", 4.0, 4),
        ("max_tokens", numpy.int64(4), 4),
        ("max_tokens", "4", 4),
        ("seed", 7.0, 7),
        ("seed", numpy.int32(7), 7),
        ("timeout", 60, 60),
        ("timeout", "60", 60),
    ],
)
def test_a_number_of_another_type_means_the_same_wherever_an_option_is_given(
    name: str, value: Any, means: Any, tiny_chat: ChatLatent
) -> None:
    sampled: dict[str, Any] = {"temperature": 0.7, "seed": 1, "max_tokens": 6}
    expected = tiny_chat.invoke("the team", **{**sampled, name: means}).text
    assert tiny_chat.invoke("the team", **{**sampled, name: value}).text == expected
    assert tiny_chat.bind(**{**sampled, name: value}).invoke("the team").text == expected
    made = ChatLatent(model=tiny_chat.model, workspace=tiny_chat.workspace, **{**sampled, name: value})
    assert made.invoke("the team").text == expected
    node = LatentNode(tiny_chat, prompt="the team", writes="answer", **{**sampled, name: value})
    assert node.invoke({})["answer"] == expected


@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "max_tokens", "seed", "timeout"])
@pytest.mark.parametrize("value", [True, "many", [1], float("nan")])
def test_what_is_no_number_is_refused_wherever_an_option_is_given(name: str, value: Any, tiny_chat: ChatLatent) -> None:
    for give in (
        lambda: tiny_chat.invoke("the team", **{name: value}),
        lambda: tiny_chat.bind(**{name: value}).invoke("the team"),
        lambda: LatentNode(tiny_chat, prompt="the team", **{name: value}),
        lambda: ChatLatent(model=tiny_chat.model, workspace=tiny_chat.workspace, **{name: value}),
    ):
        with pytest.raises((ConfigError, ValidationError)):
            give()
