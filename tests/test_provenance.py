"""Provenances, selections and merges as plain values; no model, no tensors.

What is impossible is refused, what is possible survives every trip.
"""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
import tracemalloc
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_handle import TRIPS

from langgraph_latent import Repair, Selection, merge
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle import KVHandle, Segment
from langgraph_latent.handle.compose import MAX_BLOCKS, compose_after, composed, repaired, without_contained
from langgraph_latent.handle.packing import MAX_TOKENS
from langgraph_latent.handle.segment import MAX_DEPTH, Block, Composition, LatentSteps
from langgraph_latent.handle.selection import EVERY_KIND, WHOLE, Excerpt, excerpt_of
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.prompt.prompt import ends_open
from langgraph_latent.router.composed import needs_packed_attention

EVERYTHING = Selection(kinds=EVERY_KIND)

MODEL = "5f" * 16
NAN = float("nan")
SYSTEM = ("system", "reader", [1, 2, 3], "be brief")


def handle_of(*rows: tuple[str, str, list[int], str], model: str = MODEL, tenant: str = "") -> KVHandle:
    """A handle grown segment by segment, with one message each."""
    handle = KVHandle.root(model, tenant)
    for kind, source, ids, text in rows:
        role = {"system": "system", "prompt": "user"}.get(kind, "assistant")
        provenance = LatentSteps(len(ids)) if kind == "latent" else None
        messages = [{"role": role, "content": text}]
        handle = handle.extend(kind, source, pack_tokens(ids), messages, bytes_per_token=100, provenance=provenance)
    return handle


def read(source: str, *ids: int, model: str = MODEL, tenant: str = "") -> KVHandle:
    """A system prompt that all share, and after it what one node read."""
    return handle_of((*SYSTEM[:1], "", *SYSTEM[2:]), ("prompt", source, [*ids], source), model=model, tenant=tenant)


def answered(source: str, *ids: int) -> KVHandle:
    return read(source, *ids).extend(
        "generated", source, pack_tokens([90, 91]), [{"role": "assistant", "content": f"{source} says"}], 100
    )


def contents(handle: KVHandle) -> list[str]:
    return [message["content"] for message in handle.messages]


def kinds(handle: KVHandle) -> list[tuple[int, int, str, str]]:
    return [(span.begin, span.end, span.kind, span.source) for span in handle.spans]


# -- impossible values -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0, 0.0, -0.1, 1.0001, 2, NAN, math.inf, True, "0.5", None])
def test_a_repair_of_an_impossible_ratio_is_refused(ratio: Any) -> None:
    with pytest.raises(ConfigError, match="ratio="):
        Repair(ratio)


@pytest.mark.parametrize("strategy", ["", "random", None, 1, ["boundary"]])
def test_a_repair_of_an_unknown_strategy_names_the_known_ones(strategy: Any) -> None:
    with pytest.raises(ConfigError, match="boundary, deviation"):
        Repair(0.5, strategy)


def test_possible_repairs_are_taken() -> None:
    assert (Repair(1).ratio, Repair(1e-9).strategy, Repair(0.5, "deviation").strategy) == (1, "boundary", "deviation")


@pytest.mark.parametrize("span", [(0, 0), (3, 2), (-1, 2), (0, 6), (5, 6), (0.0, 2), (0, True), ("0", 1), (None, 1)])
def test_a_block_outside_of_its_handle_is_refused(span: Any) -> None:
    assert read("a", 10, 11).num_tokens == 5
    with pytest.raises(ConfigError, match=r"tokens .* are not in a handle of 5"):
        Block(read("a", 10, 11), *span)


@pytest.mark.parametrize("weight", [0, -1, -0.1, NAN, math.inf, True, "2", None])
def test_a_block_of_an_impossible_weight_is_refused(weight: Any) -> None:
    with pytest.raises(ConfigError, match="weight="):
        Block(read("a", 10), 0, 1, weight)


@pytest.mark.parametrize("layers", [(), (-1,), (0.0,), (True,), ("0",)])
def test_a_block_of_impossible_layers_is_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match="layers="):
        Block(read("a", 10), 0, 1, 1.0, layers)


def test_a_blocks_layers_are_a_set_in_order() -> None:
    assert Block(read("a", 10), 0, 1, 1.0, (3, 0, 3)).layers == (0, 3)


WRONG_SELECTIONS: dict[str, dict[str, Any]] = {
    "weight below 0": {"weight": -0.5},
    "weight nan": {"weight": NAN},
    "weight inf": {"weight": math.inf},
    "weight true": {"weight": True},
    "weight text": {"weight": "1"},
    "weight none": {"weight": None},
    "overlap": {"spans": [(0, 3), (2, 4)]},
    "out of order": {"spans": [(3, 4), (0, 1)]},
    "twice": {"spans": [(0, 2), (0, 2)]},
    "empty span": {"spans": [(2, 2)]},
    "backwards": {"spans": [(3, 1)]},
    "below 0": {"spans": [(-2, 1)]},
    "three ends": {"spans": [(0, 1, 2)]},
    "floats": {"spans": [(0.0, 1.0)]},
    "no spans": {"spans": []},
    "one number": {"spans": [3]},
    "a number": {"spans": 3},
    "unknown kind": {"kinds": ["dream"]},
    "kinds as text": {"kinds": "prompt"},
    "sources as text": {"sources": "reader"},
    "kinds a number": {"kinds": 3},
    "layers a number": {"layers": 3},
}


