"""LangGraph's own features over latent edges: fan-out, Send, subgraphs, interrupts, retries, caches, time travel."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from langchain_core.messages import BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langchain_core.runnables import RunnableConfig
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from langgraph.types import CachePolicy, Command, RetryPolicy, Send, default_cache_key, interrupt
from transformers import AutoModelForCausalLM
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentWorkspace
from langgraph_latent.errors import CacheBudgetError, ContextLengthError
from langgraph_latent.events import Delivered, Event, Evicted, Prefilled, Produced, Rebuilt, Routed

REPORT = "the team reads the report and hands over what it knows to the team that decides"
QUESTIONS = {"a": "who reads?", "b": "what is handed over?", "c": "who decides?"}


class State(TypedDict, total=False):
    report: str
    question: str
    latent: Annotated[KVHandle | None, LatentChannel]
    findings: Annotated[list[KVHandle], LatentChannel(policy="collect")]
    answer: str


def alone(chat: ChatLatent, *messages: BaseMessage | str) -> str:
    """The answer of a workspace that has seen nothing else; strings are human messages."""
    prompt = [HumanMessage(message) if isinstance(message, str) else message for message in messages]
    with LatentWorkspace(memory="1GiB") as fresh:
        return ChatLatent(model=chat.model, workspace=fresh, max_tokens=chat.max_tokens).invoke(prompt).text


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


def events(ws: LatentWorkspace, kind: type[Event], node: str | None = None) -> list[Any]:
    """The events of one kind, in one node or in all."""
    return [e for e in ws.tracer.events if isinstance(e, kind) and (node is None or e.call_site.node == node)]


def reader(chat: ChatLatent) -> LatentNode:
    return LatentNode(chat, prompt="{report}", mode="read")


def answerer(chat: ChatLatent, question: str = "{question}", **options: Any) -> LatentNode:
    return LatentNode(chat, prompt=question, **{"writes": "answer", **options})


def sequence(**nodes: Any) -> StateGraph:
    """Nodes in a row, in the order given."""
    builder = StateGraph(State)
    for name, node in nodes.items():
        builder.add_node(name, node)
    for source, target in zip((START, *nodes), nodes, strict=False):
        builder.add_edge(source, target)
    return builder


def on_thread(name: str = "1") -> Any:
    return {"configurable": {"thread_id": name}}


# -- fan-out and fan-in ---------------------------------------------------------------------------------------------


def branches(
    chat: ChatLatent, join: Any, *, order: tuple[str, ...] = ("a", "b", "c"), **join_options: Any
) -> StateGraph:
    builder = sequence(reader=reader(chat))
    for name in order:
        builder.add_node(name, answerer(chat, QUESTIONS[name], latent="findings", inherit="latent", writes=None))
        builder.add_edge("reader", name)
    builder.add_node("join", join)
    builder.add_edge(list(order), "join")
    return builder


def test_fan_out_of_three_on_one_model_ends_and_every_branch_answers_as_if_alone(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    """Field case 55: branches of one superstep run in threads; one model serves them one after another."""
    graph = branches(tiny_chat, lambda state: None).compile()
    expected = [alone(tiny_chat, REPORT, question) for question in QUESTIONS.values()]
    for _ in range(5):
        findings = graph.invoke({"report": REPORT})["findings"]
        assert [handle.messages[-1]["content"] for handle in findings] == expected
        assert [handle.source for handle in findings] == list(QUESTIONS)
    read = events(ws, Prefilled, "reader")[0].num_tokens
    assert {event.cache_read >= read for name in QUESTIONS for event in events(ws, Prefilled, name)} == {True}


def test_join_inherits_several_handles_in_the_same_order_whatever_the_order_of_edges(tiny_chat: ChatLatent) -> None:
    answers = set()
    for order in [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")]:
        join = answerer(tiny_chat, "and so?", inherit="findings")
        state = branches(tiny_chat, join, order=order).compile().invoke({"report": REPORT})
        answers.add((state["answer"], state["latent"].id))
    assert len(answers) == 1


def test_join_of_several_handles_answers_as_to_their_messages_told_once(
    smol_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=smol_chat.model, workspace=ws, max_tokens=6)
    state = branches(chat, answerer(chat, "Sum up.", inherit="findings")).compile().invoke({"report": REPORT})
    rendered = state["latent"].messages
    assert [message["content"] for message in rendered if message["role"] == "user"] == [
        REPORT,
        *QUESTIONS.values(),
        "Sum up.",
    ]
    codes = [event.code for event in events(ws, Routed, "join")]
    assert codes == ["same_model", "not_first", "not_first"]
    assert state["answer"] == alone(chat, *convert_to_messages(list(rendered[:-1])))


def test_send_maps_over_one_handle_with_a_checkpointer_and_collects_in_order(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    builder = sequence(reader=reader(tiny_chat))
    builder.add_node("worker", answerer(tiny_chat, inherit="latent", latent="findings", writes=None))
    builder.add_conditional_edges(
        "reader",
        lambda state: [
            Send("worker", {"latent": state["latent"], "question": question}) for question in QUESTIONS.values()
        ],
        ["worker"],
    )
    builder.add_node("join", lambda state: {"answer": str(len(state["findings"]))})
    builder.add_edge("worker", "join")
    graph = builder.compile(checkpointer=InMemorySaver())
    state = graph.invoke({"report": REPORT}, on_thread())
    expected = [alone(tiny_chat, REPORT, question) for question in QUESTIONS.values()]
    assert [handle.messages[-1]["content"] for handle in state["findings"]] == expected
    assert state["answer"] == "3"
    read = events(ws, Prefilled, "reader")[0].num_tokens
    assert all(event.cache_read >= read for event in events(ws, Prefilled, "worker"))


def test_deferred_join_sees_the_handles_of_short_and_long_branches(tiny_chat: ChatLatent) -> None:
    class Branches(State, total=False):
        short: Annotated[KVHandle | None, LatentChannel]
        long: Annotated[KVHandle | None, LatentChannel]

    builder = StateGraph(Branches)
    builder.add_node("reader", reader(tiny_chat))
    builder.add_node("short", answerer(tiny_chat, "who?", latent="short", inherit="latent", writes=None))
    builder.add_node("long_1", answerer(tiny_chat, "what?", latent="long", inherit="latent", writes=None))
    builder.add_node("long_2", answerer(tiny_chat, "why?", latent="long", inherit="long", writes=None))
    builder.add_node("join", answerer(tiny_chat, "and so?", inherit=["short", "long"]), defer=True)
    builder.add_edge(START, "reader")
    for source, target in [("reader", "short"), ("reader", "long_1"), ("long_1", "long_2")]:
        builder.add_edge(source, target)
    builder.add_edge("short", "join")
    builder.add_edge("long_2", "join")
    rendered = builder.compile().invoke({"report": REPORT})["latent"].messages
    asked = [message["content"] for message in rendered if message["role"] == "user"]
    assert asked == [REPORT, "who?", "what?", "why?", "and so?"]


def test_failed_sibling_costs_no_branch_its_answer_on_resume(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    failures = [ConnectionError("lost")]

    def shaky(state: State) -> None:
        if failures:
            raise failures.pop()

    builder = branches(tiny_chat, answerer(tiny_chat, "and so?", inherit="findings"))
    builder.add_node("shaky", shaky)
    builder.add_edge("reader", "shaky")
    graph = builder.compile(checkpointer=InMemorySaver())
    with pytest.raises(ConnectionError):
        graph.invoke({"report": REPORT}, on_thread())
    state = graph.invoke(None, on_thread())
    assert [handle.source for handle in state["findings"]] == list(QUESTIONS)
    assert [h.messages[-1]["content"] for h in state["findings"]] == [
        alone(tiny_chat, REPORT, q) for q in QUESTIONS.values()
    ]
    assert len(events(ws, Prefilled, "reader")) == 1


# -- subgraphs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpointer", [None, True])
def test_subgraph_continues_the_parents_handle_and_hands_its_own_back(
    tiny_chat: ChatLatent, ws: LatentWorkspace, checkpointer: Any
) -> None:
    inner = sequence(think=answerer(tiny_chat, "who reads?")).compile(checkpointer=checkpointer)
    graph = sequence(reader=reader(tiny_chat), inner=inner, last=answerer(tiny_chat, "and so?")).compile(
        checkpointer=InMemorySaver()
    )
    state = graph.invoke({"report": REPORT}, on_thread())
    assert [segment.source for segment in state["latent"].segments] == ["reader", "think", "think", "last", "last"]
    assert_greedy(tiny_chat, state["latent"])
    (routed,) = events(ws, Routed, "think")
    assert (routed.source, routed.route) == ("reader", "cache")


def test_subgraph_that_leaves_the_handle_alone_leaves_it_in_the_parent(tiny_chat: ChatLatent) -> None:
    inner = sequence(idle=lambda state: {"answer": "idle"}).compile()
    state = sequence(idle_first=inner, reader=reader(tiny_chat), inner=inner).compile().invoke({"report": REPORT})
    assert state["answer"] == "idle"
    assert state["latent"].source == "reader"


def test_subgraph_with_an_interrupt_resumes_over_evicted_tensors(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    inner = sequence(
        ask=lambda state: {"question": interrupt("what do you want to know?")}, reply=answerer(tiny_chat)
    ).compile()
    graph = sequence(reader=reader(tiny_chat), inner=inner).compile(checkpointer=InMemorySaver())
    paused = graph.invoke({"report": REPORT}, on_thread())
    ws.evict(paused["latent"])
    assert graph.invoke(Command(resume="who reads?"), on_thread())["answer"] == alone(tiny_chat, REPORT, "who reads?")


# -- interrupts, retries, caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("evicted", [False, True])
def test_handle_made_before_an_interrupt_serves_after_it(
    tiny_chat: ChatLatent, ws: LatentWorkspace, evicted: bool
) -> None:
    """Field case 51: tensors may be gone between pause and resume; the answer is the same and the trace says why."""
    graph = sequence(
        reader=reader(tiny_chat), ask=lambda state: {"question": interrupt("?")}, answerer=answerer(tiny_chat)
    ).compile(checkpointer=InMemorySaver())
    paused = graph.invoke({"report": REPORT}, on_thread())
    assert paused["__interrupt__"]
    if evicted:
        ws.evict(paused["latent"])
    state = graph.invoke(Command(resume="who decides?"), on_thread())
    assert state["answer"] == alone(tiny_chat, REPORT, "who decides?")
    rebuilt = events(ws, Rebuilt, "answerer")
    assert [event.num_tokens for event in rebuilt] == ([paused["latent"].num_tokens] if evicted else [])
    (delivered,) = events(ws, Delivered, "answerer")
    assert delivered.cache_read == (0 if evicted else paused["latent"].num_tokens)


def test_node_that_reads_before_its_interrupt_reads_once(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """LangGraph runs the node again from its top on resume; what it had read is still there."""

    def node(state: State) -> State:
        doc = tiny_chat.read([HumanMessage(state["report"])])
        reply = tiny_chat.invoke([HumanMessage(interrupt("?"))], inherit=doc)
        return {"latent": tiny_chat.handle(reply), "answer": reply.text}

    graph = sequence(node=node).compile(checkpointer=InMemorySaver())
    graph.invoke({"report": REPORT}, on_thread())
    assert graph.invoke(Command(resume="who reads?"), on_thread())["answer"] == alone(tiny_chat, REPORT, "who reads?")
    first, again, _ = [event.num_tokens for event in events(ws, Prefilled, "node")]
    assert first > 0
    assert again == 0
    read, same = events(ws, Produced, "node")[:2]
    assert read.handle == same.handle


def test_node_that_fails_after_reading_reads_nothing_again_on_retry(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    failures = [ConnectionError("lost"), ConnectionError("lost again")]

    def node(state: State) -> State:
        reply = tiny_chat.invoke([HumanMessage(state["question"])], inherit=state["latent"])
        if failures:
            raise failures.pop()
        return {"latent": tiny_chat.handle(reply), "answer": reply.text}

    builder = sequence(reader=reader(tiny_chat))
    builder.add_node("node", node, retry_policy=RetryPolicy(initial_interval=0, jitter=False, max_attempts=3))
    builder.add_edge("reader", "node")
    state = builder.compile().invoke({"report": REPORT, "question": "who reads?"})
    assert state["answer"] == alone(tiny_chat, REPORT, "who reads?")
    first, second, third = events(ws, Prefilled, "node")
    assert first.num_tokens > second.num_tokens == third.num_tokens == 1
    assert len({event.handle for event in events(ws, Produced, "node")}) == 1


def test_cached_node_gives_an_old_handle_that_still_works(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    builder = StateGraph(State)
    builder.add_node("reader", reader(tiny_chat), cache_policy=CachePolicy())
    builder.add_node("answerer", answerer(tiny_chat))
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "answerer")
    graph = builder.compile(cache=InMemoryCache())
    question = {"report": REPORT, "question": "who reads?"}
    first = graph.invoke(question)
    for handle in (ws.handle(event.handle) for event in events(ws, Produced)):
        ws.evict(handle)
    updates = list(graph.stream(question, stream_mode="updates"))
    assert updates[0]["__metadata__"] == {"cached": True}
    assert updates[1]["answerer"]["answer"] == first["answer"] == alone(tiny_chat, REPORT, "who reads?")
    assert len(events(ws, Prefilled, "reader")) == 1
    assert len(events(ws, Rebuilt, "answerer")) == 1


def test_nodes_that_inherit_can_be_cached_and_equal_handles_hit(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    builder = StateGraph(State)
    builder.add_node("reader", reader(tiny_chat))
    builder.add_node("answerer", answerer(tiny_chat), cache_policy=CachePolicy())
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "answerer")
    graph = builder.compile(cache=InMemoryCache())
    question = {"report": REPORT, "question": "who reads?"}
    first = graph.invoke(question)
    assert list(graph.stream(question, stream_mode="updates"))[1]["__metadata__"] == {"cached": True}
    assert graph.invoke(question)["latent"] == first["latent"]


def test_a_restored_handle_has_the_cache_key_of_the_original(tiny_chat: ChatLatent) -> None:
    handle = tiny_chat.read([SystemMessage("the team"), HumanMessage(REPORT)])
    restored = KVHandle.from_dict(handle.to_dict())
    assert default_cache_key({"latent": handle}) == default_cache_key({"latent": restored})
    assert hash(handle) == hash(restored)


# -- time travel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evicted", [False, True])
def test_fork_takes_another_way_and_the_old_branch_stays(
    tiny_chat: ChatLatent, ws: LatentWorkspace, evicted: bool
) -> None:
    """Field case 50: a fork writes nothing into the branch it left."""
    graph = sequence(reader=reader(tiny_chat), answerer=answerer(tiny_chat)).compile(checkpointer=InMemorySaver())
    old = graph.invoke({"report": REPORT, "question": "who reads?"}, on_thread())
    old_end = graph.get_state(on_thread())
    before = next(state for state in graph.get_state_history(on_thread()) if state.next == ("answerer",))
    if evicted:
        ws.evict(before.values["latent"])
        ws.evict(old["latent"])

    forked = graph.update_state(before.config, {"question": "who decides?"})
    new = graph.invoke(None, forked)
    assert new["answer"] == alone(tiny_chat, REPORT, "who decides?")
    assert graph.get_state(on_thread()).values["latent"] == new["latent"]

    assert graph.get_state(old_end.config).values == old_end.values == old
    assert graph.get_state(before.config).values["latent"] == before.values["latent"]
    assert_greedy(tiny_chat, old["latent"])
    reply = tiny_chat.invoke([HumanMessage("and then?")], inherit=old["latent"])
    assert_greedy(tiny_chat, ws.handle(reply))


def test_replay_of_an_old_checkpoint_gives_the_old_answer(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    graph = sequence(reader=reader(tiny_chat), answerer=answerer(tiny_chat)).compile(checkpointer=InMemorySaver())
    first = graph.invoke({"report": REPORT, "question": "who reads?"}, on_thread())
    before = next(state for state in graph.get_state_history(on_thread()) if state.next == ("answerer",))
    graph.invoke({"report": "another report", "question": "who?"}, on_thread())
    for handle in (ws.handle(event.handle) for event in events(ws, Produced)):
        ws.evict(handle)
    assert graph.invoke(None, before.config) == first


def test_update_state_may_write_clear_and_swap_handles(tiny_chat: ChatLatent) -> None:
    graph = sequence(reader=reader(tiny_chat), answerer=answerer(tiny_chat)).compile(
        checkpointer=InMemorySaver(), interrupt_before=["answerer"]
    )
    graph.invoke({"report": REPORT, "question": "who?"}, on_thread())
    other = tiny_chat.read([HumanMessage("another report")])
    graph.update_state(on_thread(), {"latent": other})
    assert graph.invoke(None, on_thread())["answer"] == alone(tiny_chat, "another report", "who?")
    graph.invoke({"report": REPORT, "question": "who?"}, on_thread("2"))
    graph.update_state(on_thread("2"), {"latent": None})
    assert graph.invoke(None, on_thread("2"))["answer"] == alone(tiny_chat, "who?")


# -- configuration ----------------------------------------------------------------------------------------------------


class Context(TypedDict):
    workspace: LatentWorkspace


def test_workspace_and_handle_may_travel_in_configurable_and_context(
    tiny_chat: ChatLatent, ws: LatentWorkspace, tmp_path: Path
) -> None:
    """Field case 56: neither is written into a checkpoint, and neither makes one fail."""
    builder = StateGraph(State, context_schema=Context)
    builder.add_node("reader", reader(tiny_chat))
    builder.add_node("answerer", answerer(tiny_chat))
    builder.add_edge(START, "reader")
    builder.add_edge("reader", "answerer")
    handle = tiny_chat.read([HumanMessage("the team")])
    config = {"configurable": {"thread_id": "1", "workspace": ws, "chat": tiny_chat, "handle": handle}}
    question = {"report": REPORT, "question": "who?"}
    with SqliteSaver.from_conn_string(str(tmp_path / "db.sqlite")) as saver:
        for checkpointer in (InMemorySaver(), saver):
            graph = builder.compile(checkpointer=checkpointer)
            state = graph.invoke(question, config, context={"workspace": ws})
            assert state["answer"] == alone(tiny_chat, REPORT, "who?")
            assert graph.get_state(on_thread()).values == state


# -- two models -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "fields"),
    [("qwen3", {}, ["weights", "architecture"]), ("llama", {"seed": 1}, ["weights"])],
)
def test_edge_between_two_models_takes_text_with_the_differing_fields_as_reason(
    tiny_folder: Callable[..., Path],
    tiny_chat: ChatLatent,
    ws: LatentWorkspace,
    kind: str,
    options: dict[str, Any],
    fields: list[str],
) -> None:
    other = ChatLatent(model=str(tiny_folder(kind, **options)), workspace=ws, max_tokens=12)
    graph = sequence(reader=reader(tiny_chat), other=answerer(other), back=answerer(tiny_chat, "and so?")).compile()
    steps = list(graph.stream({"report": REPORT, "question": "who reads?"}, stream_mode="updates"))
    assert steps[1]["other"]["answer"] == alone(other, REPORT, "who reads?")
    (routed,) = events(ws, Routed, "other")
    assert (routed.route, routed.level, routed.code) == ("text", 4, "other_model")
    for name in fields:
        assert any(name in difference for difference in routed.differences)
        assert name in routed.reason
    assert not events(ws, Delivered, "other")
    (routed_back,) = events(ws, Routed, "back")
    assert (routed_back.source, routed_back.route) == ("other", "text")
    assert_greedy(tiny_chat, steps[2]["back"]["latent"])


def test_fan_in_over_two_models_reaches_one_receiver(
    tiny_folder: Callable[..., Path], tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    other = ChatLatent(model=str(tiny_folder("qwen3")), workspace=ws, max_tokens=12)
    builder = StateGraph(State)
    for name, chat in (("a", tiny_chat), ("b", other)):
        builder.add_node(name, LatentNode(chat, prompt=f"{name}: {{report}}", mode="read", latent="findings"))
        builder.add_edge(START, name)
    builder.add_node("join", answerer(tiny_chat, "and so?", inherit="findings"))
    builder.add_edge(["a", "b"], "join")
    state = builder.compile().invoke({"report": REPORT})
    assert state["answer"] == alone(tiny_chat, f"a: {REPORT}", f"b: {REPORT}", "and so?")
    assert [(event.source, event.route) for event in events(ws, Routed, "join")] == [("a", "cache"), ("b", "text")]


# -- budgets and lifetimes --------------------------------------------------------------------------------------------


def test_two_agents_that_take_turns_both_stay_cached(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 62: a second agent does not push the first one out."""

    class Two(TypedDict, total=False):
        main: Annotated[KVHandle | None, LatentChannel]
        helper: Annotated[KVHandle | None, LatentChannel]
        turns: int

    builder = StateGraph(Two)

    def prompt_of(name: str) -> Callable[[Any], list[BaseMessage]]:
        first = [SystemMessage(f"you are the {name} agent. {REPORT}")]
        return lambda state: [*([] if state[name] else first), HumanMessage("go on")]

    for name in ("main", "helper"):
        builder.add_node(name, LatentNode(tiny_chat, prompt=prompt_of(name), latent=name))
    builder.add_node("count", lambda state: {"turns": state["turns"] + 1})
    builder.add_edge(START, "main")
    builder.add_edge("main", "helper")
    builder.add_edge("helper", "count")
    builder.add_conditional_edges("count", lambda state: "main" if state["turns"] < 6 else END, ["main", END])
    state = builder.compile().invoke({"turns": 0}, {"recursion_limit": 30})
    for name in ("main", "helper"):
        first, *later = events(ws, Prefilled, name)
        assert first.num_tokens > 40
        assert all(event.num_tokens < first.num_tokens < event.cache_read for event in later)
        assert len({event.num_tokens for event in later}) == 1
        assert_greedy(tiny_chat, state[name])
    assert not events(ws, Rebuilt)


