"""Level 0 is exact: what is computed over an inherited cache is what one forward over the same token ids gives."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from transformers import LogitsProcessor

from langgraph_latent import ChatLatent, KVHandle, LatentWorkspace
from langgraph_latent.engine import attention
from langgraph_latent.engine.scheduler import NewTokens
from langgraph_latent.events import Diverged
from langgraph_latent.handle.tokens import pack_tokens

KINDS = ("llama", "mistral", "gpt2", "qwen3", "smollm2")
TOLERANCE = 1e-4
STORY = "the team that reads the report hands over what it knows to the team that decides. "


class Recorder(LogitsProcessor):
    """Keeps the logits that every token was chosen from."""

    def __init__(self) -> None:
        self.logits: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.logits.append(scores[0].clone())
        return scores


@pytest.fixture(params=KINDS)
def chat(request: pytest.FixtureRequest, ws: LatentWorkspace, tiny_folder: Callable[..., Path]) -> ChatLatent:
    if request.param == "smollm2":
        request.getfixturevalue("smol_lease")
        folder = request.getfixturevalue("smollm2")
    else:
        folder = tiny_folder(request.param)
    return ChatLatent(model=str(folder), workspace=ws, max_tokens=10)


def full_logits(chat: ChatLatent, ids: tuple[int, ...]) -> torch.Tensor:
    """One forward of the stock model over all ids, without any cache."""
    model = chat.resident().model
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()


def answer_exactly(chat: ChatLatent, text: str, inherit: KVHandle | list[KVHandle] | None) -> KVHandle:
    """Answer `text` after `inherit`; every step's logits must be those of one full forward, and greedy its argmax."""
    recorder = Recorder()
    reply = chat.invoke([HumanMessage(text)], inherit=inherit, logits_processor=[recorder])
    handle = chat.handle(reply)
    written = reply.usage_metadata["output_tokens"]
    expected = full_logits(chat, handle.token_ids)[-written - 1 : -1]
    got = torch.stack(recorder.logits)
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE * max(1.0, expected.abs().max().item() / 10)
    assert handle.token_ids[-written:] == tuple(expected.argmax(-1).tolist())
    return handle


def test_a_chain_is_exact(chat: ChatLatent) -> None:
    handle = chat.read([SystemMessage("You read reports."), HumanMessage(STORY * 4)])
    for question in ("what matters?", "who decides?", "and then?"):
        before = handle
        handle = answer_exactly(chat, question, before)
        assert handle.token_ids[: before.num_tokens] == before.token_ids


def test_a_fan_out_is_exact_and_each_branch_sees_the_shared_context_only(chat: ChatLatent) -> None:
    doc = chat.read([HumanMessage(STORY * 4)])
    with ThreadPoolExecutor(3) as threads:
        handles = list(threads.map(lambda q: answer_exactly(chat, q, doc), ("one?", "two of them?", "the third?")))
    assert all(handle.token_ids[: doc.num_tokens] == doc.token_ids for handle in handles)
    assert len({handle.id for handle in handles}) == 3


@pytest.mark.parametrize("num_strangers", [0, 1])
def test_branches_that_read_their_shared_context_once_are_exact(
    num_strangers: int, tiny_folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, seen = attention._attend_shared_prefix, list[int]()
    monkeypatch.setattr(attention, "MIN_SHARED", 2)
    monkeypatch.setattr(attention, "_attend_shared_prefix", lambda *call: (seen.append(len(call[1])), attend(*call))[1])
    chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws)
    begins = [tuple(range(3, 33))] * 3 + [tuple(range(50, 80))] * num_strangers
    states = {}
    for begin in set(begins):
        with chat.resident().empty_state().append() as tail:
            chat.resident().prefill(begin, tail)
            states[begin] = tail.seal()
    with ExitStack() as stack:
        tails = [stack.enter_context(states[begin].append()) for begin in begins]
        texts = [(*begin, *range(index, 2 * index + 1)) for index, begin in enumerate(begins)]
        new = [ids[30:] for ids in texts]
        for step in range(4):
            logits = chat.resident().forward([NewTokens(*each) for each in zip(new, tails, strict=True)])
            for got, ids in zip(logits, texts, strict=True):
                assert (got - full_logits(chat, ids)[-1]).abs().max() <= TOLERANCE
            new = [(10 * step + index,) for index in range(len(begins))]
            texts = [(*ids, *more) for ids, more in zip(texts, new, strict=True)]
    assert set(seen) == {3}