@pytest.mark.parametrize("name", WRONG_SELECTIONS)
def test_an_impossible_selection_is_refused_when_it_is_made(name: str) -> None:
    with pytest.raises(ConfigError):
        Selection(**WRONG_SELECTIONS[name])


@pytest.mark.parametrize("layers", [(), (3,), (0, 3), (-1,), ("0",)])
def test_a_selection_of_layers_that_a_model_does_not_have_is_refused(layers: Any) -> None:
    with pytest.raises(ConfigError, match="0 to 2"):
        Selection(layers=layers).check_layers(3)


def test_a_selection_of_a_models_layers_is_taken() -> None:
    Selection(layers=[2, 0]).check_layers(3)  # type: ignore[arg-type]
    Selection().check_layers(3)


@pytest.mark.parametrize(
    "selection",
    [
        Selection(spans=((0, 6),)),
        Selection(spans=((0, 1), (7, 8))),
        Selection(kinds=frozenset()),
        Selection(kinds=frozenset({"latent"})),
        Selection(kinds=frozenset({"moved"})),
        Selection(sources=frozenset({"nobody"})),
        Selection(spans=((0, 3),), kinds=frozenset({"prompt"})),
        Selection(answer_only=True),
    ],
)
def test_a_selection_that_takes_nothing_is_refused(selection: Selection) -> None:
    with pytest.raises(ConfigError):
        excerpt_of(read("a", 10, 11), selection)


@pytest.mark.parametrize("provenance", [None, LatentSteps(2), Composition((Block(read("a", 10), 0, 2),))])
@pytest.mark.parametrize("kind", ["system", "prompt", "generated", "latent", "moved"])
def test_a_segment_has_the_provenance_of_its_kind(kind: str, provenance: Any) -> None:
    fits = {"latent": LatentSteps, "moved": Composition}.get(kind, type(None))
    tokens = {"latent": bytes(8), "moved": pack_tokens([1, 2])}.get(kind, pack_tokens([7, 7]))
    if type(provenance) is fits:
        assert Segment.of(kind, "n", tokens, [], provenance=provenance).num_tokens == 2
    else:
        with pytest.raises(HandleError, match="does not fit its provenance"):
            Segment.of(kind, "n", tokens, [], provenance=provenance)


def test_the_tokens_of_latent_steps_are_zero_and_as_many_as_the_steps() -> None:
    for tokens in (bytes(8), bytes(16), pack_tokens([0, 0, 1])):
        with pytest.raises(HandleError, match="does not fit its provenance"):
            KVHandle.root(MODEL).extend("latent", "n", tokens, [], provenance=LatentSteps(3))


def test_the_tokens_of_moved_blocks_are_those_of_the_blocks() -> None:
    provenance = Composition((Block(read("a", 10, 11), 3, 5), Block(read("b", 20), 3, 4)))
    handle = KVHandle.root(MODEL).extend("moved", "n", pack_tokens([10, 11, 20]), [], provenance=provenance)
    assert handle.token_ids == (10, 11, 20)
    for ids in ([10, 11], [10, 11, 20, 20], [20, 10, 11], [10, 11, 21], []):
        with pytest.raises(HandleError, match="does not fit its provenance"):
            KVHandle.root(MODEL).extend("moved", "n", pack_tokens(ids), [], provenance=provenance)


# -- excerpt_of ------------------------------------------------------------------------------------------------------

MIXED = handle_of(
    SYSTEM,
    ("prompt", "reader", [10, 11], "the report"),
    ("generated", "reader", [12, 13], "read"),
    ("prompt", "critic", [20], "and?"),
    ("latent", "thinker", [0, 0], ""),
    ("prompt", "critic", [30, 31], "so?"),
    ("generated", "critic", [32], "good"),
)


def taken(selection: Selection, handle: KVHandle = MIXED, begin: int = 0) -> list[tuple[int, int]]:
    return [(block.begin, block.end) for block in excerpt_of(handle, selection, begin).blocks]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (EVERYTHING, [(0, 13)]),
        (WHOLE, [(3, 13)]),
        (Selection(kinds=frozenset({"system"})), [(0, 3)]),
        (Selection(kinds=frozenset({"prompt"})), [(3, 5), (7, 8), (10, 12)]),
        (Selection(kinds=frozenset({"generated"})), [(5, 7), (12, 13)]),
        (Selection(kinds=frozenset({"latent"})), [(8, 10)]),
        (Selection(kinds=frozenset({"prompt", "generated"})), [(3, 8), (10, 13)]),
        (Selection(sources=frozenset({"critic"})), [(7, 8), (10, 13)]),
        (Selection(sources=frozenset({"critic", "thinker"})), [(7, 13)]),
        (Selection(sources=frozenset({"reader"}), kinds=frozenset({"generated"})), [(5, 7)]),
        (Selection(answer_only=True), [(12, 13)]),
        (Selection(kinds=EVERY_KIND, spans=((0, 1), (1, 2), (4, 6), (12, 13))), [(0, 2), (4, 6), (12, 13)]),
        (Selection(spans=((0, 13),), kinds=frozenset({"prompt"})), [(3, 5), (7, 8), (10, 12)]),
    ],
)
def test_a_selection_takes_its_tokens_and_no_others(selection: Selection, expected: list[tuple[int, int]]) -> None:
    assert taken(selection) == expected


