"""What version 0.1 wrote is read and continued: a checkpoint and two exports. Public names keep their address.

That version wrote `fixtures/version_0_1`: a tiny model, a run that was interrupted before node "writer", exports of a
plain and of a merged handle, and what came next.
"""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sqlite3
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import BaseMessage, HumanMessage
from langgraph.checkpoint.serde.event_hooks import register_serde_event_listener
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel
from typing_extensions import TypedDict

import langgraph_latent
from langgraph_latent import (
    ChatLatent,
    EdgePolicy,
    EdgeRouter,
    KVHandle,
    LatentChannel,
    LatentNode,
    LatentState,
    LatentWorkspace,
    Level,
    Repair,
    RouteDecision,
)
from langgraph_latent.handle.segment import Composition
from langgraph_latent.handle.tokens import pack_tokens

SAVED = Path(__file__).parent / "fixtures" / "version_0_1"
EXPECTED: dict[str, Any] = json.loads((SAVED / "expected.json").read_text(encoding="utf-8"))
CONFIG: Any = {"configurable": {"thread_id": "saved"}}


class State(TypedDict, total=False):
    messages: Annotated[list[BaseMessage], add_messages]
    latent: Annotated[KVHandle | None, LatentChannel]
    steps: Annotated[KVHandle | None, LatentChannel]
    merged: Annotated[KVHandle | None, LatentChannel(policy="merge")]
    answer: str
    joined: str


def saved_graph(chat: ChatLatent, saver: SqliteSaver) -> CompiledStateGraph[Any]:
    """The graph whose run was saved."""

    def reading(text: str, **options: Any) -> LatentNode:
        return LatentNode(chat, prompt=[("system", "you read the report"), ("human", text)], mode="read", **options)

    nodes = {
        "reader": reading("the team hands over what it knows"),
        "other": reading("that team decides the answer", latent="merged", inherit=()),
        "third": reading("and it writes to the report", latent="merged", inherit=()),
        "thinker": LatentNode(
            chat, prompt="what does the team know", mode="think", steps=3, latent="steps", inherit="latent"
        ),
        "talker": LatentNode(chat, prompt="that is the answer", writes="messages", inherit="latent"),
        "writer": LatentNode(chat, prompt="which team decides", writes="answer", inherit="latent"),
        "joiner": LatentNode(
            chat, prompt="what is in the report", writes="joined", latent="steps", inherit=("merged",)
        ),
    }
    builder = StateGraph(State)
    for name, node in nodes.items():
        builder.add_node(name, node)
    for name in ("reader", "other", "third"):
        builder.add_edge(START, name)
    for edge in (("reader", "thinker"), ("thinker", "talker"), ("talker", "writer"), ("writer", "joiner")):
        builder.add_edge(*edge)
    return builder.compile(checkpointer=saver, interrupt_before=["writer"])


@pytest.fixture
def chat() -> Iterator[ChatLatent]:
    router = EdgeRouter(default=EdgePolicy(allow=frozenset({Level.EXACT, Level.MOVED, Level.TEXT})))
    with LatentWorkspace(memory="64MiB", router=router) as ws:
        yield ChatLatent(model=str(SAVED / "model"), workspace=ws, max_tokens=8)
        ws.check_integrity()


@pytest.fixture
def complaints() -> Iterator[list[Any]]:
    """What the serialiser says of types that it was not told to be safe."""
    found: list[Any] = []
    stop = register_serde_event_listener(found.append)
    yield found
    stop()


SERIALISERS = {
    "default": JsonPlusSerializer,
    "strict": lambda: JsonPlusSerializer(allowed_msgpack_modules=None),
}


def test_the_models_identity_is_that_of_before(chat: ChatLatent) -> None:
    """Every saved handle names it: another one would make them handles of a stranger."""
    assert chat.spec.identity == EXPECTED["identity"]


