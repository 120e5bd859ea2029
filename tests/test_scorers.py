"""An attention budget: the tokens that matter are kept, with the first and the last ones, and the rest is left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, LatentWorkspace, Level, Selection
from langgraph_latent.errors import ConfigError, HandleError, ModelMismatchError, UnsupportedLayerError
from langgraph_latent.evaluation.importance import PASSAGES, Passage
from langgraph_latent.kv import scorers
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.move import Piece, moved_after
from langgraph_latent.kv.scorers import budget_spans, key_norm
from langgraph_latent.kv.state import KVState

FULL = LayerKind("full")
TEXT = "The team that reads the report hands over what it knows to the team that decides and writes the answer. " * 3
Spans = tuple[tuple[int, int], ...]


def state_of(norms: torch.Tensor, num_layers: int = 2) -> KVState:
    """A state whose keys have these norms in every layer and head."""
    keys = norms[None, None, :, None] * torch.nn.functional.normalize(torch.ones(1, 2, len(norms), 8), dim=-1)
    return KVState.from_layers((FULL,) * num_layers, [(keys, torch.ones_like(keys))] * num_layers, len(norms))


def tokens_in(spans: Spans) -> list[int]:
    return [token for begin, end in spans for token in range(begin, end)]


def test_the_tokens_of_small_keys_are_kept_between_the_first_and_the_last() -> None:
    norms = torch.ones(100)
    norms[[20, 21, 22, 50]] = 0.1
    assert budget_spans(state_of(norms), 4 + 10 + 4, sinks=4, window=10) == ((0, 4), (20, 23), (50, 51), (90, 100))


def test_spans_are_ascending_apart_and_hold_exactly_the_budget() -> None:
    state = state_of(torch.rand(200, generator=torch.Generator().manual_seed(3)) + 0.1)
    for k in (1, 3, 4, 20, 36, 37, 100, 199):
        spans = budget_spans(state, k)
        assert len(tokens_in(spans)) == k
        assert all(before < begin < end for (_, before), (begin, end) in zip(((0, -1), *spans), spans, strict=False))


def test_a_budget_below_sinks_and_window_keeps_the_first_tokens_then_the_last() -> None:
    state = state_of(torch.rand(50) + 0.1)
    assert budget_spans(state, 3) == ((0, 3),)
    assert budget_spans(state, 10) == ((0, 4), (44, 50))
    assert budget_spans(state, 40, sinks=30, window=30) == ((0, 30), (40, 50))


def test_no_sinks_and_no_window_leave_it_to_the_scores() -> None:
    norms = torch.linspace(2, 1, 30)
    assert budget_spans(state_of(norms), 5, sinks=0, window=0) == ((25, 30),)
    assert budget_spans(state_of(-norms.flip(0)), 5, sinks=0, window=0) == ((0, 5),)


def test_a_budget_of_all_tokens_is_one_span() -> None:
    state = state_of(torch.rand(12) + 0.1)
    assert budget_spans(state, 12) == budget_spans(state, 99) == ((0, 12),)


def test_equal_scores_keep_the_earlier_token() -> None:
    assert budget_spans(state_of(torch.ones(60)), 4 + 5 + 3, window=5) == ((0, 7), (55, 60))


def test_no_layer_outvotes_the_others_by_its_scale() -> None:
    small, large = torch.ones(40), torch.full((40,), 100.0)
    small[[10, 11]], large[[10, 30]] = 0.5, 50.0
    layers = [(state_of(norms, 1).layer(0)) for norms in (small, small, large)]
    state = KVState.from_layers((FULL,) * 3, layers, 40)
    assert budget_spans(state, 2, sinks=0, window=0) == ((10, 12),)


def test_a_scorer_is_called_with_keys_and_values_of_one_layer_after_the_other() -> None:
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def score(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        calls.append((keys, values))
        assert keys.shape == values.shape == (1, 2, 60, 8)
        return torch.arange(60.0).expand(1, 2, 60)

    state = state_of(torch.ones(60))
    assert budget_spans(state, 10, score, sinks=2, window=0) == ((0, 2), (52, 60))
    assert len(calls) == 2
    for index, (keys, values) in enumerate(calls):
        assert torch.equal(keys, state.layer(index)[0])
        assert torch.equal(values, state.layer(index)[1])


def test_too_many_spans_are_joined_by_averaging_over_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scorers, "MAX_SPANS", 12)
    norms = torch.ones(400)
    norms[::2] = 0.5
    norms[100:200] *= 0.5
    spans = budget_spans(state_of(norms), 120)
    assert len(spans) <= 12
    assert len(tokens_in(spans)) == 120
    assert len({*tokens_in(spans)} & {*range(100, 200)}) > 75


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "8", None])
def test_an_impossible_budget_is_refused(k: Any, tiny_chat: ChatLatent) -> None:
    with pytest.raises(ConfigError, match="budget"):
        budget_spans(state_of(torch.ones(8)), k)
    handle = tiny_chat.read([HumanMessage("the report")])
    with pytest.raises(ConfigError, match="budget"):
        tiny_chat.within_budget(handle, k)


@pytest.mark.parametrize("option", [{"sinks": -1}, {"window": 1.5}, {"sinks": True}])
def test_impossible_sinks_and_windows_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(option))):
        budget_spans(state_of(torch.ones(8)), 4, **option)


@pytest.mark.parametrize("returned", [torch.ones(1, 2, 59), torch.ones(60), torch.full((1, 2, 60), math.nan)])
def test_a_scorer_that_returns_something_else_is_refused(returned: torch.Tensor) -> None:
    with pytest.raises(ConfigError, match="scorer"):
        budget_spans(state_of(torch.ones(60)), 50, lambda keys, values: returned)


def test_a_state_that_keeps_no_key_per_token_is_refused() -> None:
    kinds = (FULL, LayerKind("linear"))
    with pytest.raises(UnsupportedLayerError, match="key"):
        budget_spans(KVState.empty(kinds), 4)


# -- a chat model's handles ------------------------------------------------------------------------------------------


@pytest.fixture
def moving(tiny_folder: Callable[..., Path]) -> Any:
    """A tiny chat model whose edges allow moved blocks."""
    policy = EdgePolicy(allow=frozenset({Level.EXACT, Level.MOVED}))
    with LatentWorkspace(memory="1GiB", router=EdgeRouter(default=policy)) as ws:
        yield ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=8)
        ws.check_integrity()


def test_a_handle_within_its_budget_is_given_back(tiny_chat: ChatLatent) -> None:
    handle = tiny_chat.read([HumanMessage("the report")])
    assert tiny_chat.within_budget(handle, handle.num_tokens) is handle
    assert tiny_chat.within_budget(handle, 10**6) is handle


def test_a_handle_of_a_budget_has_the_tokens_of_its_spans_and_all_messages(moving: ChatLatent) -> None:
    whole = moving.read([SystemMessage("You read."), HumanMessage(TEXT)])
    small = moving.within_budget(whole, 60, sinks=4, window=16)
    assert moving.workspace is not None
    state = moving.workspace.state_of(whole, moving.resident())
    spans = budget_spans(state, 60, sinks=4, window=16)
    assert small.num_tokens == 60
    assert small.token_ids == tuple(whole.token_ids[token] for token in tokens_in(spans))
    assert small.messages == whole.messages
    assert not small.is_exact
    assert (small.model, small.tenant) == (whole.model, whole.tenant)


def test_its_cache_is_that_of_its_tokens_moved_together(moving: ChatLatent) -> None:
    whole, ws, model = moving.read([HumanMessage(TEXT)]), moving.workspace, moving.resident()
    assert ws is not None
    small = moving.within_budget(whole, 50)
    state = ws.state_of(whole, model)
    piece = Piece(state, torch.tensor(tokens_in(budget_spans(state, 50))))
    expected = moved_after(model.empty_state(), [piece], model.rotations)
    for mine, theirs in zip(ws.state_of(small, model).layers(), expected.layers(), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_it_is_served_at_level_1_and_nothing_of_it_is_computed(moving: ChatLatent) -> None:
    small = moving.within_budget(moving.read([HumanMessage(TEXT)]), 80)
    reply = moving.invoke([HumanMessage("the answer")], inherit=small)
    assert reply.response_metadata["kv_route"]["level"] == 1
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 80


def test_an_answer_is_cut_like_everything_else_and_can_be_continued(moving: ChatLatent) -> None:
    reply = moving.invoke([HumanMessage(TEXT)])
    small = moving.within_budget(moving.handle(reply), 70)
    assert small.num_sampled == moving.handle(reply).num_sampled
    assert moving.invoke([HumanMessage("the answer")], inherit=small).usage_metadata is not None


def test_the_same_budget_gives_the_same_handle_also_when_the_cache_is_gone(moving: ChatLatent) -> None:
    whole = moving.read([HumanMessage(TEXT)])
    small = moving.within_budget(whole, 60)
    assert moving.workspace is not None
    moving.workspace.evict(whole)
    assert moving.within_budget(whole, 60) == small


def test_a_handle_of_another_model_or_none_is_refused(moving: ChatLatent, tiny_folder: Callable[..., Path]) -> None:
    other = ChatLatent(model=str(tiny_folder("llama", seed=5)), workspace=moving.workspace)
    with pytest.raises(ModelMismatchError):
        moving.within_budget(other.read([HumanMessage(TEXT)]), 8)
    with pytest.raises(HandleError):
        moving.within_budget("kv-1", 8)  # type: ignore[arg-type]


def test_a_sliding_window_model_keeps_its_budget_too(tiny_folder: Callable[..., Path]) -> None:
    with LatentWorkspace(memory="1GiB") as ws:
        chat = ChatLatent(model=str(tiny_folder("mistral")), workspace=ws)
        assert chat.within_budget(chat.read([HumanMessage(TEXT)]), 40).num_tokens == 40


def test_small_keys_do_better_than_large_ones_on_the_real_model(smol_chat: ChatLatent) -> None:
    """A scorer that is wrong on purpose is seen."""
    right, wrong = 0.0, 0.0
    for passage in PASSAGES:
        right += loss_of_budget(smol_chat, passage, key_norm)
        wrong += loss_of_budget(smol_chat, passage, lambda keys, values: -key_norm(keys, values))
    assert right < 0.5 * wrong


def loss_of_budget(chat: ChatLatent, passage: Passage, scorer: scorers.Scorer) -> float:
    """Divergence of an answer's predictions, in nats a token, when three quarters of the context's tokens are kept."""
    model, ws = chat.resident(), chat.workspace
    assert ws is not None
    handle = chat.read([HumanMessage(passage.context)])
    asked = chat.read([HumanMessage(passage.question)], inherit=handle)
    state, answer = ws.state_of(handle, model), model.tokenizer.encode(passage.answer)
    ids = [*asked.token_ids[handle.num_tokens :], *answer]

    def predictions(seen: KVState) -> torch.Tensor:
        with seen.append(seen.num_tokens + len(ids)) as tail:
            return model.logits(ids, tail)[-len(answer) :].double().log_softmax(-1)

    spans = budget_spans(state, handle.num_tokens * 3 // 4, scorer)
    piece = Piece(state, torch.tensor(tokens_in(spans)))
    whole, kept = predictions(state), predictions(moved_after(model.empty_state(), [piece], model.rotations))
    return float((whole.exp() * (whole - kept)).sum(-1).mean())


def test_a_selection_takes_the_spans_as_they_are() -> None:
    spans = budget_spans(state_of(torch.rand(90) + 0.1), 50)
    assert Selection(spans=spans).spans == spans