def test_what_is_shared_is_not_taken_again() -> None:
    assert taken(EVERYTHING, begin=4) == [(4, 13)]
    assert taken(Selection(answer_only=True), begin=4) == [(12, 13)]
    assert taken(Selection(kinds=frozenset({"system", "generated"})), begin=6) == [(6, 7), (12, 13)]
    with pytest.raises(ConfigError, match="nothing of"):
        excerpt_of(MIXED, EVERYTHING, 13)


def test_messages_are_taken_in_full_where_any_of_their_tokens_is_taken_and_once() -> None:
    part = excerpt_of(MIXED, Selection(kinds=EVERY_KIND, spans=((1, 2), (3, 4), (4, 5), (12, 13))))
    assert [message["content"] for message in part.messages] == ["be brief", "the report", "good"]


def test_weight_and_layers_go_to_every_block_and_1_is_none() -> None:
    part = excerpt_of(MIXED, Selection(kinds=frozenset({"prompt"}), weight=2.5, layers=(1, 0)))
    assert {(block.weight, block.layers) for block in part.blocks} == {(2.5, (0, 1))}
    assert excerpt_of(MIXED, Selection(weight=1.0)) == excerpt_of(MIXED, WHOLE)


def test_weight_0_is_absence_but_a_wrong_selection_is_still_wrong() -> None:
    assert excerpt_of(MIXED, Selection(weight=0)) == Excerpt([], [])
    with pytest.raises(ConfigError):
        excerpt_of(MIXED, Selection(weight=0, kinds=frozenset({"moved"})))
    base, other = read("a", 10), read("b", 20, 21)
    without = composed(base, [excerpt_of(other, WHOLE)])
    assert composed(base, [excerpt_of(other, WHOLE), excerpt_of(MIXED, Selection(weight=0.0))]) == without
    assert composed(base, [excerpt_of(MIXED, Selection(weight=0.0))]) is base


def test_a_message_of_which_several_parts_were_composed_is_taken_once_when_they_are_composed_again() -> None:
    once = composed(read("a", 10), [excerpt_of(MIXED, Selection(kinds=EVERY_KIND, spans=((0, 1), (2, 3), (10, 11))))])
    assert contents(once) == ["be brief", "a", "be brief", "so?"]
    for handle in (once, TRIPS["to_dict"](once)):
        again = composed(read("c", 40), [excerpt_of(handle, EVERYTHING, 4)])
        assert contents(again)[2:] == contents(handle)[2:]


# -- merge, compose_after --------------------------------------------------------------------------------------------


def test_merge_keeps_the_order_and_takes_what_is_shared_once() -> None:
    a, b, c = read("a", 10, 11), read("b", 20), answered("c", 30, 31)
    merged = merge([a, b, c])
    assert merged.token_ids == (1, 2, 3, 10, 11, 20, 30, 31, 90, 91)
    assert contents(merged) == ["be brief", "a", "b", "c", "c says"]
    assert merge([c, b, a]).token_ids == (1, 2, 3, 30, 31, 90, 91, 20, 10, 11)
    assert kinds(merged) == [
        (0, 3, "system", ""),
        (3, 5, "prompt", "a"),
        (5, 6, "prompt", "b"),
        (6, 8, "prompt", "c"),
        (8, 10, "generated", "c"),
    ]
    assert [segment.kind for segment in merged.segments] == ["system", "prompt", "moved"]
    (provenance,) = [segment.provenance for segment in merged.segments if segment.provenance]
    assert isinstance(provenance, Composition)
    assert [(block.handle.id, block.begin, block.end) for block in provenance.blocks] == [(b.id, 3, 4), (c.id, 3, 7)]


def test_merge_takes_a_longer_shared_conversation_once_and_tokens_that_only_look_shared_twice() -> None:
    base = read("a", 10, 11)
    left, right = (
        base.extend("prompt", name, pack_tokens([50 + index]), [{"role": "user", "content": name}], 100)
        for index, name in enumerate(("left", "right"))
    )
    assert merge([left, right]).token_ids == (1, 2, 3, 10, 11, 50, 51)
    stranger = read("b", 10, 12)  # begins with a token that `a` has too, in another segment
    assert merge([base, stranger]).token_ids == (1, 2, 3, 10, 11, 10, 12)


