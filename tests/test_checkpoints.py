"""Handles in checkpoints: every saver and serialiser restores them silently; a killed run ends as if undisturbed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, interrupt
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentState, LatentWorkspace
from langgraph_latent.events import Decoded, Prefilled, Produced, Rebuilt

ROOT = Path(__file__).parent.parent
LOOP = ROOT / "examples" / "checkpointed_loop.py"
REPORT = "the team reads the report and hands over what it knows to the team that decides"
QUESTION = "which team decides?"


class State(TypedDict, total=False):
    report: str
    latent: Annotated[KVHandle | None, LatentChannel]
    handles: Annotated[list[KVHandle], LatentChannel(policy="collect")]
    answer: str


def environment(**extra: str) -> dict[str, str]:
    """This process's environment with the package importable, whether it is installed or not."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **extra}


def on_thread(name: str = "1") -> Any:
    return {"configurable": {"thread_id": name}}


# -- savers and serialisers -------------------------------------------------------------------------------------------

ROUND_TRIPS = '''
import asyncio, sys
from typing import Annotated
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict
from langgraph_latent import KVHandle, LatentChannel
from langgraph_latent.handle.tokens import pack_tokens

class State(TypedDict, total=False):
    latent: Annotated[KVHandle | None, LatentChannel]
    handles: Annotated[list[KVHandle], LatentChannel(policy="collect")]
    sent: list[str]

class Swap:
    """A cipher good enough for a test."""
    def encrypt(self, plain): return "swap", bytes(255 - byte for byte in plain)
    def decrypt(self, name, data): return bytes(255 - byte for byte in data)

one, two = (
    KVHandle.root("a-model").extend("prompt", name, pack_tokens(range(9)), [{"role": "user", "content": name}])
    for name in ("one", "two")
)

def worker(state):
    assert isinstance(state["latent"], KVHandle), type(state["latent"])
    return {"sent": [state["latent"].source]}

def graph(saver):
    builder = StateGraph(State)
    builder.add_node("write", lambda state: {"latent": one, "handles": [one, two]})
    builder.add_node("ask", lambda state: {"sent": [interrupt("?")]})
    builder.add_node("worker", worker)
    builder.add_node("last", lambda state: {"handles": [*state["handles"], state["latent"]]})
    builder.add_edge(START, "write")
    builder.add_edge("write", "ask")
    builder.add_conditional_edges("ask", lambda state: [Send("worker", {"latent": state["latent"]})], ["worker"])
    builder.add_edge("worker", "last")
    return builder.compile(checkpointer=saver, interrupt_before=["worker"])

def check(values, *handles):
    assert values["latent"] == one and type(values["latent"]) is KVHandle, values
    assert values["handles"] == list(handles) and {type(h) for h in values["handles"]} == {KVHandle}, values

config = {"configurable": {"thread_id": "1"}}

def sync_trip(saver):
    graph(saver).invoke({}, config)
    check(graph(saver).get_state(config).values, one, two)
    graph(saver).invoke(Command(resume="!"), config)
    check(graph(saver).invoke(None, config), one, two, one)
    for state in graph(saver).get_state_history(config):
        if state.values.get("latent"):
            check(state.values, *state.values["handles"])

async def async_trip(path):
    async with AsyncSqliteSaver.from_conn_string(path) as saver:
        await graph(saver).ainvoke({}, config)
    async with AsyncSqliteSaver.from_conn_string(path) as saver:
        check((await graph(saver).aget_state(config)).values, one, two)
        await graph(saver).ainvoke(Command(resume="!"), config)
        check(await graph(saver).ainvoke(None, config), one, two, one)

folder = sys.argv[1]
sync_trip(InMemorySaver())
sync_trip(InMemorySaver(serde=EncryptedSerializer(Swap(), JsonPlusSerializer())))
with SqliteSaver.from_conn_string(folder + "/sync.sqlite") as saver:
    sync_trip(saver)
asyncio.run(async_trip(folder + "/async.sqlite"))
assert "torch" not in sys.modules
print("all restored")
'''


