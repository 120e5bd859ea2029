"""Long runs and many threads (field case 53): the budget holds, memory stays flat, an ended graph leaves nothing."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import psutil
import pytest
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, KVHandle, LatentChannel, LatentNode, LatentWorkspace
from langgraph_latent.kv.state import KVState

pytestmark = pytest.mark.slow

REPORT = "the team reads the report and hands over what it knows to the team that decides"
SLACK_BYTES = 24 << 20


class State(TypedDict, total=False):
    step: int
    latent: Annotated[KVHandle | None, LatentChannel]
    answer: str


def rss() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


@pytest.fixture
def wide(tiny_folder: Callable[..., Path]) -> str:
    """Small to compute, with a cache heavy enough (6 kB a token) that a leak of it shows in the process's memory."""
    return str(
        tiny_folder("llama", head_dim=64, num_key_value_heads=4, num_hidden_layers=3, max_position_embeddings=4096)
    )


def test_300_supersteps_keep_budget_and_memory(wide: str, tmp_path: Path) -> None:
    """The loop's context is cleared now and then, as a long-lived agent's is; every new one reads the report again."""
    supersteps, budget = 300, 16 << 20
    with (
        LatentWorkspace(memory=budget) as ws,
        SqliteSaver.from_conn_string(str(tmp_path / "db.sqlite")) as saver,
    ):
        chat = ChatLatent(model=wide, workspace=ws, max_tokens=4)
        talk = LatentNode(chat, prompt=lambda state: [("human", f"{state['step']} {REPORT}")], writes="answer")

        def step(state: State) -> dict[str, Any]:
            fresh = state["step"] % 10 == 0
            return {"step": state["step"] + 1} | talk.invoke({**state, "latent": None} if fresh else state)

        builder = StateGraph(State)
        builder.add_node("step", step)
        builder.add_edge(START, "step")
        builder.add_conditional_edges(
            "step", lambda state: END if state["step"] >= supersteps else "step", ["step", END]
        )
        graph = builder.compile(checkpointer=saver)
        config: Any = {"configurable": {"thread_id": "1"}, "recursion_limit": supersteps + 1}
        used, memory = [], []
        for number, _ in enumerate(graph.stream({"step": 0}, config, stream_mode="updates")):
            used.append(ws.size_info().pool.used_bytes)
            if number % 50 == 49:
                memory.append(rss())
                ws.check_integrity()
        assert len(used) == supersteps
        assert max(used) <= budget
        assert max(used) > 0.5 * budget, "the budget was never under pressure, so this test shows nothing"
        assert max(memory[2:]) - memory[1] < SLACK_BYTES


def test_200_threads_keep_budget_and_memory_and_every_thread_goes_on(wide: str) -> None:
    budget = 16 << 20
    with LatentWorkspace(memory=budget) as ws:
        chat = ChatLatent(model=wide, workspace=ws, max_tokens=4)
        builder = StateGraph(State)
        builder.add_node("read", LatentNode(chat, prompt=f"{{step}} {REPORT}", mode="read"))
        builder.add_node("answer", LatentNode(chat, prompt="who decides?", writes="answer"))
        builder.add_edge(START, "read")
        builder.add_edge("read", "answer")
        graph = builder.compile(checkpointer=InMemorySaver())
        used, memory = [], []
        for number in range(200):
            for _ in graph.stream({"step": number}, {"configurable": {"thread_id": str(number)}}):
                used.append(ws.size_info().pool.used_bytes)
            if number % 40 == 39:
                memory.append(rss())
                ws.check_integrity()
        assert max(used) <= budget
        assert max(used) > 0.5 * budget
        assert max(memory[2:]) - memory[1] < SLACK_BYTES
        for number in (0, 100, 199):
            before = graph.get_state({"configurable": {"thread_id": str(number)}}).values
            reply = chat.invoke("and then?", inherit=before["latent"])
            assert ws.handle(reply).token_ids[: before["latent"].num_tokens] == before["latent"].token_ids
        assert ws.size_info().pool.used_bytes <= budget


@pytest.mark.parametrize("ending", ["close", "release", "scope"])
def test_nothing_leaks_when_a_graph_ends(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    """Every `KVState` and every storage made for a graph is gone, though the graph's last state is still held."""
    living: weakref.WeakSet[KVState] = weakref.WeakSet()
    make = KVState.__init__

    def make_and_note(self: KVState, *args: Any) -> None:
        make(self, *args)
        living.add(self)

    with LatentWorkspace(memory="1GiB") as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=8).load()
        monkeypatch.setattr(KVState, "__init__", make_and_note)
        builder = StateGraph(State)
        builder.add_node("read", LatentNode(chat, prompt=REPORT, mode="read"))
        for name in ("a", "b"):
            builder.add_node(name, LatentNode(chat, prompt=name))
            builder.add_edge("read", name)
        builder.add_edge(START, "read")
        graph = builder.compile(checkpointer=InMemorySaver())
        config: Any = {"configurable": {"thread_id": "1"}}
        if ending == "scope":
            with ws.scope():
                state = graph.invoke({"step": 0}, config)
                assert living
        else:
            state = graph.invoke({"step": 0}, config)
            assert living
            ws.close() if ending == "close" else ws.release("1")
        gc.collect()
        assert not living
        assert state["latent"].num_tokens > 0


def test_a_node_that_fails_in_decoding_leaves_its_prompt_once_and_the_storage_free(
    tiny_folder: Callable[..., Path],
) -> None:
    """A retry finds what was read; failing again and again adds nothing, and the storage can be appended to again."""
    with LatentWorkspace(memory="1GiB") as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=8)
        doc = chat.read(REPORT)
        sizes = []
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                chat.invoke("who?", inherit=doc, logits_processor=[lambda ids, scores: 1 / 0])
            sizes.append(ws.size_info().pool)
        assert sizes[0] == sizes[1] == sizes[2]
        answer = chat.invoke("who?", inherit=doc)
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] >= doc.num_tokens
        ws.check_integrity()