def test_another_system_prompt_is_left_out() -> None:
    other = handle_of(("system", "b", [7, 8], "be long"), ("prompt", "b", [20], "b"))
    assert merge([read("a", 10), other]).token_ids == (1, 2, 3, 10, 20)
    assert contents(merge([read("a", 10), other])) == ["be brief", "a", "b"]


def test_one_handle_is_itself_and_none_is_refused() -> None:
    a = read("a", 10)
    assert merge([a]) is a
    assert merge([a, a, copy.deepcopy(a)]) == a
    assert merge([KVHandle.root(MODEL), a]) is a
    assert merge([KVHandle.root(MODEL)]) == KVHandle.root(MODEL)
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge([])


def test_a_handle_that_another_one_continues_is_dropped_wherever_it_stands() -> None:
    a, b = read("a", 10), read("b", 20)
    longer = a.extend("prompt", "n", pack_tokens([50]), [{"role": "user", "content": "more"}], 100)
    for handles in ([a, longer], [longer, a], [a, longer, a]):
        assert merge(handles) is longer
    assert without_contained([a, b, longer]) == [b, longer]
    merged = merge([a, b])
    assert merge([a, merged]) is merged
    assert merge([merged, a]) is merged
    longer_still = merged.extend("prompt", "n", pack_tokens([50]), [{"role": "user", "content": "more"}], 100)
    assert merge([longer_still, merged, a]) is longer_still


def test_a_composed_handle_is_not_taken_for_a_plain_one_of_the_same_tokens() -> None:
    merged = merge([read("a", 10), read("b", 20)])
    plain = read("a", 10, 20)
    assert plain.tokens == merged.tokens
    assert without_contained([merged, plain]) == [merged, plain]
    less_moved = repaired(merge([read("a", 10), read("b", 20)]), Repair(0.5))
    assert without_contained([merged, less_moved]) == [merged, less_moved]


def test_handles_of_several_models_or_tenants_are_refused() -> None:
    a = read("a", 10)
    longer = a.extend("prompt", "n", pack_tokens([50]), [], 100)
    for other in (read("b", 20, model="ab" * 16), read("b", 20, tenant="acme"), read("a", 10, tenant="acme")):
        for handles in ([a, other], [other, a], [other, longer]):
            with pytest.raises(HandleError, match="different models or tenants"):
                merge(handles)
        with pytest.raises(HandleError, match="different models or tenants"):
            compose_after(read("c", 1), [other], [EVERYTHING])


def test_too_many_blocks_are_refused_and_as_many_as_allowed_are_taken() -> None:
    ids = list(range(2 * MAX_BLOCKS + 2))
    long = handle_of(("prompt", "a", ids, "a"))
    spans = tuple((at, at + 1) for at in range(0, len(ids), 2))
    taken = excerpt_of(long, Selection(spans=spans[:MAX_BLOCKS]))
    assert composed(read("b", 1), [taken]).num_tokens == 4 + MAX_BLOCKS
    with pytest.raises(ConfigError, match="4,097 blocks"):
        composed(read("b", 1), [excerpt_of(long, Selection(spans=spans))])


def test_after_the_same_system_prefix_a_handle_is_continued_and_after_another_one_moved() -> None:
    head = handle_of((*SYSTEM[:1], "other", *SYSTEM[2:]))
    a, b = read("a", 10, 11), read("b", 20)
    assert compose_after(head, [a], [WHOLE]) is a
    assert compose_after(head, [a, b], [WHOLE] * 2) == merge([a, b])
    other = handle_of(("system", "", [7, 8], "be long"))
    moved = compose_after(other, [a, b], [WHOLE] * 2)
    assert moved.token_ids == (7, 8, 10, 11, 20)
    assert contents(moved) == ["be long", "a", "b"]
    with pytest.raises(ConfigError, match="nothing to compose"):
        compose_after(head, [], [])


def test_what_the_first_selection_leaves_out_is_not_lost_where_another_one_takes_it() -> None:
    doc = read("doc", 10, 11)
    said = [("left", 60), ("right", 70)]
    left, right = (
        doc.extend("generated", name, pack_tokens([token]), [{"role": "assistant", "content": name}], 100)
        for name, token in said
    )
    head = handle_of(("system", "", [7, 8], "be long"))
    mixed = compose_after(head, [left, right], [Selection(answer_only=True), WHOLE])
    assert mixed.token_ids == (7, 8, 60, 10, 11, 70)
    assert compose_after(head, [left, right], [WHOLE] * 2).token_ids == (7, 8, 10, 11, 60, 70)


# -- identity --------------------------------------------------------------------------------------------------------


def a_composition(
    *, repair: Repair | None = None, weight: float = 1.0, layers: tuple[int, ...] | None = None, **more: Any
) -> KVHandle:
    other = more.get("other", read("b", 20, 21))
    spans = more.get("spans")
    selection = Selection(weight=weight, layers=layers, spans=spans)
    return repaired(composed(read("a", 10), [excerpt_of(other, selection)]), repair)