@pytest.mark.parametrize("strict", ["", "true"])
def test_every_saver_restores_handles_without_a_warning(tmp_path: Path, strict: str) -> None:
    """Field cases 46 and 48: in memory, SQLite sync and async, encrypted; strict msgpack on and off; a `Send` too."""
    result = subprocess.run(
        [sys.executable, "-c", ROUND_TRIPS, str(tmp_path)],
        env=environment(LANGGRAPH_STRICT_MSGPACK=strict),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.stderr == ""
    assert result.stdout == "all restored\n"


@pytest.fixture
def unregistered() -> Any:
    """The serialiser's complaints about types that it was not told of."""
    complaints: list[Any] = []
    stop = register_serde_event_listener(complaints.append)
    yield complaints
    stop()


def read_and_answer(chat: ChatLatent) -> StateGraph:
    builder = StateGraph(State)
    builder.add_node("reader", LatentNode(chat, prompt="{report}", mode="read"))
    builder.add_node("answerer", LatentNode(chat, prompt=QUESTION, writes="answer"))
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "answerer")
    return builder


async def test_handle_in_a_checkpoint_serves_a_new_workspace(
    tiny_folder: Callable[..., Path], tmp_path: Path, unregistered: list[Any]
) -> None:
    """Law 3: as after a restart, with a saver of every kind; the trace shows the rebuild."""
    model = str(tiny_folder("llama"))
    in_memory = InMemorySaver()
    for number in range(2):
        with LatentWorkspace(memory="1GiB") as ws:
            graph = read_and_answer(ChatLatent(model=model, workspace=ws, max_tokens=12))
            with SqliteSaver.from_conn_string(str(tmp_path / "sync.sqlite")) as on_disk:
                for saver in (in_memory, on_disk):
                    compiled = graph.compile(checkpointer=saver, interrupt_before=["answerer"])
                    state = compiled.invoke(None if number else {"report": REPORT}, on_thread())
            async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "async.sqlite")) as saver:
                compiled = graph.compile(checkpointer=saver, interrupt_before=["answerer"])
                last = await compiled.ainvoke(None if number else {"report": REPORT}, on_thread())
            assert last == state
            rebuilt = [event.call_site.node for event in ws.tracer.events if isinstance(event, Rebuilt)]
            assert rebuilt == (["answerer"] if number else [])
            if number:
                prompt = [HumanMessage(REPORT), HumanMessage(QUESTION)]
                assert state["answer"] == ChatLatent(model=model, workspace=ws, max_tokens=12).invoke(prompt).text
    assert unregistered == []


def test_every_message_serialises_and_stays_small_however_long_the_cache(
    tiny_chat: ChatLatent, ws: LatentWorkspace, unregistered: list[Any]
) -> None:
    """Field case 58: what is returned goes through a checkpointer's serialiser and comes back equal."""
    serde = JsonPlusSerializer()
    sizes = []
    for length in (1, 10):
        doc = tiny_chat.read([SystemMessage(REPORT * length)])
        invoked = tiny_chat.invoke([HumanMessage(QUESTION)], inherit=doc)
        chunks = list(tiny_chat.stream([HumanMessage(QUESTION)], inherit=doc))
        for message in (invoked, *chunks):
            kind, data = serde.dumps_typed(message)
            assert serde.loads_typed((kind, data)) == message
            assert len(data) < 1500
            assert len(json.dumps(message.response_metadata)) < 600
        sizes.append(len(serde.dumps_typed(invoked)[1]))
        assert ws.handle(serde.loads_typed(serde.dumps_typed(invoked))) == ws.handle(invoked)
    assert abs(sizes[0] - sizes[1]) < 200
    assert unregistered == []


def test_handle_serialises_to_eight_bytes_a_token_and_two_kilobytes(tiny_chat: ChatLatent) -> None:
    serde = JsonPlusSerializer()
    handle = tiny_chat.read([SystemMessage(REPORT)])
    for _ in range(10):
        handle = tiny_chat.handle(tiny_chat.invoke([HumanMessage(QUESTION)], inherit=handle))
        kind, data = serde.dumps_typed(handle)
        assert len(data) <= 8 * handle.num_tokens + 2048
        assert serde.loads_typed((kind, data)) == handle


def test_checkpoints_grow_with_the_text_and_not_with_the_tensors(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace, tmp_path: Path
) -> None:
    wide = tiny_folder("llama", hidden_size=256, num_key_value_heads=4, num_attention_heads=4)
    chat = ChatLatent(model=str(wide), workspace=ws, max_tokens=8)
    path = tmp_path / "db.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        graph = read_and_answer(chat).compile(checkpointer=saver)
        state = graph.invoke({"report": REPORT * 10}, on_thread())
    assert state["latent"].nbytes > 1_000_000
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 200_000