@pytest.mark.parametrize("serialiser", SERIALISERS)
def test_a_saved_run_is_continued(
    serialiser: str,
    chat: ChatLatent,
    tmp_path: Path,
    complaints: list[Any],
    caplog: pytest.LogCaptureFixture,
) -> None:
    shutil.copy(SAVED / "checkpoints.db", tmp_path)
    connection = sqlite3.connect(tmp_path / "checkpoints.db", check_same_thread=False)
    graph = saved_graph(chat, SqliteSaver(connection, serde=SERIALISERS[serialiser]()))
    state = graph.get_state(CONFIG)
    assert state.next == ("writer",)
    assert {name: state.values[name].id for name in EXPECTED["ids"]} == EXPECTED["ids"]
    assert {type(state.values[name]) for name in EXPECTED["ids"]} == {KVHandle}
    done = graph.invoke(None, CONFIG)
    assert (done["answer"], done["joined"]) == (EXPECTED["answer"], EXPECTED["joined"])
    again = graph.get_state(CONFIG).values
    assert {name: again[name] for name in ("latent", "steps", "merged")} == {
        name: done[name] for name in ("latent", "steps", "merged")
    }
    connection.close()
    assert complaints == []
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("file", "handle", "answer"), [("export", "latent", "exported"), ("merged", "merged", "exported_merged")]
)
def test_a_saved_export_is_continued(file: str, handle: str, answer: str, chat: ChatLatent) -> None:
    ingested = chat.ingest_kv_cache(SAVED / f"{file}.safetensors")
    assert ingested.id == EXPECTED["ids"][handle]
    assert chat.invoke([HumanMessage("what does it know")], inherit=ingested).text == EXPECTED[answer]


# -- the address of public names -------------------------------------------------------------------------------------


def a_handle() -> KVHandle:
    return KVHandle.root("a-model").extend("prompt", "n", pack_tokens([1, 2]), [{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("name", langgraph_latent.__all__)
def test_a_public_name_has_the_packages_address_wherever_its_file_is(name: str) -> None:
    value = getattr(langgraph_latent, name)
    assert f"{value.__module__}.{value.__qualname__}" == f"langgraph_latent.{name}"
    assert pickle.loads(pickle.dumps(value)) is value


@pytest.mark.parametrize("name", langgraph_latent.__all__)
def test_annotations_of_a_public_name_are_still_resolved(name: str) -> None:
    """They name what their own module imports, which is not what `__module__` says."""
    value = getattr(langgraph_latent, name)
    if name != "ChatLatent":  # of LangChain's base class, some can't be
        assert not any(isinstance(hint, str) for hint in typing.get_type_hints(value).values())
    if is_dataclass(value):
        assert not any(isinstance(field.type, str) for field in value.__dataclass_fields__.values())


def test_a_checkpoint_names_the_package_and_not_the_file(tmp_path: Path, complaints: list[Any]) -> None:
    builder = StateGraph(LatentState)
    builder.add_node("a", lambda state: {"latent": a_handle()})
    builder.add_edge(START, "a")
    with SqliteSaver.from_conn_string(str(tmp_path / "db")) as saver:
        builder.compile(checkpointer=saver).invoke({"messages": []}, CONFIG)
        (data,) = saver.conn.execute(
            "SELECT checkpoint FROM checkpoints ORDER BY checkpoint_id DESC LIMIT 1"
        ).fetchone()
        assert builder.compile(checkpointer=saver).get_state(CONFIG).values["latent"] == a_handle()
    assert b"\xb0langgraph_latent\xa8KVHandle" in data  # msgpack: a text of 16 bytes, and one of 8
    assert b"langgraph_latent.handle" not in data
    assert complaints == []


def test_pydantic_finds_what_the_annotations_of_public_classes_name() -> None:
    class Kept(BaseModel):
        handle: KVHandle | None = None
        repair: Repair | None = None
        decision: RouteDecision | None = None
        composition: Composition | None = None

    class Greeter(ChatLatent):
        greeting: str = "hello"

    assert Kept(handle=a_handle(), repair=Repair(0.5)).handle == a_handle()
    assert set(Kept.model_json_schema()["properties"]) == {"handle", "repair", "decision", "composition"}
    greeter = Greeter(model="no/such-model", max_tokens=3)
    assert (greeter.greeting, greeter.max_tokens, greeter.workspace) == ("hello", 3, None)
    assert copy.deepcopy(ChatLatent(model="no/such-model")).model == "no/such-model"
    assert ChatLatent.get_lc_namespace() == ["langgraph_latent", "chat_model"]


def test_the_hints_of_the_ready_state_are_resolved_and_it_can_be_extended() -> None:
    class Longer(LatentState):
        answer: str

    hints = typing.get_type_hints(Longer, include_extras=True)
    assert list(hints) == ["messages", "latent", "answer"]
    assert hints["latent"] == Annotated[KVHandle | None, LatentChannel]