DIFFERENT: dict[str, Callable[[], KVHandle]] = {
    "plain": a_composition,
    "repaired": lambda: a_composition(repair=Repair(0.5)),
    "repaired more": lambda: a_composition(repair=Repair(0.6)),
    "repaired otherwise": lambda: a_composition(repair=Repair(0.5, "deviation")),
    "weighted": lambda: a_composition(weight=2.0),
    "weighted less": lambda: a_composition(weight=0.5),
    "layers": lambda: a_composition(layers=(0,)),
    "other layers": lambda: a_composition(layers=(0, 1)),
    "two blocks": lambda: composed(
        read("a", 10), [excerpt_of(read("b", 20, 21), Selection(spans=(span,))) for span in ((3, 4), (4, 5))]
    ),
    "same tokens of another handle": lambda: a_composition(other=read("c", 20, 21)),
    "same tokens at another place": lambda: a_composition(other=read("b", 19, 20, 21), spans=((4, 6),)),
    "merged from the other side": lambda: composed(read("b", 20, 21), [excerpt_of(read("a", 10), WHOLE)]),
    "thought": lambda: read("a", 10).extend("latent", "n", bytes(8), [], provenance=LatentSteps(2)),
    "thought longer": lambda: read("a", 10).extend("latent", "n", bytes(12), [], provenance=LatentSteps(3)),
    "nested": lambda: composed(read("a", 10), [excerpt_of(a_composition(), Selection(spans=((4, 6),)))]),
    "read": lambda: read("a", 10, 20, 21),
}


def test_every_difference_of_a_provenance_is_another_id_and_digest_and_none_is_the_same() -> None:
    handles = [make() for make in DIFFERENT.values()]
    assert (
        len({handle.id for handle in handles})
        == len({handle.provenance_digest for handle in handles})
        == len(DIFFERENT)
    )
    for make, handle in zip(DIFFERENT.values(), handles, strict=True):
        assert make() == handle
        assert (make().id, make().provenance_digest) == (handle.id, handle.provenance_digest)
    assert [name for name, handle in zip(DIFFERENT, handles, strict=True) if not handle.provenance_digest] == ["read"]
    numbers = a_composition(weight=2, repair=Repair(1)), a_composition(weight=2.0, repair=Repair(1.0))
    assert numbers[0].id == numbers[1].id
    assert a_composition(layers=(1, 0)).id == a_composition(layers=(0, 1, 1)).id


def test_a_provenance_digest_does_not_change_with_what_is_read_after_it_but_with_where_it_is() -> None:
    merged = merge([read("a", 10), read("b", 20)])
    longer = merged.extend("prompt", "n", pack_tokens([50]), [], 100)
    assert longer.provenance_digest == merged.provenance_digest
    assert longer.id != merged.id
    assert (longer.num_plain, longer.num_composed) == (4, 5)
    assert (read("a", 10).num_plain, read("a", 10).num_composed) == (4, 0)
    provenance = merged.segments[-1].provenance
    elsewhere = read("a", 11, 12).extend("moved", "b", pack_tokens([20]), [], provenance=provenance)
    assert elsewhere.provenance_digest != merged.provenance_digest


def test_ids_are_the_same_in_another_process() -> None:
    program = (
        "from langgraph_latent import Repair, merge\n"
        "from langgraph_latent.handle import KVHandle\n"
        "from langgraph_latent.handle.compose import repaired\n"
        "from langgraph_latent.handle.tokens import pack_tokens\n"
        "h = [KVHandle.root('m').extend('prompt', n, pack_tokens([i]), [{'role': 'user', 'content': n}], 8)"
        " for i, n in enumerate('ab')]\n"
        "made = repaired(merge(h), Repair(0.25, 'deviation'))\n"
        "print(made.id, made.provenance_digest)\n"
    )
    runs = {subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout for _ in range(2)}
    handles = [
        KVHandle.root("m").extend("prompt", name, pack_tokens([index]), [{"role": "user", "content": name}], 8)
        for index, name in enumerate("ab")
    ]
    made = repaired(merge(handles), Repair(0.25, "deviation"))
    assert runs == {f"{made.id} {made.provenance_digest}\n"}


def test_what_is_exact_and_weighted_and_has_latent_steps_is_known_from_the_provenance() -> None:
    assert [name for name, make in DIFFERENT.items() if not make().is_exact] == [
        name for name in DIFFERENT if name not in ("thought", "thought longer", "read")
    ]
    whole = Repair(1.0)
    assert a_composition(repair=whole).is_exact
    assert not a_composition(repair=whole, weight=2.0).is_exact
    assert not a_composition(repair=whole, layers=(0, 1)).is_exact
    thought = DIFFERENT["thought"]()
    assert not repaired(composed(read("b", 20), [excerpt_of(thought, WHOLE)]), whole).is_exact
    only_prompts = Selection(kinds=frozenset({"prompt"}))
    assert repaired(composed(read("b", 20), [excerpt_of(thought, only_prompts)]), whole).is_exact
    assert repaired(composed(a_composition(), [excerpt_of(read("c", 30), WHOLE)]), whole).is_exact is False
    assert repaired(composed(read("c", 30), [excerpt_of(a_composition(), WHOLE)]), whole).is_exact
    assert [name for name, make in DIFFERENT.items() if make().has_latent_steps] == ["thought", "thought longer"]
    assert composed(read("b", 20), [excerpt_of(thought, WHOLE)]).has_latent_steps
    assert not composed(read("b", 20), [excerpt_of(thought, only_prompts)]).has_latent_steps
    assert {name for name, make in DIFFERENT.items() if needs_packed_attention(make())} == {
        "repaired",
        "repaired more",
        "repaired otherwise",
        "weighted",
        "weighted less",
        "layers",
        "other layers",
    }