def test_messages_of_a_restored_thread_name_handles_that_a_new_workspace_need_not_know(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Field case 46: the id in a message is only a name; the channel's handle carries the provenance."""
    model = str(tiny_folder("llama"))
    replies = []
    for number in range(2):
        with (
            LatentWorkspace(memory="1GiB") as ws,
            SqliteSaver.from_conn_string(str(tmp_path / "db.sqlite")) as saver,
        ):
            builder = StateGraph(LatentState)
            chat = ChatLatent(model=model, workspace=ws, max_tokens=12)
            builder.add_node("chat", LatentNode(chat, prompt=lambda state: state["messages"][-1:], writes="messages"))
            builder.add_edge(START, "chat")
            graph = builder.compile(checkpointer=saver)
            state = graph.invoke({"messages": [HumanMessage(f"{number} {QUESTION}")]}, on_thread())
            replies.append(state["messages"][-1])
            assert state["latent"].id == replies[-1].response_metadata["kv_handle"]
            assert len(state["latent"].messages) == 2 * number + 2
    assert [message.id for message in state["messages"] if message.type == "ai"] == [reply.id for reply in replies]


# -- lifetimes --------------------------------------------------------------------------------------------------------


def test_deleting_a_thread_frees_its_tensors_and_nobody_elses(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 53."""
    saver = InMemorySaver()
    graph = read_and_answer(tiny_chat).compile(checkpointer=saver)
    graph.invoke({"report": f"one {REPORT}"}, on_thread("1"))
    alone = ws.size_info().pool
    other = graph.invoke({"report": f"two {REPORT}"}, on_thread("2"))
    saver.delete_thread("1")
    ws.release("1")
    assert ws.pool.has(other["latent"].id)
    assert ws.size_info().pool.used_bytes == pytest.approx(alone.used_bytes, rel=0.3)
    saver.delete_thread("2")
    ws.release("2")
    assert ws.size_info().pool[1:] == (0, 0, 0, 0)
    ws.check_integrity()


def test_a_prefix_that_two_threads_made_goes_with_the_second(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    graph = read_and_answer(tiny_chat).compile(checkpointer=InMemorySaver())
    for name in ("1", "2"):
        handle = graph.invoke({"report": REPORT}, on_thread(name))["latent"]
    ws.release("1")
    assert ws.pool.has(handle.id)
    ws.release("2")
    assert not ws.pool.has(handle.id)


@pytest.mark.parametrize("checkpointer", [None, InMemorySaver()])
def test_a_scope_leaves_no_cache_behind_with_a_checkpointer_or_without(
    tiny_chat: ChatLatent, ws: LatentWorkspace, checkpointer: Any
) -> None:
    graph = read_and_answer(tiny_chat).compile(checkpointer=checkpointer)
    before = tiny_chat.read([SystemMessage("made outside")])
    with ws.scope():
        handle = graph.invoke({"report": REPORT}, on_thread())["latent"]
        assert ws.pool.has(handle.id)
    assert not ws.pool.has(handle.id)
    assert ws.pool.has(before.id)
    assert ws.size_info().pool.num_entries == 1
    tiny_chat.invoke([HumanMessage("and then?")], inherit=handle)


def test_a_pin_outlives_scope_release_and_budget_until_its_time_is_over(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field case 65."""
    with LatentWorkspace(memory="60kB") as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=12)
        graph = read_and_answer(chat).compile(checkpointer=InMemorySaver())
        with ws.scope():
            handle = graph.invoke({"report": "the report"}, on_thread())["latent"]
            assert ws.pin(handle, ttl_s=1000)
        ws.release("1")
        for number in range(4):
            chat.read([HumanMessage(f"{number} {REPORT}")])
        assert ws.pool.has(handle.id)
        assert ws.size_info().pool.num_pinned == 1
        monkeypatch.setattr(ws.pool, "_clock", lambda: time.monotonic() + 1000)
        for number in range(4):
            chat.read([HumanMessage(f"{number} {REPORT}")])
        assert not ws.pool.has(handle.id)
        assert not ws.pin(handle)
        ws.check_integrity()


def test_pin_across_a_pause_saves_the_rebuild(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    builder = StateGraph(State)
    builder.add_node("reader", LatentNode(tiny_chat, prompt="{report}", mode="read"))
    builder.add_node("ask", lambda state: {"answer": interrupt("?")})
    builder.add_node("answerer", LatentNode(tiny_chat, prompt=QUESTION, writes="answer"))
    for source, target in [(START, "reader"), ("reader", "ask"), ("ask", "answerer")]:
        builder.add_edge(source, target)
    graph = builder.compile(checkpointer=InMemorySaver())
    with ws.scope():
        paused = graph.invoke({"report": REPORT}, on_thread())
        ws.pin(paused["latent"], ttl_s=60)
    graph.invoke(Command(resume="!"), on_thread())
    *_, last = [event for event in ws.tracer.events if isinstance(event, Prefilled)]
    assert last.cache_read == paused["latent"].num_tokens


# -- every place in which LangGraph may store a value ------------------------------------------------------------------

PLACES = """
import asyncio, json, sys, warnings
import langgraph_latent
from typing import Any
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send, interrupt
from typing_extensions import TypedDict

sys.path.insert(0, sys.argv[3])
from test_handle import example

DB, HOW = sys.argv[1], sys.argv[2]

class Nested(TypedDict, total=False):
    plain: Any
    inside: Any
    sent: Any
    asked: Any

HANDLE = example()

def is_handle(value):
    from langgraph_latent import KVHandle
    assert KVHandle.given(value) == HANDLE, type(value)

def begin(state):
    return {"plain": HANDLE, "inside": {"a": [HANDLE, {"b": HANDLE}]}}

def worker(payload):
    is_handle(payload["kv"]), is_handle(payload["deep"]["kv"][0])
    answer = interrupt({"kv": HANDLE})
    is_handle(answer["kv"])
    return {"sent": payload["kv"], "asked": answer}

def check(state):
    is_handle(state["plain"]), is_handle(state["inside"]["a"][0]), is_handle(state["inside"]["a"][1]["b"])
    is_handle(state["sent"]), is_handle(state["asked"]["kv"])
    return Command(update={"plain": state["plain"]}, goto=END)

builder = StateGraph(Nested)
builder.add_node("begin", begin), builder.add_node("worker", worker), builder.add_node("check", check)
builder.add_edge(START, "begin"), builder.add_edge("worker", "check")
send = Send("worker", {"kv": HANDLE, "deep": {"kv": [HANDLE]}})
builder.add_conditional_edges("begin", lambda state: [send], ["worker"])
config = {"configurable": {"thread_id": "1"}}

class Swap:
    def encrypt(self, plain): return "swap", bytes(255 - byte for byte in plain)
    def decrypt(self, name, data): return bytes(255 - byte for byte in data)

def serde():
    if "encrypted" in HOW:
        return EncryptedSerializer(Swap(), JsonPlusSerializer())
    return JsonPlusSerializer(allowed_msgpack_modules=[]) if "listed" in HOW else JsonPlusSerializer()

def seen(value):
    (asked,) = value["__interrupt__"]
    is_handle(asked.value["kv"])

def run():
    with SqliteSaver.from_conn_string(DB) as saver:
        saver.serde = serde()
        graph = builder.compile(checkpointer=saver)
        if "resume" in HOW:
            graph.invoke(Command(resume={"kv": HANDLE}), config)
            is_handle(graph.get_state(config).values["plain"])
        else:
            seen(graph.invoke({}, config))

async def arun():
    async with AsyncSqliteSaver.from_conn_string(DB) as saver:
        saver.serde = serde()
        graph = builder.compile(checkpointer=saver)
        if "resume" in HOW:
            await graph.ainvoke(Command(resume={"kv": HANDLE}), config)
            is_handle((await graph.aget_state(config)).values["plain"])
        else:
            seen(await graph.ainvoke({}, config))

import logging
warned = []

class Seen(logging.Handler):
    def emit(self, record):
        warned.append(record.getMessage())

logging.getLogger("langgraph").addHandler(Seen())
asyncio.run(arun()) if "async" in HOW else run()
assert not [line for line in warned if "KVHandle" in line], warned
print("held")
"""


@pytest.mark.parametrize("is_strict", [False, True], ids=["permissive", "strict"])
@pytest.mark.parametrize("how", ["plain", "listed", "encrypted", "async", "async encrypted"])
def test_a_handle_comes_back_from_every_place_in_which_langgraph_stores_it(
    how: str, is_strict: bool, tmp_path: Path
) -> None:
    """Another process resumes, which has made no channel: plain keys, nested ones, Send payloads, interrupts."""
    strict = {"LANGGRAPH_STRICT_MSGPACK": "true"} if is_strict else {}
    for step in ("begin", "resume"):
        command = [sys.executable, "-W", "error::UserWarning", "-c", PLACES, str(tmp_path / "db"), f"{how} {step}"]
        result = subprocess.run(
            [*command, str(ROOT / "tests")], env=environment(**strict), capture_output=True, text=True, timeout=120
        )
        assert result.stdout.strip() == "held", result.stderr
        assert "KVHandle" not in result.stderr


# -- kill -9 ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loop's script as a module."""
    spec = spec_from_file_location(LOOP.stem, LOOP)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, LOOP.stem, module)  # where LangGraph looks up the state's annotations
    spec.loader.exec_module(module)
    return module


def loop(model: Path, db: Path, thread: str, **options: int) -> list[str]:
    named = {"model": model, "db": db, "thread": thread} | options
    return [sys.executable, str(LOOP), *(text for name, value in named.items() for text in (f"--{name}", str(value)))]


KILLED_LOOP = """
import os, runpy, signal, sys
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph_latent.engine.scheduler import RequestSlot

script, moments_left = sys.argv.pop(1), int(sys.argv.pop(1))

def counted(method):
    def call(*args, **kwargs):
        global moments_left
        moments_left -= 1
        if moments_left < 0:
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return method(*args, **kwargs)
    return call

for owner, name in ((RequestSlot, "feed"), (SqliteSaver, "put"), (SqliteSaver, "put_writes")):
    setattr(owner, name, counted(getattr(owner, name)))
runpy.run_path(script, run_name="__main__")
"""
"""The loop; it sends itself SIGKILL when it is about to begin a model call, or a write, for the n-th time."""


def run_and_kill(command: list[str], moment: int) -> list[str]:
    """Run the loop until SIGKILL ends it at its n-th model call or write; what it printed."""
    python, script, *options = command
    killed = [python, "-c", KILLED_LOOP, script, str(moment), *options]
    result = subprocess.run(killed, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == -signal.SIGKILL, result.stderr
    return result.stdout.splitlines()


@pytest.mark.slow
def test_loop_killed_again_and_again_ends_as_if_nothing_had_happened(
    example: Any, tiny_folder: Callable[..., Path], ws: LatentWorkspace, tmp_path: Path
) -> None:
    model, db, rounds = tiny_folder("llama", max_position_embeddings=8192), tmp_path / "db.sqlite", 10
    builder = example.build(ChatLatent(model=str(model), workspace=ws, max_tokens=40), rounds)
    undisturbed = builder.compile().invoke({"round": 0}, {"recursion_limit": 2 * rounds + 1})
    command = loop(model, db, "1", rounds=rounds)
    for moment in (60, 111):
        said = run_and_kill(command, moment)
        assert said[0].startswith("resuming") is (moment > 60)
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("resuming '1' before")
    assert result.stdout.count("rebuilt: ") == 1
    with SqliteSaver.from_conn_string(str(db)) as saver:
        assert builder.compile(checkpointer=saver).get_state(on_thread()).values == undisturbed
    assert undisturbed["round"] == rounds


@pytest.mark.slow
def test_loop_killed_on_the_real_model_is_finished_by_another_process(
    example: Any, smol_chat: ChatLatent, ws: LatentWorkspace, tmp_path: Path
) -> None:
    """The killed process is the loop's own script; this process plays the one that resumes."""
    db = tmp_path / "db.sqlite"
    builder = example.build(smol_chat, rounds=2)
    undisturbed = builder.compile().invoke({"round": 0})
    for handle in {event.handle for event in ws.tracer.events if isinstance(event, Produced)}:
        ws.evict(ws.handle(handle))
    command = loop(Path(smol_chat.model), db, "1", **{"rounds": 2, "max-tokens": smol_chat.max_tokens})
    first, second, _ = (event.num_tokens for event in ws.tracer.events if isinstance(event, Decoded))
    run_and_kill(command, moment=first + second // 2)
    with SqliteSaver.from_conn_string(str(db)) as saver:
        resumed = builder.compile(checkpointer=saver).invoke(None, on_thread())
    assert resumed == undisturbed
    (rebuilt,) = [event for event in ws.tracer.events if isinstance(event, Rebuilt)]
    assert rebuilt.call_site.node == "critic"
