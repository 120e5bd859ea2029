"""`LatentChannel` in real graphs. The handles are recipes without a model, so nothing here needs torch."""

import random
from collections.abc import Callable
from typing import Annotated, Any

import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.errors import InvalidUpdateError
from langgraph.graph import END, START, StateGraph
from langgraph.types import Overwrite, Send
from typing_extensions import TypedDict

from langgraph_latent import KVHandle, LatentChannel
from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.tokens import pack_tokens


def handle(name: str) -> KVHandle:
    """A recipe that says its name; no tensors belong to it."""
    messages = [{"role": "user", "content": name}]
    return KVHandle.root("a-model").extend("prompt", name, pack_tokens(list(name.encode())), messages)


class Last(TypedDict, total=False):
    text: str
    latent: Annotated[KVHandle | None, LatentChannel]


class Collect(TypedDict, total=False):
    text: str
    latent: Annotated[list[KVHandle], LatentChannel(policy="collect")]


def writer(value: Any) -> Callable[[Any], dict[str, Any]]:
    return lambda state: {"latent": value}


def fan_in(schema: type, values: dict[str, Any], order: list[str]) -> Any:
    """What a state key holds after nodes wrote `values` in one step, their nodes and edges added in `order`."""
    seen: list[Any] = []
    builder = StateGraph(schema)
    for name in order:
        builder.add_node(name, writer(values[name]))
    builder.add_node("join", lambda state: seen.append(state["latent"]))
    for name in order:
        builder.add_edge(START, name)
    builder.add_edge(order, "join")
    builder.compile().invoke({"text": "go"})
    return seen[0]


@pytest.mark.parametrize(
    ("schema", "expected"), [(Last, handle("c")), (Collect, [handle("a"), handle("b"), handle("c")])]
)
def test_fan_in_order_is_by_node_name_whatever_the_order_of_edges(schema: type, expected: Any) -> None:
    values = {name: handle(name) for name in "abc"}
    for seed in range(10):
        order = list(values)
        random.Random(seed).shuffle(order)
        assert fan_in(schema, values, order) == expected


def test_collect_flattens_lists_and_leaves_out_branches_that_wrote_nothing() -> None:
    values = {"a": [handle("a1"), handle("a2")], "b": None, "c": handle("c")}
    assert fan_in(Collect, values, ["c", "a", "b"]) == [handle("a1"), handle("a2"), handle("c")]


def test_collect_keeps_the_last_step_that_wrote() -> None:
    seen = []
    builder = StateGraph(Collect)
    builder.add_node("a", writer(handle("a")))
    builder.add_node("idle", lambda state: seen.append(state["latent"]))
    builder.add_node("b", writer(handle("b")))
    builder.add_edge(START, "a")
    builder.add_edge("a", "idle")
    builder.add_edge("idle", "b")
    assert builder.compile().invoke({"text": "go"})["latent"] == [handle("b")]
    assert seen == [[handle("a")]]


def test_send_results_are_collected_in_the_order_of_the_sends() -> None:
    builder = StateGraph(Collect)
    builder.add_node("worker", lambda state: {"latent": handle(state["text"])})
    builder.add_conditional_edges(
        START, lambda state: [Send("worker", {"text": str(n)}) for n in range(12)], ["worker"]
    )
    assert builder.compile().invoke({"text": "go"})["latent"] == [handle(str(n)) for n in range(12)]


@pytest.mark.parametrize(("schema", "empty"), [(Last, None), (Collect, [])])
def test_key_that_is_not_written_yet_reads_as_empty_by_plain_indexing(schema: type, empty: Any) -> None:
    seen = []
    builder = StateGraph(schema)
    builder.add_node("plain", lambda state: seen.append(state["latent"]))
    builder.add_edge(START, "plain")
    graph = builder.compile(checkpointer=InMemorySaver())
    graph.invoke({"text": "go"}, {"configurable": {"thread_id": "1"}})
    assert seen == [empty]


@pytest.mark.parametrize(("schema", "empty"), [(Last, None), (Collect, [])])
def test_writing_none_clears_and_the_checkpoint_stays_cleared(schema: type, empty: Any) -> None:
    builder = StateGraph(schema)
    builder.add_node("write", writer(handle("a")))
    builder.add_node("clear", writer(None))
    builder.add_edge(START, "write")
    builder.add_edge("write", "clear")
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke({"text": "go"}, config)["latent"] == empty
    assert not graph.get_state(config).values.get("latent")
    before = next(state for state in graph.get_state_history(config) if state.next == ("clear",))
    assert before.values["latent"] in (handle("a"), [handle("a")])