def test_a_chain_that_outgrows_budget_or_context_ends_in_a_typed_error_and_can_go_on(
    tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Field case 69: a growing chain meets a limit; the error says so and the checkpoint before it is good."""
    for memory, options, error in [
        ("100kB", {}, CacheBudgetError),
        ("1GiB", {"max_position_embeddings": 256}, ContextLengthError),
    ]:
        with LatentWorkspace(memory=memory) as small:
            chat = ChatLatent(model=str(tiny_folder("llama", **options)), workspace=small, max_tokens=12)
            builder = sequence(grow=answerer(chat, REPORT))
            builder.add_edge("grow", "grow")
            graph = builder.compile(checkpointer=InMemorySaver())
            with pytest.raises(error, match=r"raise it|shorten"):
                graph.invoke({"report": REPORT}, on_thread() | {"recursion_limit": 100})
            state = graph.get_state(on_thread())
            assert state.next == ("grow",)
            assert state.values["latent"].num_tokens > 150
            assert small.size_info().pool.used_bytes <= small.size_info().pool.budget_bytes
            graph.update_state(on_thread(), {"latent": None})
            assert next(iter(graph.stream(None, on_thread())))["grow"]["answer"] == alone(chat, REPORT)
            small.check_integrity()


@pytest.mark.parametrize("way", ["budget", "evict", "release", "scope", "close"])
def test_every_drop_of_a_handle_is_in_the_trace(tiny_folder: Callable[..., Path], way: str) -> None:
    """Field case 67: whatever is produced and no longer there was reported as evicted, exactly once per loss."""
    with LatentWorkspace(memory="60kB" if way == "budget" else "1GiB") as small:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=small, max_tokens=12)
        graph = sequence(reader=reader(chat), answerer=answerer(chat)).compile(checkpointer=InMemorySaver())
        for number in range(6):
            question = {"report": f"{number} {REPORT}", "question": "who?"}
            if way == "scope":
                with small.scope():
                    graph.invoke(question, on_thread(str(number)))
            else:
                graph.invoke(question, on_thread(str(number)))
        produced = {event.handle for event in events(small, Produced)}
        if way == "evict":
            for handle in produced:
                small.evict(small.handle(handle))
        if way == "release":
            for number in range(6):
                small.release(str(number))
        if way == "close":
            small.close()
        lost = [event.handle for event in events(small, Evicted)]
        assert len(lost) == len(set(lost))
        assert set(lost) == {handle for handle in produced if not small.pool.has(handle)}
        assert lost
        if way != "budget":
            assert set(lost) == produced


def test_graph_may_say_when_caches_are_no_longer_needed(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 65: the last node releases its thread; what is pinned, or another thread's too, stays."""

    def end(state: State, config: RunnableConfig) -> None:
        ws.release(config["metadata"]["thread_id"])

    builder = sequence(reader=reader(tiny_chat), answerer=answerer(tiny_chat), end=end)
    graph = builder.compile(checkpointer=InMemorySaver())
    kept = tiny_chat.read([HumanMessage("a common prefix")])
    assert ws.pin(kept, ttl_s=60)
    state = graph.invoke({"report": REPORT, "question": "who?"}, on_thread())
    assert not ws.pool.has(state["latent"].id)
    assert ws.pool.has(kept.id)
    reply = tiny_chat.invoke([HumanMessage("and then?")], inherit=state["latent"])
    assert_greedy(tiny_chat, ws.handle(reply))


def test_many_threads_of_one_graph_at_once_answer_as_one_after_another(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    graph = branches(tiny_chat, answerer(tiny_chat, "and so?", inherit="findings")).compile(
        checkpointer=InMemorySaver()
    )
    expected = graph.invoke({"report": REPORT}, on_thread("first"))["answer"]
    answers: list[str] = []

    def run(name: str) -> None:
        answers.append(graph.invoke({"report": REPORT}, on_thread(name))["answer"])

    threads = [threading.Thread(target=run, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == [expected] * 8
    ws.check_integrity()