@pytest.mark.slow
def test_a_loop_is_exact_far_past_the_sliding_window(chat: ChatLatent) -> None:
    handle = None
    for turn in range(6):
        handle = answer_exactly(chat, f"turn {turn}: go on", handle)
    assert handle is not None
    assert handle.num_tokens > 3 * 24


def test_a_fan_in_is_exact(chat: ChatLatent) -> None:
    doc = chat.read([HumanMessage(STORY * 2)])
    left, right = (answer_exactly(chat, question, doc) for question in ("left?", "right?"))
    joined = answer_exactly(chat, "join them", [left, right])
    assert joined.token_ids[: left.num_tokens] == left.token_ids
    contents = [message["content"] for message in joined.messages]
    assert contents.count(STORY * 2) == 1
    assert "left?" in contents
    assert "right?" in contents


def test_only_the_common_part_of_a_diverging_prompt_is_reused(chat: ChatLatent) -> None:
    """Field case 41: the common prefix is found by token ids."""
    shared = [SystemMessage("You read reports."), HumanMessage(STORY * 3)]
    chat.read([*shared, HumanMessage("the first way of going on")])
    reply = chat.invoke([*shared, HumanMessage("another way")])
    tokens = chat.handle(reply).token_ids
    reused = reply.usage_metadata["input_token_details"]["cache_read"]
    prefix = chat.read(shared)
    assert prefix.num_tokens <= reused < reply.usage_metadata["input_tokens"]
    assert tokens == answer_exactly(chat, "another way", prefix).token_ids


def test_a_prompt_covered_by_the_cache_still_gives_the_right_next_token(chat: ChatLatent) -> None:
    first = answer_exactly(chat, STORY, None)
    again = answer_exactly(chat, STORY, None)
    assert again.token_ids == first.token_ids


def test_sampled_tokens_stay_the_truth_where_their_text_tokenises_differently(
    ws: LatentWorkspace, tiny_chat: ChatLatent
) -> None:
    """A random model samples bytes that no tokenizer gives back; the handle still continues these very tokens."""
    handle = tiny_chat.handle(tiny_chat.invoke(STORY))
    text = handle.messages[-1]["content"]
    assert tiny_chat.tokenizer.encode(text, add_special_tokens=False) != list(handle.token_ids[-12:])
    following = answer_exactly(tiny_chat, "go on", handle)
    assert following.tokens.startswith(handle.tokens)
    assert not [event for event in ws.tracer.events if isinstance(event, Diverged)]


def test_the_pending_token_is_fed_once(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    """The last sampled token is counted, is not in the cache, and is fed with the next suffix."""
    handle = tiny_chat.handle(tiny_chat.invoke(STORY, max_tokens=5))
    reply = tiny_chat.invoke("go on", inherit=handle, max_tokens=5)
    assert reply.usage_metadata["input_token_details"]["cache_read"] == handle.num_tokens - 1
    following = tiny_chat.handle(reply)
    assert following.num_tokens == reply.usage_metadata["input_tokens"] + reply.usage_metadata["output_tokens"]
    assert following.tokens[: len(handle.tokens)] == pack_tokens(handle.token_ids)


def test_the_installed_forwards_owncache_argument_is_used(tiny_chat: ChatLatent) -> None:
    """Field case 39: `past_key_values` became `cache`; whichever the installed forward takes, without its warning."""
    model = tiny_chat.resident()
    assert model.cache_argument in inspect.signature(model.model.forward).parameters
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer_exactly(tiny_chat, "go on", tiny_chat.read(STORY))