def test_overwrite_replaces_whatever_else_the_step_wrote() -> None:
    values = {"a": handle("a"), "b": Overwrite([handle("x"), handle("y")]), "c": handle("c")}
    assert fan_in(Collect, values, ["a", "b", "c"]) == [handle("x"), handle("y")]
    assert fan_in(Last, values, ["a", "b", "c"]) == handle("y")
    dict_form = {"a": handle("a"), "b": {"__overwrite__": handle("x")}, "c": handle("c")}
    assert fan_in(Last, dict_form, ["a", "b", "c"]) == handle("x")


def test_two_overwrites_in_one_step_are_refused() -> None:
    values = {"a": Overwrite(handle("a")), "b": Overwrite(handle("b"))}
    with pytest.raises(InvalidUpdateError, match=r"'latent'.*only one Overwrite"):
        fan_in(Last, values, ["a", "b"])


@pytest.mark.parametrize("schema", [Last, Collect])
@pytest.mark.parametrize("wrong", ["kv-0123", 7, [handle("a"), 7], {"latent": 1}, object(), [[["x"]]]])
def test_wrong_write_is_an_invalid_update_that_names_key_and_type(schema: type, wrong: Any) -> None:
    with pytest.raises(InvalidUpdateError, match=r"'latent'.*(takes KVHandle values|not a handle)"):
        fan_in(schema, {"a": wrong}, ["a"])


def test_altered_handle_is_refused_by_the_channel() -> None:
    data = handle("a").to_dict() | {"tokens": handle("b").to_dict()["tokens"]}
    with pytest.raises(InvalidUpdateError, match=r"'latent'.*altered"):
        fan_in(Last, {"a": data}, ["a"])


def test_same_key_in_two_schemas_is_one_channel() -> None:
    class Narrow(TypedDict):
        latent: Annotated[KVHandle | None, LatentChannel]

    class Instance(TypedDict):
        latent: Annotated[KVHandle | None, LatentChannel(policy="last")]

    class Bare(TypedDict):
        latent: KVHandle

    seen = []
    builder = StateGraph(Last, output_schema=Narrow)
    builder.add_node("a", writer(handle("a")))
    for number, schema in enumerate((Narrow, Instance, Bare)):
        builder.add_node(str(number), lambda state: seen.append(state["latent"]), input_schema=schema)
        builder.add_edge("a", str(number))
    builder.add_edge(START, "a")
    assert builder.compile().invoke({"text": "go"}) == {"latent": handle("a")}
    assert seen == [handle("a")] * 3


def test_same_key_with_another_policy_is_refused() -> None:
    builder = StateGraph(Last)
    with pytest.raises(ValueError, match="latent"):
        builder.add_node("b", writer(None), input_schema=Collect)


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="last, collect, merge"):
        LatentChannel(policy="first")  # type: ignore[arg-type]


def test_a_reader_cannot_change_what_others_see() -> None:
    """A node that appends to the list it got changes no other node's list and no checkpoint."""
    builder = StateGraph(Collect)
    builder.add_node("write", writer([handle("a")]))
    builder.add_node("vandal", lambda state: state["latent"].append(handle("b")))
    builder.add_node("after", lambda state: {"text": str(len(state["latent"]))})
    builder.add_edge(START, "write")
    builder.add_edge("write", "vandal")
    builder.add_edge("vandal", "after")
    graph = builder.compile(checkpointer=InMemorySaver())
    config: Any = {"configurable": {"thread_id": "1"}}
    assert graph.invoke({"text": "go"}, config)["text"] == "1"
    assert {len(state.values.get("latent") or ()) for state in graph.get_state_history(config)} == {0, 1}


def test_conditional_edge_sees_the_handle_just_written() -> None:
    builder = StateGraph(Last)
    builder.add_node("a", writer(handle("a")))
    builder.add_edge(START, "a")
    builder.add_conditional_edges("a", lambda state: "b" if state["latent"] == handle("a") else END, ["b", END])
    builder.add_node("b", writer(handle("b")))
    assert builder.compile().invoke({"text": "go"})["latent"] == handle("b")


def test_schema_of_the_graph_can_be_described() -> None:
    """Studio and `get_graph` ask for JSON schemas of inputs and outputs."""
    for schema in (Last, Collect):
        builder = StateGraph(schema)
        builder.add_node("a", writer(handle("a")))
        builder.add_edge(START, "a")
        graph = builder.compile()
        assert "latent" in graph.get_input_jsonschema()["properties"]
        assert "latent" in graph.get_output_jsonschema()["properties"]
