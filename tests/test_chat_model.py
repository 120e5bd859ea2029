"""`ChatLatent` as LangChain sees it: streaming, async, usage, reuse without a handle, shared weights, clean memory."""

from __future__ import annotations

import asyncio
import copy
import gc
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from transformers import MaxLengthCriteria, TextStreamer

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.engine import loader
from langgraph_latent.engine.scheduler import NewTokens
from langgraph_latent.events import Decoded, FellBack, Prefilled
from langgraph_latent.messages import plain_message

STORY = "the team that reads the report hands over what it knows to the team that decides. "


def test_invoke_stream_and_their_async_forms_agree(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 16: a stream has more than one chunk; the handle and usage are the same on every path."""
    invoked = tiny_chat.invoke(STORY)
    streamed = [chunk for chunk in tiny_chat.stream(STORY) if isinstance(chunk, AIMessageChunk)]
    assert len(streamed) > 2

    async def both() -> tuple[AIMessage, list[AIMessageChunk]]:
        return await tiny_chat.ainvoke(STORY), [chunk async for chunk in tiny_chat.astream(STORY)]  # type: ignore[misc]

    awaited, astreamed = asyncio.run(both())
    whole, awhole = sum(streamed[1:], streamed[0]), sum(astreamed[1:], astreamed[0])
    for reply in (awaited, whole, awhole):
        assert reply.text == invoked.text
        assert reply.usage_metadata["total_tokens"] == invoked.usage_metadata["total_tokens"]
        assert reply.response_metadata["kv_handle"] == invoked.response_metadata["kv_handle"]
        assert ws.handle(reply) == ws.handle(invoked)
    assert whole.response_metadata["finish_reason"] == invoked.response_metadata["finish_reason"]


def test_usage_counts_every_token_and_what_was_reused(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    doc = tiny_chat.read([SystemMessage("You read."), HumanMessage(STORY)])
    reply = tiny_chat.invoke("and?", inherit=doc)
    usage = reply.usage_metadata
    handle = ws.handle(reply)
    assert usage["input_tokens"] + usage["output_tokens"] == usage["total_tokens"] == handle.num_tokens
    assert usage["input_token_details"]["cache_read"] == doc.num_tokens
    assert reply.response_metadata["kv_handle"] == handle.id
    assert reply.response_metadata["kv_route"]["route"] == "cache"
    assert reply.response_metadata["model_name"] == tiny_chat.model


def test_the_longest_prefix_is_reused_without_any_handle(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 62: two agents that alternate do not evict each other's prefix."""
    systems = [SystemMessage("You plan. " * 5), SystemMessage("You review. " * 5)]
    histories: list[list] = [[system] for system in systems]
    for turn in range(4):
        for history in histories:
            history.append(HumanMessage(f"turn {turn}"))
            reply = tiny_chat.invoke(history)
            history.append(AIMessage(reply.text))
            if turn:
                reused = reply.usage_metadata["input_token_details"]["cache_read"]
                assert reused >= len(history[0].content) // 4
    with LatentWorkspace() as empty:
        alone = ChatLatent(model=tiny_chat.model, workspace=empty, max_tokens=12, reuse=False)
        reply = alone.invoke(histories[0][:-1])
        assert reply.text == histories[0][-1].content
        assert reply.usage_metadata["input_token_details"]["cache_read"] == 0


async def test_closing_a_stream_stops_the_generation_and_frees_the_model(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 22."""
    chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=1900).load()
    stream = chat.astream("go on for long")
    await anext(stream)
    await anext(stream)
    await stream.aclose()
    synchronous = chat.stream("and once more")
    next(synchronous)
    synchronous.close()
    deadline = time.monotonic() + 60
    while len(ends := [event for event in ws.tracer.events if isinstance(event, Decoded)]) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    assert {event.finish_reason for event in ends} == {"cancelled"}
    assert (await chat.ainvoke("still there?", max_tokens=3)).usage_metadata["output_tokens"] == 3


def test_stop_strings_end_the_answer_and_stay_out_of_it(tiny_chat: ChatLatent) -> None:
    whole = tiny_chat.invoke(STORY).text
    stop = whole[3:5]
    for reply in (tiny_chat.invoke(STORY, stop=[stop]), sum_chunks(tiny_chat, STORY, stop=[stop])):
        assert reply.text == whole[: whole.index(stop)]
        assert reply.response_metadata["finish_reason"] == "stop"


def sum_chunks(chat: ChatLatent, text: str, **options: object) -> AIMessageChunk:
    chunks = list(chat.stream(text, **options))  # type: ignore[arg-type]
    return sum(chunks[1:], chunks[0])  # type: ignore[return-value]


def test_a_seed_makes_sampling_repeatable_and_requests_do_not_share_it(tiny_chat: ChatLatent) -> None:
    hot = {"temperature": 1.5, "top_p": 0.95, "top_k": 50}
    first = tiny_chat.invoke(STORY, seed=7, **hot).text
    tiny_chat.invoke(STORY, seed=8, **hot)
    assert tiny_chat.invoke(STORY, seed=7, **hot).text == first
    assert len({tiny_chat.invoke(STORY, **hot).text for _ in range(5)}) > 1
    assert tiny_chat.invoke(STORY, temperature=0).text == tiny_chat.invoke(STORY).text


def test_greedy_text_is_stock_generates(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    reply = tiny_chat.invoke(STORY)
    handle = ws.handle(reply)
    read = reply.usage_metadata["input_tokens"]
    model = loader.acquire(tiny_chat._lease.key)
    try:
        prompt = torch.tensor([handle.token_ids[:read]])
        stock = model.model.generate(prompt, max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(prompt))
    finally:
        loader.release(tiny_chat._lease.key)
    assert tuple(stock[0].tolist()) == handle.token_ids


def test_transformers_own_criteria_and_streamers_are_taken(
    tiny_chat: ChatLatent, capsys: pytest.CaptureFixture[str]
) -> None:
    read = tiny_chat.invoke(STORY).usage_metadata["input_tokens"]
    streamer = TextStreamer(tiny_chat.tokenizer, skip_prompt=False)
    reply = tiny_chat.invoke(STORY, stopping_criteria=[MaxLengthCriteria(read + 4)], streamer=streamer)
    assert reply.usage_metadata["output_tokens"] == 4
    assert reply.text[:1] in capsys.readouterr().out


def test_two_chat_models_share_one_weight_object_and_closing_frees_it(tiny_folder: Callable[..., Path]) -> None:
    """Field case 14."""
    folder = str(tiny_folder("qwen3", seed=5))
    with LatentWorkspace() as ws, LatentWorkspace() as other:
        first, second = (ChatLatent(model=folder, workspace=each).load() for each in (ws, other))
        weights = weakref.ref(first.resident().model)
        assert second.resident().model is weights()
        first.close()
        assert weights() is not None
        second.close()
        gc.collect()
        assert weights() is None


def test_memory_is_stable_over_many_calls(tiny_folder: Callable[..., Path]) -> None:
    """Field case 14: nothing grows per call once the pool's budget is used."""
    with LatentWorkspace(memory="2MB") as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=5)
        process = psutil.Process()
        for number in range(60):
            chat.invoke(f"call {number} " * 20)
            if number == 20:
                before = process.memory_info().rss
        assert process.memory_info().rss - before < 20e6
        assert ws.size_info().pool.used_bytes <= 2e6


def test_a_cache_that_fails_in_use_is_replaced_by_re_reading_and_said_so(
    tiny_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    """A cache whose tensors are broken (here: freed under us) costs a re-read, never the run."""
    doc = tiny_chat.read(STORY)
    expected = tiny_chat.invoke("and?", inherit=doc).text
    ws.pool.clear()
    tiny_chat.read(STORY)
    state = ws.state_of(doc, tiny_chat.resident())
    state.buffer.layers[1].keys = torch.zeros(1, 7, 3, 5)
    reply = tiny_chat.invoke("and?", inherit=doc)
    assert reply.text == expected
    assert reply.response_metadata["kv_route"]["code"] == "failed"
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 0
    assert [event.from_route for event in ws.tracer.events if isinstance(event, FellBack)] == ["cache"]


def test_a_state_is_made_without_gradients_and_can_be_copied(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 40."""
    state = ws.state_of(tiny_chat.read(STORY), tiny_chat.resident())
    assert not any(tensor.requires_grad for pair in state.layers() for tensor in pair)
    copied = copy.deepcopy(state.layers())
    assert all(
        torch.equal(a, b)
        for mine, theirs in zip(state.layers(), copied, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def test_a_forward_without_a_mask_gives_what_one_with_a_mask_gives(tiny_chat: ChatLatent) -> None:
    """Field cases 25, 27: a suffix over a handle, with our full-length mask and with none."""
    model = tiny_chat.resident()
    ids = list(range(3, 40))
    with model.empty_state().append() as tail:
        masked = model.prefill(ids, tail)
        masked = model.forward([NewTokens([5, 6, 7], tail)])[0]
    with torch.no_grad():
        bare = model.model(input_ids=torch.tensor([[*ids, 5, 6, 7]])).logits[0, -1]
    assert (masked - bare).abs().max() < 1e-4


def test_a_second_handle_is_read_as_text_and_not_glued_on(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 28: two caches are never concatenated; the second one's messages are appended to the first's."""
    one, two = tiny_chat.read("report one"), tiny_chat.read("notes two")
    joined = tiny_chat.invoke("compare", inherit=[one, two])
    with LatentWorkspace() as empty:
        chat = ChatLatent(model=tiny_chat.model, workspace=empty, max_tokens=12)
        expected = chat.invoke([HumanMessage("report one"), HumanMessage("notes two"), HumanMessage("compare")])
    assert joined.text == expected.text
    assert joined.response_metadata["kv_route"]["code"] == "not_first"
    assert joined.usage_metadata["input_token_details"]["cache_read"] >= one.num_tokens


def test_events_tell_what_was_computed(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    doc = tiny_chat.read(STORY)
    reply = tiny_chat.invoke("and?", inherit=doc)
    prefills = [event for event in ws.tracer.events if isinstance(event, Prefilled)]
    assert [event.num_tokens for event in prefills] == [
        doc.num_tokens,
        reply.usage_metadata["input_tokens"] - doc.num_tokens,
    ]
    assert ws.tracer.summary().tokens_reused == doc.num_tokens


def test_messages_become_plain_data() -> None:
    """Field cases 4, 58: every kind of message an agent graph makes."""
    call = {"name": "add", "args": {"a": 1}, "id": "c1"}
    assert plain_message(AIMessage("", tool_calls=[call]))["tool_calls"][0]["function"] == {
        "name": "add",
        "arguments": {"a": 1},
    }
    assert plain_message(ToolMessage("2", tool_call_id="c1")) == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert plain_message(HumanMessage([{"type": "text", "text": "a"}, "b"])) == {"role": "user", "content": "ab"}
    assert plain_message(HumanMessage("hi", name="ann"))["name"] == "ann"


def test_a_scope_belongs_to_one_workspace(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    with LatentWorkspace() as other:
        with other.scope():
            handle = tiny_chat.read(STORY)
        assert ws.pool.has(handle.id)
        with ws.scope(), other.scope():
            inner = tiny_chat.read("made inside")
        assert not ws.pool.has(inner.id)


def test_releasing_no_thread_releases_nothing(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    handle = tiny_chat.read(STORY)
    ws.release("")
    assert ws.pool.has(handle.id)


def test_a_transformers_streamer_that_skips_the_prompt_gets_every_sampled_token(
    tiny_chat: ChatLatent, capsys: pytest.CaptureFixture[str]
) -> None:
    streamer = TextStreamer(tiny_chat.tokenizer, skip_prompt=True)
    reply = tiny_chat.invoke(STORY, streamer=streamer)
    assert capsys.readouterr().out.rstrip("\n").startswith(reply.text[:3])


def test_an_error_while_decoding_is_raised_and_traced_as_one(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    def fail_later(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > read.num_tokens + 25:
            raise ZeroDivisionError("on purpose")
        return scores

    read = tiny_chat.read(STORY)
    with pytest.raises(ZeroDivisionError):
        tiny_chat.invoke("go on", inherit=read, logits_processor=[fail_later])
    (decoded,) = [event for event in ws.tracer.events if isinstance(event, Decoded)]
    assert decoded.finish_reason == "error"
    assert tiny_chat.invoke("go on", inherit=read).text


def test_a_template_that_rewrites_history_is_named_as_the_route(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 41: what stays is reused, and the reply says how much that was."""
    template = (
        "{% for m in messages %}{% set keep = loop.last or m['role'] != 'user' %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if keep else m['content'][:9] }}<|im_end|>\n{% endfor %}"
    )
    chat = ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=4)
    doc = chat.read([HumanMessage(STORY)])
    reply = chat.invoke("and?", inherit=doc)
    reused = reply.usage_metadata["input_token_details"]["cache_read"]
    assert 0 < reused < doc.num_tokens
    assert reply.response_metadata["kv_route"]["code"] == "diverged"
    assert f"{reused} of {doc.num_tokens} tokens stay" in reply.response_metadata["kv_route"]["reason"]


def test_a_file_named_bytes_is_a_file(tiny_chat: ChatLatent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    handle = tiny_chat.read(STORY)
    tiny_chat.export_kv_cache(handle, "bytes")
    assert tiny_chat.ingest_kv_cache("bytes") == handle