def test_what_a_composition_ends_with_is_what_its_last_block_ends_with() -> None:
    whole = merge([read("a", 10), answered("b", 20)])
    assert (whole.num_sampled, whole.num_pending, ends_open(whole)) == (2, 0, True)
    part = composed(read("a", 10), [excerpt_of(answered("b", 20), Selection(spans=((5, 6),)))])
    assert (part.num_sampled, ends_open(part)) == (1, True)
    cut = composed(read("a", 10), [excerpt_of(answered("b", 20), Selection(spans=((3, 5),)))])
    assert (cut.num_sampled, ends_open(cut)) == (0, False)
    assert excerpt_of(whole, Selection(answer_only=True)).blocks == [Block(whole, 5, 7)]


# -- provenance ------------------------------------------------------------------------------------------------------


def test_spans_say_what_each_token_is_and_where_it_comes_from_through_every_composition() -> None:
    """Field case 68."""
    inner = composed(read("a", 10), [excerpt_of(MIXED, Selection(spans=((4, 6), (8, 13))))])
    outer = composed(handle_of(("system", "", [7, 8], "be long")), [excerpt_of(inner, Selection(spans=((3, 10),)))])
    assert kinds(outer) == [
        (0, 2, "system", ""),
        (2, 3, "prompt", "a"),
        (3, 4, "prompt", "reader"),
        (4, 5, "generated", "reader"),
        (5, 7, "latent", "thinker"),
        (7, 9, "prompt", "critic"),
    ]
    tokens = outer.token_ids
    assert [tokens[span.begin : span.end] for span in outer.spans] == [(7, 8), (10,), (11,), (12,), (0, 0), (30, 31)]
    assert outer.spans[-1].messages == ({"role": "user", "content": "so?"},)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_spans_cover_every_token_once_however_deep_it_lies(data: st.DataObject) -> None:
    origin: dict[int, tuple[str, str]] = {}
    handles = []
    for name in "abc":
        rows = []
        for kind in data.draw(st.lists(st.sampled_from(["system", "prompt", "generated"]), min_size=1, max_size=3)):
            ids = list(range(100 + len(origin), 100 + len(origin) + data.draw(st.integers(1, 4))))
            origin |= dict.fromkeys(ids, (kind, name))
            rows.append((kind, name, ids, name))
        handles.append(handle_of(*rows))
    for _ in range(data.draw(st.integers(1, 5))):
        base, other = data.draw(st.sampled_from(handles)), data.draw(st.sampled_from(handles))
        cuts = sorted(data.draw(st.sets(st.integers(0, other.num_tokens), min_size=2, max_size=6)))
        spans = tuple(zip(cuts[::2], cuts[1::2], strict=False))
        handles.append(composed(base, [excerpt_of(other, Selection(kinds=EVERY_KIND, spans=spans))]))
    for handle in handles:
        at = 0
        for span in handle.spans:
            assert span.begin == at < span.end
            at = span.end
            for token in handle.token_ids[span.begin : span.end]:
                assert origin[token] == (span.kind, span.source)
        assert at == handle.num_tokens
        assert TRIPS["to_dict"](handle).spans == handle.spans


# -- trips -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("trip", TRIPS)
def test_every_trip_gives_an_equal_provenance_back(trip: str, name: str) -> None:
    handle = DIFFERENT[name]()
    back = TRIPS[trip](handle)
    assert type(back) is KVHandle
    assert back == handle
    assert hash(back) == hash(handle)
    assert (back.provenance_digest, back.spans, back.messages, back.source_handles) == (
        handle.provenance_digest,
        handle.spans,
        handle.messages,
        handle.source_handles,
    )
    assert back.to_dict() == handle.to_dict()
    back.verify()


def long_handle(source: str, num_tokens: int) -> KVHandle:
    """A document of tokens that hardly compress, and an answer to it."""
    ids = [(number * 2_654_435_761) % 150_000 for number in range(num_tokens)]
    return handle_of(("prompt", source, ids, "a document"), ("generated", source, [5], "yes"))


def test_a_part_of_a_long_handle_survives_although_it_is_short_itself() -> None:
    handle = composed(read("a", 10), [excerpt_of(long_handle("b", 600_000), Selection(answer_only=True))])
    assert handle.num_tokens == 5
    assert KVHandle.from_dict(handle.to_dict()) == handle


