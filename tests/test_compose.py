"""Merged, composed, weighted and repaired handles on tiny random models: their caches, routes, answers and laws."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import torch
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, convert_to_messages
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.graph import START, StateGraph
from test_opaque import REWRITES
from transformers import AutoModelForCausalLM, LogitsProcessor
from typing_extensions import TypedDict

from langgraph_latent import (
    ChatLatent,
    EdgePolicy,
    EdgeRouter,
    KVHandle,
    LatentChannel,
    LatentNode,
    LatentWorkspace,
    Level,
    Repair,
    Route,
    Selection,
    merge,
)
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.probe import difference
from langgraph_latent.errors import ContextLengthError, RouteError
from langgraph_latent.events import Composed, Diverged, Event, Prefilled, Routed
from langgraph_latent.handle.compose import composed, repaired
from langgraph_latent.handle.segment import Composition
from langgraph_latent.handle.selection import EVERY_KIND, WHOLE, excerpt_of
from langgraph_latent.handle.tokens import unpack_tokens
from langgraph_latent.kv.state import KVState
from langgraph_latent.prompt.prompt import ends_open
from langgraph_latent.router.parity import Parity, remember_parity
from langgraph_latent.testing.catalogue import save_toy
from langgraph_latent.testing.tiny import CHATML
from langgraph_latent.workspace.request import transcript

EVERYTHING = Selection(kinds=EVERY_KIND)

MOVED = EdgePolicy(allow=frozenset({Level.EXACT, Level.MOVED, Level.TEXT}))
THINKING = EdgePolicy(allow=frozenset({Level.EXACT, Level.MOVED, Level.TEXT}), latent_steps=True)
SYSTEM = SystemMessage("be brief")
NOTES = {
    "a": "the report says that hall three lost power at four",
    "b": "the night shift called the electricians later",
    "c": "a door seal was worn and nobody replaced it",
    "d": "the team that reads the report decides",
    "e": "what it knows it hands over",
}
QUESTION = "which team writes the answer?"
MOVABLE = ("llama", "mistral", "llama-yarn", "gemma3_text", "deepseek_v3", "stablelm")
TOLERANCE = 1e-4
Strategy = Literal["boundary", "deviation"]


@pytest.fixture
def ws() -> Any:
    """A workspace whose edges may be composed."""
    with LatentWorkspace(memory="2GiB", router=EdgeRouter(default=MOVED)) as workspace:
        yield workspace
        workspace.check_integrity()


@pytest.fixture(scope="session")
def folder(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    made: dict[str, str] = {}

    def of(name: str) -> str:
        if name not in made:
            is_tiny = name in ("llama", "mistral", "gpt2", "qwen3")
            made[name] = str(tiny_folder(name) if is_tiny else save_toy(tmp_path_factory.mktemp(name), name))
        return made[name]

    return of


@pytest.fixture
def chat(folder: Callable[[str], str], ws: LatentWorkspace) -> ChatLatent:
    return ChatLatent(model=folder("llama"), workspace=ws, max_tokens=8)


def chat_of(folder: Callable[[str], str], name: str, ws: LatentWorkspace) -> ChatLatent:
    return ChatLatent(model=folder(name), workspace=ws, max_tokens=8)


def notes(chat: ChatLatent, names: str = "ab", system: SystemMessage | None = SYSTEM) -> list[KVHandle]:
    """What several readers read, each behind the same system prompt."""
    return [chat.read([*([system] if system else []), HumanMessage(NOTES[name])]) for name in names]


def text_run(chat: ChatLatent, *messages: BaseMessage, **options: Any) -> str:
    """The answer of an empty workspace that inherits nothing."""
    with LatentWorkspace(memory="1GiB") as fresh:
        plain = ChatLatent(model=chat.model, workspace=fresh, max_tokens=chat.max_tokens)
        return str(plain.invoke(list(messages), **options).text)


def re_read(chat: ChatLatent, names: str = "ab") -> str:
    return text_run(chat, SYSTEM, *(HumanMessage(NOTES[name]) for name in names), HumanMessage(QUESTION))


def events(ws: LatentWorkspace, kind: type[Event]) -> list[Any]:
    return [event for event in ws.tracer.events if isinstance(event, kind)]


def route(reply: AIMessage) -> tuple[str, int, str]:
    told = reply.response_metadata["kv_route"]
    return told["route"], told["level"], told["code"]


def behind(model: ResidentModel, state: KVState, ids: Sequence[int]) -> torch.Tensor:
    """Logits after each of some tokens, fed in two calls, (ids, vocab)."""
    with state.append() as tail:
        return torch.cat([model.logits(ids[:1], tail), model.logits(ids[1:], tail)])


def full(model: ResidentModel, ids: Sequence[int], last: int) -> torch.Tensor:
    return model.stock(list(ids), last)


def block_truth(
    model: ResidentModel, handle: KVHandle, written: Sequence[int], biases: dict[int, torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits after `written` behind a handle's tokens by one stock forward, in which every block sees itself only.

    The mask is one float mask over all tokens; `biases` are added per key, by layer (-1: every layer).
    """
    ids = [*handle.token_ids, *written]
    n = len(ids)
    seen = torch.ones(n, n).tril().bool()
    at = 0
    for segment in handle.segments:
        if isinstance(segment.provenance, Composition):
            for block in segment.provenance.blocks:
                assert block.begin >= 0
                seen[at : at + block.num_tokens, :at] = False
                at += block.num_tokens
        else:
            at += segment.num_tokens
    mask = torch.zeros(n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    if biases:
        mask[len(handle.token_ids) :, : len(handle.token_ids)] += biases[-1]
    stock = AutoModelForCausalLM.from_pretrained(model.spec.name, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = stock(torch.tensor([ids]), attention_mask=mask[None, None], use_cache=False).logits[0]
    return logits[-len(written) :]


WRITTEN = [9, 40, 17, 80, 23, 61]


# -- caches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MOVABLE)
def test_a_block_moved_behind_another_head_is_as_one_read_there_with_the_head_hidden(
    name: str, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    """Field cases 28 and 29: the truth is one pass over the tokens in place, what is before the block masked."""
    chat = chat_of(folder, name, ws)
    model = chat.resident()
    assert model.spec.capabilities.can("move"), model.spec.capabilities.refusal("move")
    (whole,) = notes(chat, "a", system=None)
    (head,) = notes(chat, "b")
    handle = composed(head, [excerpt_of(whole, EVERYTHING)])
    assert head.num_tokens > 24  # another offset, past the window of a toy
    assert head.num_tokens + whole.num_tokens > 48
    state = ws.state_of(handle, model)
    hidden = torch.tensor([[0] * head.num_tokens + [1] * whole.num_tokens])
    positions = torch.arange(head.num_tokens, handle.num_tokens)[None]
    with ws.state_of(head, model).append() as tail:
        model.run(whole.token_ids, tail, attention_mask=hidden, position_ids=positions)
        in_place = tail.seal()
    assert difference(behind(model, in_place, WRITTEN), behind(model, state, WRITTEN)) <= TOLERANCE
    plain = full(model, [*handle.token_ids, *WRITTEN], len(WRITTEN))
    assert difference(plain, behind(model, state, WRITTEN)) > 1e-3  # or the test could not fail


@pytest.mark.parametrize("names", ["ab", "abcde"])
def test_merged_blocks_are_as_one_pass_in_which_no_block_sees_another(chat: ChatLatent, names: str) -> None:
    model, ws = chat.resident(), chat.workspace
    assert ws is not None
    handle = merge(notes(chat, names, system=None))
    # without a system prompt the template says nothing first, so each block was read alone
    assert [segment.kind for segment in handle.segments if segment.num_tokens] == ["prompt", "moved"]
    got = behind(model, ws.state_of(handle, model), WRITTEN)
    assert difference(block_truth(model, handle, WRITTEN), got) <= TOLERANCE


@pytest.mark.parametrize("strategy", ["boundary", "deviation"])
@pytest.mark.parametrize("names", ["ab", "abcde"])
@pytest.mark.parametrize("name", MOVABLE)
def test_all_of_it_repaired_is_a_full_pass(
    name: str, names: str, strategy: Strategy, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, name, ws)
    model = chat.resident()
    handle = repaired(merge(notes(chat, names)), Repair(1.0, strategy))
    if refusal := model.spec.capabilities.refusal("batch"):
        reply = chat.invoke(QUESTION, inherit=handle)
        assert route(reply) == ("text", 4, "not_movable")
        assert refusal in reply.response_metadata["kv_route"]["reason"]
        assert reply.text == re_read(chat, names)
        return
    truth = full(model, [*handle.token_ids, *WRITTEN], len(WRITTEN))
    assert difference(truth, behind(model, ws.state_of(handle, model), WRITTEN)) <= TOLERANCE
    reply = chat.invoke(QUESTION, inherit=handle)
    assert route(reply)[:2] == ("cache", 0)
    assert reply.text == re_read(chat, names)
    unrepaired = merge(notes(chat, names))
    assert difference(truth, behind(model, ws.state_of(unrepaired, model), WRITTEN)) > 1e-3


@pytest.mark.parametrize("strategy", ["boundary", "deviation"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_repair_rewrites_as_many_tokens_as_its_ratio_says_and_leaves_the_others(
    name: str, strategy: Strategy, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, name, ws)
    model = chat.resident()
    handles = notes(chat, "abc")
    plain, mended = merge(handles), repaired(merge(handles), Repair(0.25, strategy))
    before, after = ws.state_of(plain, model), ws.state_of(mended, model)
    provenance = mended.segments[-1].provenance
    assert isinstance(provenance, Composition)
    sizes = [block.num_tokens for block in provenance.blocks]
    first = plain.num_plain
    (made,) = [event for event in events(ws, Composed) if event.handle == mended.id]
    num_wanted = sum(-(-size // 4) for size in sizes) if strategy == "boundary" else -(-sum(sizes) // 4)
    assert (made.num_repaired, made.num_tokens, made.kind) == (num_wanted, sum(sizes), "moved")
    changed = set()
    for old, new in zip(before.buffer.layers, after.buffer.layers, strict=True):
        pair = zip(old.view(0, plain.num_tokens), new.view(0, plain.num_tokens), strict=True)
        changed |= {int(at) for a, b in pair for at in (a - b).abs().amax((0, 1, 3)).nonzero()}
    if strategy == "boundary":
        expected, at = set(), first
        for size in sizes:
            expected |= set(range(at, at + -(-size // 4)))
            at += size
        assert changed == expected
    else:
        assert changed <= set(range(first, plain.num_tokens))
        assert 0 < len(changed) <= num_wanted


def test_the_boundary_of_each_block_is_repaired_and_the_most_changed_token_by_deviation(
    chat: ChatLatent, ws: LatentWorkspace
) -> None:
    """A block taken without the tokens before it deviates where these mattered (against one pass)."""
    model = chat.resident()
    handles = notes(chat, "ab")
    plain = merge(handles)
    num_moved = plain.num_tokens - plain.num_plain
    one = repaired(plain, Repair(1 / num_moved, "deviation"))
    moved, mended = ws.state_of(plain, model), ws.state_of(one, model)
    (made,) = [event for event in events(ws, Composed) if event.handle == one.id]
    assert made.num_repaired == 1
    with model.empty_state().append() as tail:
        model.prefill(plain.token_ids, tail)
        truth = tail.seal()
    values = [state.buffer.layers[1].view(plain.num_plain, plain.num_tokens)[1] for state in (truth, moved, mended)]
    most = int((values[0] - values[1]).square().sum((0, 1, 3)).argmax())
    changed = (values[2] - values[1]).abs().amax((0, 1, 3)).nonzero().flatten().tolist()
    assert changed == [most]
    assert difference(values[0][:, :, most], values[2][:, :, most]) < 1


# -- weights and layers ----------------------------------------------------------------------------------------------


def weighted(handles: Sequence[KVHandle], **options: Any) -> KVHandle:
    return composed(handles[0], [excerpt_of(handles[1], Selection(**options))])


def test_a_weight_of_1_is_none_and_of_0_is_absence(chat: ChatLatent, ws: LatentWorkspace) -> None:
    a, b, c = notes(chat, "abc")
    assert weighted([a, b], weight=1.0).id == merge([a, b]).id
    assert weighted([a, b], weight=0).id == a.id
    gone = chat.compose([a, b, c], select=[WHOLE, Selection(weight=0), WHOLE])
    assert gone == chat.compose([a, c], select=WHOLE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("weight", [2.0, 0.1])
def test_a_weight_is_what_its_logarithm_in_the_mask_is(
    name: str, weight: float, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, name, ws)
    model = chat.resident()
    handles = notes(chat, "ab", system=None)
    plain, handle = merge(handles), weighted(handles, weight=weight)
    got = behind(model, ws.state_of(handle, model), WRITTEN)
    assert difference(behind(model, ws.state_of(plain, model), WRITTEN), got) > 1e-3
    if name == "llama":  # no windows: one mask for all layers
        bias = torch.zeros(handle.num_tokens)
        bias[handle.num_plain :] = torch.tensor(weight).log()
        assert difference(block_truth(model, handle, WRITTEN, {-1: bias}), got) <= TOLERANCE
    with ws.state_of(handle, model).append() as tail:  # in one call, one by one, and with another request
        one_by_one = torch.stack([model.prefill([token], tail) for token in WRITTEN])
    assert difference(got, one_by_one) <= TOLERANCE
    with ws.state_of(handle, model).append() as tail, ws.state_of(plain, model).append() as other:
        both = model.run_packed([(WRITTEN, tail), (WRITTEN[:2], other)])
    assert difference(got[-1], both[0]) <= TOLERANCE
    assert difference(behind(model, ws.state_of(plain, model), WRITTEN)[1], both[1]) <= TOLERANCE


def test_all_layers_are_as_none_given_and_one_layer_is_not(chat: ChatLatent, ws: LatentWorkspace) -> None:
    model = chat.resident()
    handles = notes(chat, "ab")
    plain = behind(model, ws.state_of(merge(handles), model), WRITTEN)
    every = behind(model, ws.state_of(weighted(handles, layers=(0, 1, 2)), model), WRITTEN)
    first = behind(model, ws.state_of(weighted(handles, layers=(0,)), model), WRITTEN)
    absent = behind(model, ws.state_of(handles[0], model), WRITTEN)
    assert difference(plain, every) <= 1e-5
    assert difference(plain, first) > 1e-3
    assert difference(absent, first) > 1e-3


def test_two_weighted_requests_at_once_answer_as_each_alone(chat: ChatLatent, ws: LatentWorkspace) -> None:
    handles = notes(chat, "ab")
    inherited = [weighted(handles, weight=5.0), weighted(handles, weight=0.05), merge(handles), handles[0]]
    alone = [chat.invoke(QUESTION, inherit=handle, max_tokens=12).text for handle in inherited]
    with ThreadPoolExecutor(4) as threads:
        ask = lambda handle: chat.invoke(QUESTION, inherit=handle, max_tokens=12).text  # noqa: E731
        for _ in range(3):
            assert list(threads.map(ask, inherited)) == alone


def test_a_weight_counts_when_latent_steps_are_taken_behind_it(chat: ChatLatent, ws: LatentWorkspace) -> None:
    model = chat.resident()
    remember_parity(model.spec.identity, Parity(1, 2, 0.1, 0.0, 0.2))
    handles = notes(chat, "ab")
    plain, heavy = merge(handles), weighted(handles, weight=50.0)
    last = [
        _last_values(ws.state_of(chat.think(QUESTION, inherit=handle, steps=2), model)) for handle in (plain, heavy)
    ]
    with ws.state_of(heavy, model).append() as tail:
        model.prefill(WRITTEN[:-1], tail)
        thinking = tail.seal()
    with thinking.append() as tail, thinking.append() as fed:
        model.think(WRITTEN[-1], 0, tail)
        model.prefill(WRITTEN[-1:], fed)
        assert difference(_last_values(fed.seal()), _last_values(tail.seal())) <= TOLERANCE
    assert difference(last[0], last[1]) > 1e-3


def _last_values(state: KVState) -> torch.Tensor:
    return state.layer(len(state.kinds) - 1)[1][:, :, -1]


# -- routes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["merged", "several", "composed"])
def test_an_edge_that_allows_it_is_composed_and_says_so(how: str, chat: ChatLatent, ws: LatentWorkspace) -> None:
    handles = notes(chat)
    inherit: Any = {"merged": merge(handles), "several": handles, "composed": chat.compose(handles, system="be wise")}
    before = len(events(ws, Prefilled))
    reply = chat.invoke(QUESTION, inherit=inherit[how])
    assert route(reply) == ("cache", 1, "composed")
    assert [(event.route, event.level, event.code) for event in events(ws, Routed)] == [("cache", 1, "composed")]
    (prefilled,) = events(ws, Prefilled)[before:]
    made = merge(handles) if how != "composed" else inherit[how]
    assert prefilled.cache_read == made.num_tokens
    (composed_once,) = events(ws, Composed)
    assert (composed_once.handle, composed_once.num_repaired) == (made.id, 0)
    assert ws.handle(reply).spans[: len(made.spans)] == made.spans
    following = chat.invoke("and then?", inherit=ws.handle(reply))
    assert route(following) == ("cache", 1, "composed")
    assert len(events(ws, Composed)) == 1


@pytest.mark.parametrize("how", ["merged", "several", "composed"])
def test_an_edge_that_does_not_allow_it_reads_anew_with_the_text_runs_answer(
    how: str, folder: Callable[[str], str]
) -> None:
    with LatentWorkspace() as ws:
        chat = chat_of(folder, "llama", ws)
        handles = notes(chat)
        inherit: Any = {"merged": merge(handles), "several": handles, "composed": chat.compose(handles, system="so")}
        reply = chat.invoke(QUESTION, inherit=inherit[how])
        assert route(reply) == ("text", 4, "not_first" if how == "several" else "not_allowed")
        told = (SystemMessage("so") if how == "composed" else SYSTEM, *(HumanMessage(NOTES[name]) for name in "ab"))
        assert reply.text == text_run(chat, *told, HumanMessage(QUESTION))
        assert not events(ws, Composed)
        assert events(ws, Routed)[-1].level == 4


@pytest.mark.parametrize("name", ["gpt2", "opt", "mamba2"])
def test_a_model_that_cannot_move_refuses_with_a_reason_and_reads_anew(
    name: str, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    """Field case 61: nothing is composed where positions can't be changed by a rotation."""
    chat = chat_of(folder, name, ws)
    capabilities = chat.resident().spec.capabilities
    assert not capabilities.can("move")
    handles = notes(chat)
    for inherit in (merge(handles), chat.compose(handles, system=SYSTEM)):
        reply = chat.invoke(QUESTION, inherit=inherit)
        assert route(reply) == ("text", 4, "not_movable")
        assert capabilities.refusal("move") in reply.response_metadata["kv_route"]["reason"]
        assert reply.text == re_read(chat)
    assert chat.invoke(QUESTION, inherit=handles).text == re_read(chat)
    assert not events(ws, Composed)
    strict = EdgePolicy(allow=frozenset({Level.MOVED}))
    ws.router.policies["*", "*"] = strict
    with pytest.raises(RouteError, match="can't be composed"):
        chat.invoke(QUESTION, inherit=merge(handles))


def from_node(chat: ChatLatent, node: str, text: str) -> KVHandle:
    return chat.read([SYSTEM, HumanMessage(text)], config={"metadata": {"langgraph_node": node}})


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize(
    "policy",
    [
        EdgePolicy(),
        EdgePolicy(allow=MOVED.allow, judge=True),
        EdgePolicy(allow=MOVED.allow, route=Route.TEXT),
    ],
    ids=["not allowed", "judge", "text"],
)
@pytest.mark.parametrize("how", ["merged", "several"])
def test_the_policy_of_every_block_that_is_moved_counts(
    how: str, policy: EdgePolicy, position: int, chat: ChatLatent, ws: LatentWorkspace
) -> None:
    handles = [from_node(chat, name, NOTES[name]) for name in "abc"]
    ws.router.policies["abc"[position], ""] = policy
    reply = chat.invoke(QUESTION, inherit=merge(handles) if how == "merged" else handles)
    assert route(reply)[:2] == ("text", 4)
    assert reply.text == re_read(chat, "abc")
    assert not events(ws, Composed)


def test_a_judge_reads_anew(chat: ChatLatent, ws: LatentWorkspace) -> None:
    ws.router.policies["*", "*"] = EdgePolicy(allow=MOVED.allow, judge=True)
    for inherit in (merge(notes(chat)), notes(chat)):
        reply = chat.invoke(QUESTION, inherit=inherit)
        assert route(reply)[:2] == ("text", 4)
        assert reply.text == re_read(chat)


def test_a_longer_context_than_the_policy_takes_counts_what_was_merged(chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Field case 69."""
    handles = notes(chat)
    merged = merge(handles)
    limit = max(handle.num_tokens for handle in handles)
    ws.router.policies["*", "*"] = EdgePolicy(allow=MOVED.allow, max_context_tokens=merged.num_tokens - 1)
    assert limit < merged.num_tokens - 1
    for inherit in (merged, handles):
        with pytest.raises(RouteError, match=f"has {merged.num_tokens} tokens"):
            chat.invoke(QUESTION, inherit=inherit)
    ws.router.policies["*", "*"] = EdgePolicy(allow=MOVED.allow, max_context_tokens=merged.num_tokens)
    assert route(chat.invoke(QUESTION, inherit=merged))[1] == 1


def test_the_policys_repair_is_made_where_the_receiver_merges(chat: ChatLatent, ws: LatentWorkspace) -> None:
    ws.router.policies["*", "*"] = EdgePolicy(allow=MOVED.allow, repair=Repair(1.0))
    handles = notes(chat)
    reply = chat.invoke(QUESTION, inherit=handles)
    assert route(reply)[:2] == ("cache", 0)
    assert reply.text == re_read(chat)
    (made,) = events(ws, Composed)
    assert made.num_repaired == made.num_tokens


def test_what_the_template_says_otherwise_is_read_anew_and_noted(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 67: a composed handle that is not used is in the trace."""
    template = "{{ style }}" + CHATML
    chat = ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=8)
    merged = merge(notes(chat))
    options: Any = {"template_options": {"style": "formal"}}
    reply = chat.invoke(QUESTION, inherit=merged, **options)
    assert route(reply) == ("text", 4, "diverged")
    (diverged,) = events(ws, Diverged)
    assert (diverged.handle, diverged.num_inherited) == (merged.id, merged.num_tokens)
    assert not events(ws, Composed)
    told = (SYSTEM, *(HumanMessage(NOTES[name]) for name in "ab"), HumanMessage(QUESTION))
    assert reply.text == text_run(chat, *told, **options)


# -- identity --------------------------------------------------------------------------------------------------------


def test_composing_behind_the_same_system_prompt_is_appending(chat: ChatLatent, ws: LatentWorkspace) -> None:
    (a,) = notes(chat, "a")
    assert merge([a]) is a
    assert chat.compose(a) == a
    assert chat.compose(a, system=SYSTEM) is a
    reply = chat.invoke(QUESTION, inherit=chat.compose(a, system=SYSTEM))
    assert route(reply)[:2] == ("cache", 0)
    assert reply.text == re_read(chat, "a")
    with LatentWorkspace() as other:
        again = chat_of(lambda _: chat.model, "llama", other)
        (plain,) = notes(again, "a")
        assert other.handle(again.invoke(QUESTION, inherit=plain)) == ws.handle(reply)
        mine, theirs = (w.state_of(ws.handle(reply), c.resident()) for w, c in ((ws, chat), (other, again)))
        assert mine.equals(theirs)


def test_a_plain_prompt_never_meets_a_composed_cache_of_the_same_tokens(chat: ChatLatent, ws: LatentWorkspace) -> None:
    plain_answer = re_read(chat)
    messages = [SYSTEM, *(HumanMessage(NOTES[name]) for name in "ab"), HumanMessage(QUESTION)]
    merged = merge(notes(chat))
    first = chat.invoke(QUESTION, inherit=merged)
    assert ws.handle(first).token_ids[: merged.num_tokens] == merged.token_ids
    plain = chat.invoke(messages)
    assert plain.text == plain_answer
    assert ws.handle(plain).token_ids[: merged.num_tokens] == merged.token_ids  # or the test could not fail
    assert chat.invoke(QUESTION, inherit=merged).text == first.text
    with LatentWorkspace(router=EdgeRouter(default=MOVED)) as other:
        again = chat_of(lambda _: chat.model, "llama", other)
        assert again.invoke(messages).text == plain_answer
        second = again.invoke(QUESTION, inherit=merge(notes(again)))
        assert (second.text, route(second)[1]) == (first.text, 1)
        state, composed_state = (
            other.state_of(handle, again.resident()) for handle in (other.handle(second), ws.handle(plain))
        )
        assert not state.equals(composed_state)


RECIPES: dict[str, Callable[[ChatLatent, list[KVHandle]], KVHandle]] = {
    "merged": lambda chat, handles: merge(handles),
    "repaired": lambda chat, handles: repaired(merge(handles), Repair(0.3)),
    "deviation": lambda chat, handles: repaired(merge(handles), Repair(0.3, "deviation")),
    "weighted": lambda chat, handles: weighted(handles, weight=20.0),
    "layers": lambda chat, handles: weighted(handles, layers=(1,)),
    "composed": lambda chat, handles: chat.compose(handles, system="be wise", repair=Repair(0.2)),
    "nested": lambda chat, handles: merge([merge(handles[1:]), handles[0]]),
    "part": lambda chat, handles: chat.compose(handles, system="so", select=Selection(spans=((20, 30), (33, 40)))),
}


def going_on(ws: LatentWorkspace, chat: ChatLatent, handle: KVHandle) -> tuple[str, torch.Tensor]:
    reply = chat.invoke(QUESTION, inherit=handle, max_tokens=10)
    assert route(reply)[:2] == ("cache", 1)
    return reply.text, behind(chat.resident(), ws.state_of(handle, chat.resident()), WRITTEN)


@pytest.mark.parametrize("provenance", RECIPES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_laws_3_and_4_a_composed_handle_gives_the_same_answers_wherever_it_goes(
    name: str, provenance: str, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, name, ws)
    handle = RECIPES[provenance](chat, notes(chat, "abc"))
    text, logits = going_on(ws, chat, handle)
    blob = chat.export_kv_cache(handle) or b""
    ws.evict(handle)
    assert going_on(ws, chat, handle)[0] == text
    ws.pool.clear()
    restored = KVHandle.from_dict(json.loads(json.dumps(handle.to_dict())))
    again, other_logits = going_on(ws, chat, restored)
    assert again == text
    assert difference(logits, other_logits) <= 1e-5
    for is_exported in (False, True):
        with LatentWorkspace(router=EdgeRouter(default=MOVED)) as other:
            receiver = chat_of(folder, name, other)
            received = receiver.ingest_kv_cache(blob) if is_exported else restored
            assert received == handle
            again, other_logits = going_on(other, receiver, received)
            assert again == text
            assert difference(logits, other_logits) <= 1e-5
            other.check_integrity()


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_handle_that_was_ingested_can_be_merged(name: str, folder: Callable[[str], str], ws: LatentWorkspace) -> None:
    """A file holds only what a window still sees; what is missing to move it is read anew."""
    chat = chat_of(folder, name, ws)
    handles = notes(chat, "ab")
    expected = going_on(ws, chat, merge(handles))
    blobs = [chat.export_kv_cache(handle) or b"" for handle in handles]
    with LatentWorkspace(router=EdgeRouter(default=MOVED)) as other:
        receiver = chat_of(folder, name, other)
        received = [receiver.ingest_kv_cache(blob) for blob in blobs]
        text, logits = going_on(other, receiver, merge(received))
        assert text == expected[0]
        assert difference(expected[1], logits) <= 1e-5


@pytest.mark.parametrize("on_failure", ["raise", "fall_back"])
def test_what_is_composed_of_a_composition_whose_lead_was_ingested_past_its_window_is_made_whole(
    on_failure: Any, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    ws.router.default = EdgePolicy(allow=MOVED.allow, on_failure=on_failure)
    chat = ChatLatent(model=str(tiny_folder("mistral")), workspace=ws, max_tokens=4)
    with LatentWorkspace(router=EdgeRouter(default=ws.router.default)) as whole:
        other = ChatLatent(model=chat.model, workspace=whole, max_tokens=4)
        parts = [other.read(" ".join(NOTES.values())), other.read("another report")]
        twice = other.compose(other.compose(parts), system="be brief")
        expected = other.invoke("and?", inherit=twice).text
        blob = other.export_kv_cache(parts[0]) or b""
    again = chat.compose(chat.compose([chat.ingest_kv_cache(blob), chat.read("another report")]), system="be brief")
    assert again == twice
    assert chat.export_kv_cache(again)
    reply = chat.invoke("and?", inherit=again)
    assert reply.response_metadata["kv_route"]["level"] == 1
    assert reply.text == expected


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_law_5_many_threads_over_composed_handles_change_neither_them_nor_their_origins(
    name: str, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, name, ws)
    model = chat.resident()
    handles = notes(chat, "abc")
    made = [make(chat, handles) for make in RECIPES.values()]
    states = [ws.state_of(handle, model) for handle in handles]
    before = [state.checksum() for state in states]
    alone = [chat.invoke(QUESTION, inherit=handle, max_tokens=4).text for handle in made]
    for handle in made:
        ws.evict(handle)
    with ThreadPoolExecutor(6) as threads:
        jobs = [
            threads.submit(lambda h=handle: chat.invoke(QUESTION, inherit=h, max_tokens=4).text) for handle in made * 3
        ]
        assert [job.result() for job in jobs] == alone * 3
    assert [state.checksum() for state in states] == before
    assert [ws.state_of(handle, model).checksum() for handle in handles] == before
    ws.check_integrity()


def test_the_answer_to_a_merged_question_can_be_asked_on_and_is_merged_again(
    chat: ChatLatent, ws: LatentWorkspace
) -> None:
    answers = [ws.handle(chat.invoke([SYSTEM, HumanMessage(NOTES[name])])) for name in "ab"]
    merged = merge(answers)
    assert ends_open(merged)
    reply = chat.invoke(QUESTION, inherit=merged)
    assert route(reply)[:2] == ("cache", 1)
    on = chat.invoke("and?", inherit=ws.handle(reply))
    assert ws.handle(on).tokens.startswith(ws.handle(reply).tokens)
    again = merge([ws.handle(on), *notes(chat, "c")])
    assert route(chat.invoke(QUESTION, inherit=again))[:2] == ("cache", 1)
    assert [span.source for span in again.spans]
    only = chat.compose(answers, system="so", select=Selection(answer_only=True))
    assert [span.kind for span in only.spans] == ["system", "generated", "generated"]
    assert route(chat.invoke(QUESTION, inherit=only))[:2] == ("cache", 1)


# -- latent steps ----------------------------------------------------------------------------------------------------


def test_latent_steps_are_taken_only_where_the_edge_takes_them_and_they_lose_nothing(
    chat: ChatLatent, ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Field case 67: what is refused is in the trace with its reason."""
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    thought = chat.think([SYSTEM, HumanMessage(NOTES["a"])], steps=3)
    assert [span.kind for span in thought.spans][-1] == "latent"
    expected = re_read(chat, "a")
    refused = chat.invoke(QUESTION, inherit=thought)
    assert (route(refused), refused.text) == (("text", 4, "no_latent_steps"), expected)
    ws.router.policies["*", "*"] = THINKING
    unmeasured = chat.invoke(QUESTION, inherit=thought)
    assert (route(unmeasured), unmeasured.text) == (("text", 4, "no_latent_steps"), expected)
    assert "never measured" in events(ws, Routed)[-1].reason
    remember_parity(chat.spec.identity, Parity(5, 3, -0.2, -0.3, -0.1))
    assert "lose" in chat.invoke(QUESTION, inherit=thought).response_metadata["kv_route"]["reason"]
    remember_parity(chat.spec.identity, Parity(5, 3, 0.2, 0.1, 0.3))
    taken = chat.invoke(QUESTION, inherit=thought)
    assert route(taken)[:2] == ("cache", 1)
    ws.pool.clear()
    rebuilt = chat.invoke(QUESTION, inherit=KVHandle.from_dict(thought.to_dict()))
    assert rebuilt.text == taken.text
    merged = merge([*notes(chat, "b"), thought])
    moved = chat.invoke(QUESTION, inherit=merged)
    assert route(moved)[:2] == ("cache", 1)
    assert [event.code for event in events(ws, Routed)][:3] == ["no_latent_steps"] * 3


def test_thinking_no_steps_is_reading(chat: ChatLatent, ws: LatentWorkspace) -> None:
    messages = [SYSTEM, HumanMessage(NOTES["a"])]
    assert chat.think(messages, steps=0) == chat.read(messages)


# -- LangGraph -------------------------------------------------------------------------------------------------------


class Fan(TypedDict, total=False):
    latent: Annotated[KVHandle | None, LatentChannel(policy="merge")]
    answer: str


def fan(chat: ChatLatent, **options: Any) -> StateGraph:
    builder = StateGraph(Fan)
    for name in "abc":
        prompt = [("system", "be brief"), ("human", NOTES[name])]
        builder.add_node(name, LatentNode(chat, prompt=prompt, mode="read", inherit=()))
        builder.add_edge(START, name)
        builder.add_edge(name, "answer")
    builder.add_node("answer", LatentNode(chat, writes="answer", **options))
    return builder


def test_a_fan_in_merges_through_a_checkpoint(folder: Callable[[str], str], tmp_path: Path) -> None:
    config: Any = {"configurable": {"thread_id": "1"}}
    answers = []
    for _ in range(2):
        with (
            SqliteSaver.from_conn_string(str(tmp_path / "db")) as saver,
            LatentWorkspace(router=EdgeRouter(default=MOVED)) as ws,
        ):
            chat = chat_of(folder, "llama", ws)
            graph = fan(chat, prompt=QUESTION).compile(checkpointer=saver, interrupt_before=["answer"])
            if not answers:
                graph.invoke({}, config)
                kept = graph.get_state(config).values["latent"]
                assert kept.provenance_digest
                assert [span.source for span in kept.spans if span.kind == "prompt"] == ["a", "b", "c"]
                before = graph.get_state(config).config
            state = graph.invoke(None, before)
            answers.append(state["answer"])
            (routed,) = events(ws, Routed)
            assert (routed.level, routed.code, routed.call_site.node) == (1, "composed", "answer")
            made = [event for event in events(ws, Composed) if event.call_site.node == "answer"]
            assert len(made) == 1
    assert answers[0] == answers[1]


@pytest.mark.parametrize("inherit", ["compose", {"latent": "compose"}])
def test_a_node_composes_behind_its_own_system_prompt(inherit: Any, folder: Callable[[str], str]) -> None:
    prompt = [("system", "you decide"), ("human", QUESTION)]
    told = [SystemMessage("you decide"), *(HumanMessage(NOTES[name]) for name in "abc"), HumanMessage(QUESTION)]
    for policy, level in ((MOVED, 1), (EdgePolicy(), 4)):
        with LatentWorkspace(router=EdgeRouter(default=policy)) as ws:
            chat = chat_of(folder, "llama", ws)
            state = fan(chat, prompt=prompt, inherit=inherit).compile().invoke({})
            (routed,) = events(ws, Routed)
            assert routed.level == level
            assert [message["content"] for message in state["latent"].messages][:-1] == [m.content for m in told]
            if level == 4:
                assert state["answer"] == text_run(chat, *told)
    with LatentWorkspace(router=EdgeRouter(default=EdgePolicy(allow=MOVED.allow, repair=Repair(1.0)))) as ws:
        chat = chat_of(folder, "llama", ws)
        state = fan(chat, prompt=prompt, inherit=inherit).compile().invoke({})
        assert state["answer"] == text_run(chat, *told)
        made = events(ws, Composed)[-1]  # behind that of the channel's merge, from which it takes
        assert made.num_repaired == made.num_tokens


def test_a_node_takes_what_it_selects(chat: ChatLatent, ws: LatentWorkspace) -> None:
    a, b = (ws.handle(chat.invoke([SYSTEM, HumanMessage(NOTES[name])])) for name in "ab")
    ws.router.policies["*", "*"] = EdgePolicy(allow=MOVED.allow, repair=Repair(0.5))
    options: Any = {"select": Selection(answer_only=True), "inherit": {"x": "compose"}}
    node = LatentNode(chat, prompt=[("system", "so"), ("human", QUESTION)], writes="answer", **options)
    update = node.invoke({"x": [a, b]})
    kinds = [span.kind for span in update["latent"].spans]
    assert kinds == ["system", "generated", "generated", "prompt", "generated"]
    assert events(ws, Composed)[-1].num_repaired > 0


def test_a_node_thinks(chat: ChatLatent, ws: LatentWorkspace, tmp_path: Path) -> None:
    update = LatentNode(chat, prompt=NOTES["a"], mode="think", steps=2).invoke({})
    assert [(span.kind, span.end - span.begin) for span in update["latent"].spans][-1] == ("latent", 2)


class EndsAt(LogitsProcessor):
    """Lets an answer end by itself as its token of this number."""

    def __init__(self, end: int, prompt: int, number: int) -> None:
        self._end, self._length = end, prompt + number

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, self._end] = 0
        return allowed if input_ids.shape[1] >= self._length else scores  # type: ignore[return-value]


def test_an_answer_alone_is_composed_whether_it_was_cut_or_ended_by_itself(
    chat: ChatLatent, ws: LatentWorkspace
) -> None:
    question = [HumanMessage(QUESTION)]
    end, num_asked = chat.tokenizer.convert_tokens_to_ids("<|im_end|>"), chat.get_num_tokens_from_messages(question)
    ends = EndsAt(end, num_asked + 6, 3)
    for options, reason in (({"max_tokens": 5}, "length"), ({"logits_processor": [ends], "max_tokens": 20}, "stop")):
        reply = chat.invoke(question, **options)
        assert reply.response_metadata["finish_reason"] == reason
        alone = chat.compose([reply], system="You write.", select=Selection(answer_only=True))
        answer = chat.invoke("and then?", inherit=alone, max_tokens=4)
        assert answer.response_metadata["kv_route"]["code"] == "composed"
        assert ws.handle(answer).tokens.startswith(alone.tokens)


def test_a_composed_cache_that_a_template_leaves_behind_its_blocks_is_no_part_of_a_plain_one(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """The template tells an older answer otherwise than it was sampled: the prompt departs behind the moved blocks."""
    template = REWRITES.replace("not loop.last", "not loop.last and loop.length > 5")
    chat = ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=8)
    answered = chat.handle(chat.invoke(QUESTION, inherit=merge(notes(chat))))
    assert answered.provenance_digest
    reply = chat.invoke("and who reads it?", inherit=answered)
    assert route(reply) == ("text", 4, "diverged")
    assert not chat.handle(reply).provenance_digest
    messages = convert_to_messages(list(answered.messages))
    assert reply.text == text_run(chat, *messages, HumanMessage("and who reads it?"))
    again = chat.invoke([*messages, HumanMessage("and who reads it?")])
    assert again.text == reply.text


def test_a_moved_thought_is_closed_before_the_next_question(chat: ChatLatent, ws: LatentWorkspace) -> None:
    """Latent steps stand in an assistant's turn, wherever they were moved."""
    ws.router.default = THINKING
    note, thought = notes(chat, "a")[0], chat.think([HumanMessage(NOTES["b"])], steps=3)
    prompts = chat.resident().prompts
    for handle in (thought, merge([note, thought]), chat.compose(thought, system="You write.")):
        rest = prompts.extend(handle, [{"role": "user", "content": "and?"}], reply=True).tokens[len(handle.tokens) :]
        assert str(chat.tokenizer.decode(unpack_tokens(rest))).startswith("<|im_end|>")


def test_only_what_stands_for_a_thought_is_left_out_of_a_text(chat: ChatLatent) -> None:
    thought = chat.think([HumanMessage(NOTES["a"])], steps=2)
    assert [message["role"] for message in thought.messages] == ["user", "assistant"]
    assert [message["role"] for message in transcript(thought)] == ["user"]
    silent = chat.read([HumanMessage("a"), AIMessage(""), HumanMessage("b")])
    assert transcript(silent) == silent.messages


def test_a_thought_that_is_longer_than_the_model_takes_is_refused_before_it_is_read(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=str(tiny_folder("llama", max_position_embeddings=64)), workspace=ws)
    with pytest.raises(ContextLengthError):
        chat.think([HumanMessage("a b c")], steps=60)
    assert not events(ws, Prefilled)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_a_latent_step_is_as_long_as_what_the_embedding_module_gives(
    name: str, folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    """Gemma's scales its weight: what is fed in place of its output must be as long."""
    model = chat_of(folder, name, ws).resident()
    embed: Any = model.model.get_input_embeddings()
    with torch.no_grad():
        norms = embed(torch.arange(len(embed.weight))).norm(dim=-1)
        fed = model._alignment.embedding(torch.randn(1, 5, embed.weight.shape[1]))
    assert fed.norm(dim=-1).flatten().tolist() == pytest.approx([float(norms.mean())] * 5, rel=1e-4)


def test_latent_steps_do_not_use_up_the_share_that_is_repaired(chat: ChatLatent, ws: LatentWorkspace) -> None:
    thought = chat.think([HumanMessage(NOTES["b"])], steps=12)
    merged = repaired(merge([notes(chat, "a")[0], thought]), Repair(0.3, "deviation"))
    ws.state_of(merged, chat.resident())
    made = events(ws, Composed)[-1]
    num_told = made.num_tokens - 12
    assert made.num_repaired == math.ceil(0.3 * num_told)


def test_the_same_handle_twice_is_composed_once(chat: ChatLatent) -> None:
    note = notes(chat, "a")[0]
    once = chat.compose(note, system="You write.")
    assert chat.compose([note, note], system="You write.") == once


def test_branches_that_need_the_same_composed_cache_make_it_once(chat: ChatLatent, ws: LatentWorkspace) -> None:
    merged = merge(notes(chat))
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda _: chat.invoke(QUESTION, inherit=merged).text, range(4)))
    assert len(set(replies)) == 1
    assert len(events(ws, Composed)) == 1


@pytest.mark.parametrize("policy", [EdgePolicy(judge=True), EdgePolicy(), EdgePolicy(route=Route.TEXT)])
def test_a_composed_cache_is_read_anew_where_what_comes_behind_it_can_not_be_joined(
    policy: EdgePolicy, chat: ChatLatent, ws: LatentWorkspace
) -> None:
    a, b, c = (from_node(chat, name, NOTES[name]) for name in "abc")
    ws.router.policies["c", ""] = policy
    reply = chat.invoke(QUESTION, inherit=[merge([a, b]), c])
    assert route(reply)[:2] == ("text", 4)
    assert reply.text == re_read(chat, "abc")
    assert not chat.handle(reply).provenance_digest


def test_a_thought_that_comes_second_is_left_out_of_the_text(folder: Callable[[str], str]) -> None:
    with LatentWorkspace() as ws:
        chat = chat_of(folder, "llama", ws)
        thought = chat.think([SYSTEM, HumanMessage(NOTES["b"])], steps=3)
        reply = chat.invoke(QUESTION, inherit=[notes(chat, "a")[0], thought])
        assert reply.text == re_read(chat, "ab")


def test_a_budget_of_a_cache_that_was_ingested_past_its_window(
    folder: Callable[[str], str], ws: LatentWorkspace
) -> None:
    chat = chat_of(folder, "mistral", ws)
    long = chat.read([SYSTEM, HumanMessage(" ".join(NOTES.values()))])
    expected = chat.within_budget(long, 40)
    with LatentWorkspace(router=EdgeRouter(default=MOVED)) as other:
        there = chat_of(folder, "mistral", other)
        assert there.within_budget(there.ingest_kv_cache(chat.export_kv_cache(long)), 40) == expected


def test_a_part_of_a_message_is_not_exact_even_if_it_is_computed_anew(chat: ChatLatent) -> None:
    """Text would tell the message whole."""
    note = notes(chat, "a")[0]
    whole = chat.compose(note, system="You write.", repair=Repair(1.0))
    part = chat.compose(note, system="You write.", select=Selection(spans=((12, 20),)), repair=Repair(1.0))
    assert whole.is_exact
    assert not part.is_exact
