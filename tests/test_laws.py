"""The laws of a handle: what users may rely on, as properties over random conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, Level, Route
from langgraph_latent.errors import RouteError

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=60).filter(str.strip)
MESSAGES = st.builds(lambda kind, text: kind(text), st.sampled_from([HumanMessage, SystemMessage, AIMessage]), TEXTS)
CONVERSATIONS = st.lists(MESSAGES, min_size=1, max_size=4)
KINDS = ("llama", "mistral", "gpt2", "qwen3")
SLOW = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tiny_folder: Callable[..., Path]) -> str:
    return str(tiny_folder(request.param))


@pytest.fixture
def keeper(folder: str) -> Iterator[None]:
    """Keeps the weights resident, so that a fresh workspace per example costs nothing."""
    with LatentWorkspace() as workspace:
        ChatLatent(model=folder, workspace=workspace).load()
        yield


def text_run(folder: str, messages: list[BaseMessage], **options: object) -> str:
    """What the model answers to all messages at once, in an empty workspace."""
    with LatentWorkspace() as empty:
        return str(ChatLatent(model=folder, workspace=empty, max_tokens=8, **options).invoke(messages).text)  # type: ignore[arg-type]


@SLOW
@given(a=CONVERSATIONS, b=CONVERSATIONS)
def test_law_1_inheriting_a_read_is_reading_it_all(
    folder: str, keeper: None, a: list[BaseMessage], b: list[BaseMessage]
) -> None:
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=8)
        assert chat.invoke(b, inherit=chat.read(a)).text == text_run(folder, a + b)
        ws.check_integrity()


@SLOW
@given(a=CONVERSATIONS, b=CONVERSATIONS)
def test_law_2_inheriting_a_reply_is_passing_its_message(
    folder: str, keeper: None, a: list[BaseMessage], b: list[BaseMessage]
) -> None:
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=8)
        reply = chat.invoke(a)
        handle = ws.handle(reply)
        following = chat.invoke(b, inherit=handle)
        assert ws.handle(following).tokens.startswith(handle.tokens)
        writer = chat.resident().prompts
        plain = list(handle.messages)
        if writer.write(plain, reply=False).tokens.startswith(handle.tokens):  # the text gives the sampled ids back
            assert following.text == text_run(folder, [*a, reply, *b])


@SLOW
@given(a=CONVERSATIONS, b=CONVERSATIONS)
def test_law_3_an_evicted_handle_gives_the_same_answers(
    folder: str, keeper: None, a: list[BaseMessage], b: list[BaseMessage]
) -> None:
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=8)
        handle = ws.handle(chat.invoke(a))
        kept = chat.invoke(b, inherit=handle).text
        ws.pool.clear()
        restored = KVHandle.from_dict(json.loads(json.dumps(handle.to_dict())))
        with ThreadPoolExecutor(1) as thread:
            rebuilt = thread.submit(lambda: chat.invoke(b, inherit=restored).text).result()
        assert rebuilt == kept


@SLOW
@given(a=CONVERSATIONS, b=CONVERSATIONS)
def test_law_4_an_exported_and_ingested_handle_gives_the_same_answers(
    folder: str, keeper: None, a: list[BaseMessage], b: list[BaseMessage]
) -> None:
    with LatentWorkspace() as ws, LatentWorkspace() as other:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=8)
        handle = ws.handle(chat.invoke(a))
        receiver = ChatLatent(model=folder, workspace=other, max_tokens=8)
        ingested = receiver.ingest_kv_cache(chat.export_kv_cache(handle) or b"")
        assert ingested == handle
        reply = receiver.invoke(b, inherit=ingested)
        assert reply.text == chat.invoke(b, inherit=handle).text
        assert reply.usage_metadata["input_token_details"]["cache_read"] == handle.num_tokens


def test_law_3_a_handle_from_a_checkpoint_gives_the_same_answers_in_a_new_process(folder: str, keeper: None) -> None:
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=8)
        handle = ws.handle(chat.invoke([SystemMessage("You read."), HumanMessage("the report " * 9)]))
        kept = chat.invoke("go on", inherit=handle).text
    program = (
        "import json, sys\n"
        "from langgraph_latent import ChatLatent, KVHandle\n"
        "handle = KVHandle.from_dict(json.loads(sys.argv[2]))\n"
        "print(json.dumps(ChatLatent(model=sys.argv[1], max_tokens=8).invoke('go on', inherit=handle).text))\n"
    )
    command = [sys.executable, "-c", program, folder, json.dumps(handle.to_dict())]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout) == kept


def test_law_5_eight_threads_extending_one_handle_change_neither_it_nor_each_other(folder: str, keeper: None) -> None:
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=folder, workspace=ws, max_tokens=4)
        handle = chat.read([HumanMessage("what one agent knows, the other agents can use " * 2)])
        questions = [f"question {number}" for number in range(10)]
        alone = [chat.invoke(question, inherit=handle, max_tokens=4).text for question in questions]
        state = ws.state_of(handle, chat.resident())
        checksum, length = state.checksum(), state.num_tokens

        def fifty(thread: int) -> list[str]:
            asked = [(thread + step) % len(questions) for step in range(50)]
            answers = [(number, chat.invoke(questions[number], inherit=handle, max_tokens=4).text) for number in asked]
            return [text for number, text in answers if text != alone[number]]

        with ThreadPoolExecutor(8) as threads:
            assert [wrong for wrongs in threads.map(fifty, range(8)) for wrong in wrongs] == []
        assert (state.checksum(), state.num_tokens) == (checksum, length)
        assert ws.state_of(handle, chat.resident()).checksum() == checksum
        ws.check_integrity()


def test_law_5_two_streams_interleaved_over_a_fresh_handle_do_not_meet(folder: str, keeper: None) -> None:
    """Both begin at the end of the same storage: the first writes in place, the second must not."""
    with LatentWorkspace() as ws, LatentWorkspace() as other:
        chat, alone = (ChatLatent(model=folder, workspace=each, max_tokens=20) for each in (ws, other))
        doc = [HumanMessage("what one agent knows, the other agents can use")]
        questions = ("which one?", "why is that so?")
        handle = chat.read(doc)
        streams = [chat.stream(question, inherit=handle) for question in questions]
        answers = ["", ""]
        for chunks in zip_longest(*streams):
            for number, chunk in enumerate(chunks):
                answers[number] += str(chunk.content) if chunk else ""
        assert answers == [alone.invoke([*doc, HumanMessage(question)]).text for question in questions]


@pytest.mark.parametrize("allow", [{Level.EXACT}, {Level.TEXT}, {Level.EXACT, Level.TEXT}])
@pytest.mark.parametrize("judge", [False, True])
def test_law_7_the_level_is_one_that_the_policy_allows(
    tiny_folder: Callable[..., Path], allow: set[Level], judge: bool
) -> None:
    policy = EdgePolicy(allow=frozenset(allow), judge=judge)
    with LatentWorkspace(router=EdgeRouter(default=policy)) as ws:
        sender = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=6)
        stranger = ChatLatent(model=str(tiny_folder("qwen3")), workspace=ws, max_tokens=6)
        handle = sender.read("the report")
        route = sender.invoke("and?", inherit=handle).response_metadata["kv_route"]
        assert route["level"] in {int(level) for level in allow}
        assert route["route"] == (Route.CACHE.value if Level.EXACT in allow else Route.TEXT.value)
        if Level.TEXT in allow:
            assert stranger.invoke("and?", inherit=handle).response_metadata["kv_route"]["level"] == Level.TEXT
        else:
            with pytest.raises(RouteError, match="Allow Level"):
                stranger.invoke("and?", inherit=handle)


@pytest.mark.slow
def test_the_laws_hold_on_the_real_model(smollm2: Path, smol_chat: ChatLatent, ws: LatentWorkspace) -> None:
    a: list[BaseMessage] = [
        SystemMessage("You read reports and answer in one short sentence."),
        HumanMessage("At 04:10 the cold store in hall 3 lost power. The night shift called the electricians at 04:40."),
    ]
    b: list[BaseMessage] = [HumanMessage("When did the power fail?")]
    c: list[BaseMessage] = [HumanMessage("Who was called?")]
    folder = str(smollm2)

    def from_scratch(messages: list[BaseMessage]) -> str:
        with LatentWorkspace() as empty:
            return str(ChatLatent(model=folder, workspace=empty, max_tokens=16).invoke(messages).text)

    doc = smol_chat.read(a)
    first = smol_chat.invoke(b, inherit=doc)
    assert first.text == from_scratch(a + b)
    second = smol_chat.invoke(c, inherit=ws.handle(first))
    assert second.text == from_scratch([*a, *b, first, *c])
    ws.pool.clear()
    assert smol_chat.invoke(c, inherit=ws.handle(first)).text == second.text
    ingested = smol_chat.ingest_kv_cache(smol_chat.export_kv_cache(ws.handle(first)) or b"")
    assert smol_chat.invoke(c, inherit=ingested).text == second.text