def nested(depth: int) -> KVHandle:
    """Two parts of a composition of two parts of a composition ..."""
    handle = read("a", 10, 11, 12)
    for _ in range(depth):
        handle = composed(read("b", 20), [excerpt_of(handle, Selection(spans=((3, 4), (5, 6))))])
    return handle


@pytest.mark.timeout(60)
def test_what_a_deep_nest_is_made_of_is_known_in_no_time() -> None:
    handle = nested(40)
    assert [span.source for span in handle.spans] == ["", "b", "b", "a"]
    assert not handle.has_latent_steps
    assert not handle.is_exact
    assert KVHandle.from_dict(handle.to_dict()) == handle


# -- forgeries -------------------------------------------------------------------------------------------------------


def rows_of(handle: KVHandle) -> Any:
    return json.loads(zlib.decompress(b64decode(handle.to_dict()["segments"])))


def packed(rows: Any) -> str:
    return b64encode(zlib.compress(json.dumps(rows).encode())).decode()


def packed_rows(handle: KVHandle) -> str:
    """What a source handle's segments are in the packed form of another one."""
    return packed(rows_of(handle)["rows"])


FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "weight": lambda plain: plain["blocks"][0].__setitem__(3, 3.0),
    "weight nan": lambda plain: plain["blocks"][0].__setitem__(3, NAN),
    "weight 0": lambda plain: plain["blocks"][0].__setitem__(3, 0),
    "weight text": lambda plain: plain["blocks"][0].__setitem__(3, "1"),
    "layers": lambda plain: plain["blocks"][0].__setitem__(4, [1]),
    "no layers": lambda plain: plain["blocks"][0].__setitem__(4, []),
    "layers text": lambda plain: plain["blocks"][0].__setitem__(4, "01"),
    "begin": lambda plain: plain["blocks"][0].__setitem__(1, 4),
    "begin below": lambda plain: plain["blocks"][0].__setitem__(1, -1),
    "end": lambda plain: plain["blocks"][0].__setitem__(2, 4),
    "end after it": lambda plain: plain["blocks"][0].__setitem__(2, 1 << 60),
    "huge number": lambda plain: plain["blocks"][0].__setitem__(0, 1 << 70),
    "other number": lambda plain: plain["blocks"][0].__setitem__(0, 7),
    "number below": lambda plain: plain["blocks"][0].__setitem__(0, -1),
    "float number": lambda plain: plain["blocks"][0].__setitem__(0, 0.0),
    "short row": lambda plain: plain["blocks"][0].pop(),
    "no blocks": lambda plain: plain["blocks"].clear(),
    "more blocks": lambda plain: plain["blocks"].append(plain["blocks"][0]),
    "blocks a number": lambda plain: plain.update(blocks=3),
    "no repair": lambda plain: plain.update(repair=None),
    "ratio": lambda plain: plain.update(repair=[1.0, "boundary"]),
    "ratio 0": lambda plain: plain.update(repair=[0, "boundary"]),
    "strategy": lambda plain: plain.update(repair=[0.5, "deviation"]),
    "strategy list": lambda plain: plain.update(repair=[0.5, ["boundary"]]),
    "repair text": lambda plain: plain.update(repair="boundary"),
    "nothing": lambda plain: plain.clear(),
}
SOURCE_FORGERIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no sources": lambda content: content["sources"].clear(),
    "sources none": lambda content: content.update(sources=None),
    "source text": lambda content: content.update(sources=["kv-1"]),
    "other source": lambda content: content.update(
        sources=rows_of(composed(read("a", 10), [excerpt_of(read("c", 20, 21), WHOLE)]))["sources"]
    ),
    "fewer tokens": lambda content: content["sources"][0].__setitem__(1, read("b", 20).to_dict()["tokens"]),
    "other rows": lambda content: content["sources"][0].__setitem__(2, packed([])),
    "no rows": lambda content: content.pop("rows"),
    "rows only": lambda content: content.pop("sources"),
    "no version": lambda content: content.pop("version"),
    "version none": lambda content: content.update(version=None),
    "version text": lambda content: content.update(version="2"),
    "version float": lambda content: content.update(version=2.0),
    "version 1": lambda content: content.update(version=1),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_an_edited_composition_is_refused(name: str) -> None:
    handle = a_composition(repair=Repair(0.5))
    rows = rows_of(handle)
    assert KVHandle.from_dict(handle.to_dict() | {"segments": packed(rows)}) == handle
    FORGERIES[name](rows["rows"][-1][5])
    with pytest.raises(HandleError):
        KVHandle.from_dict(handle.to_dict() | {"segments": packed(rows)})


@pytest.mark.parametrize("name", SOURCE_FORGERIES)
def test_an_edited_source_or_version_is_refused(name: str) -> None:
    handle = a_composition(repair=Repair(0.5))
    content = rows_of(handle)
    SOURCE_FORGERIES[name](content)
    with pytest.raises(HandleError):
        KVHandle.from_dict(handle.to_dict() | {"segments": packed(content)})


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_form_before_versions_is_read(name: str) -> None:
    """A list of rows, or, of what was composed, `origins` and rows."""
    handle = DIFFERENT[name]()
    content = rows_of(handle)
    earlier = {"origins": content["sources"], "rows": content["rows"]} if content["sources"] else content["rows"]
    read_again = KVHandle.from_dict(handle.to_dict() | {"segments": packed(earlier)})
    assert read_again == handle
    assert read_again.to_dict() == handle.to_dict()


@pytest.mark.parametrize("version", [3, 1 << 40])
def test_a_packed_form_of_a_newer_version_is_refused_with_what_to_do(version: int) -> None:
    data = read("a", 10).to_dict()
    with pytest.raises(HandleError, match=rf"newer version of langgraph-latent.*version {version}.*[Uu]pgrade"):
        KVHandle.from_dict(data | {"segments": packed({"version": version, "something": "else"})})


@pytest.mark.parametrize("other", [read("b", 20, model="ab" * 16), read("b", 20, tenant="acme")])
def test_blocks_of_another_model_or_tenant_are_refused(other: KVHandle) -> None:
    with pytest.raises(HandleError, match="another model or tenant"):
        composed(read("a", 10), [excerpt_of(other, WHOLE)])


def test_more_or_fewer_latent_steps_are_refused() -> None:
    handle = DIFFERENT["thought"]()
    content = rows_of(handle)
    rows = content["rows"]
    rows[-1][2] = 1
    with pytest.raises(HandleError):
        KVHandle.from_dict(handle.to_dict() | {"segments": packed(content)})
    tokens = handle_of(("prompt", "a", [*handle.token_ids, 0], "")).to_dict()["tokens"]
    rows[-1][2] = 3
    with pytest.raises(HandleError, match="altered"):
        KVHandle.from_dict(handle.to_dict() | {"tokens": tokens, "segments": packed(content)})
    rows[-1][2] = MAX_TOKENS * 1000
    with pytest.raises(HandleError):
        KVHandle.from_dict(handle.to_dict() | {"segments": packed(content)})


def content_of(sources: list[Any]) -> dict[str, Any]:
    plain = {"blocks": [[0, 3, 4, 1.0, None]], "repair": None}
    return {"version": 2, "sources": sources, "rows": [["moved", "n", 6, [], "", plain]]}


@pytest.mark.parametrize("number", [0, 1, -1])
def test_a_source_of_itself_or_of_a_later_one_is_refused(number: int) -> None:
    plain = {"blocks": [[number, 0, 1, 1.0, None]], "repair": None}
    tokens, rows = read("b", 20).to_dict()["tokens"], packed([["moved", "n", 4, [], "", plain]])
    data = a_composition().to_dict() | {"segments": packed(content_of([[0, tokens, rows]] * 2))}
    with pytest.raises(HandleError, match=r"can.t be read|number below 0"):
        KVHandle.from_dict(data)


def peak_of(data: dict[str, Any]) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(HandleError):
            KVHandle.from_dict(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_many_gigantic_sources_take_no_memory() -> None:
    bomb = b64encode(zlib.compress(b"\4" + bytes(4 * (MAX_TOKENS - 1)), 9)).decode()  # 16 MB in 16 kB
    source = [0, bomb, packed_rows(read("b", 20))]
    data = a_composition().to_dict() | {"segments": packed(content_of([source] * 100))}
    assert peak_of(data) < 150 << 20


def test_many_sound_sources_are_refused_before_they_take_memory() -> None:
    inner = handle_of(("prompt", "b", [7] * (1 << 20), "b"))
    source = [0, inner.to_dict()["tokens"], packed_rows(inner)]
    data = a_composition().to_dict() | {"segments": packed(content_of([source] * 100))}
    assert peak_of(data) < 150 << 20


def test_a_source_that_inflates_to_gigabytes_is_refused() -> None:
    bomb = b64encode(zlib.compress(b"[" + b" " * (200 << 20) + b"]", 9)).decode()
    data = a_composition().to_dict() | {"segments": packed(content_of([[0, read("b", 20).to_dict()["tokens"], bomb]]))}
    assert peak_of(data) < 50 << 20


def test_a_loop_of_fan_outs_and_merges_grows_by_what_each_round_adds() -> None:
    merged, sizes = read("a", 10), []
    for number in range(20):
        left, right = (merged.extend("prompt", "n", pack_tokens([side + number]), [], 8) for side in (100, 200))
        merged = merge([left, right])
        sizes.append(len(merged.to_dict()["segments"]))
    assert len(merged.source_handles) == 20
    assert sizes[-1] - sizes[-2] < 1.5 * (sizes[10] - sizes[9]) + 500
    assert KVHandle.from_dict(merged.to_dict()) == merged


def test_blocks_of_blocks_of_blocks_are_refused_before_they_exhaust_the_stack() -> None:
    assert nested(MAX_DEPTH).depth == MAX_DEPTH
    assert KVHandle.from_dict(nested(MAX_DEPTH).to_dict()) == nested(MAX_DEPTH)
    with pytest.raises(HandleError, match="re-read what is inherited"):
        nested(MAX_DEPTH + 1)
