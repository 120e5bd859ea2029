"""The radix index answers as a plain dict of token sequences would, after any inserts and removals."""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.pool.prefix import Node, PrefixIndex

Key = tuple[int, ...]

# Few ids, so that sequences share prefixes; ids that share bytes, so that an edge can't be split inside a token.
ids = st.sampled_from([1, 2, 256 + 1, 1 << 24, (1 << 24) + 1])
sequences = st.lists(ids, max_size=7).map(tuple)
steps = st.lists(
    st.tuples(st.sampled_from(["insert", "insert", "insert", "remove", "replace"]), sequences), max_size=40
)


class Model(NamedTuple):
    """The index under test next to the dict that it should be."""

    index: PrefixIndex[str]
    truth: dict[Key, str]
    nodes: dict[Key, Node[str]]


def build(steps: list[tuple[str, Key]]) -> Model:
    model = Model(PrefixIndex(), {}, {})
    for number, (what, key) in enumerate(steps):
        if what == "remove":
            if key in model.truth:
                model.index.remove(model.nodes.pop(key))
                del model.truth[key]
        else:
            node = model.index.insert(pack_tokens(key))
            assert node.value == model.truth.get(key)
            if node.value is None or what == "replace":
                node.value = model.truth[key] = f"value {number}"
            assert model.nodes.setdefault(key, node) is node
    return model


def shared(a: Key, b: Key) -> int:
    count = 0
    while count < min(len(a), len(b)) and a[count] == b[count]:
        count += 1
    return count


def shape(index: PrefixIndex[str]) -> tuple[int, int]:
    """Number of nodes under the root, and how many of those are of no use: no value and fewer than two children."""
    nodes, useless, stack = 0, 0, list(index._root.children.values())
    while stack:
        node = stack.pop()
        nodes += 1
        useless += node.value is None and len(node.children) < 2
        for key, child in node.children.items():
            assert child.parent is node
            assert child.edge[:4] == key
            assert child.edge
            assert len(child.edge) % 4 == 0
        stack.extend(node.children.values())
    return nodes, useless


@settings(max_examples=300, deadline=None)
@given(steps)
def test_it_holds_exactly_what_was_inserted_and_not_removed(steps: list[tuple[str, Key]]) -> None:
    index, truth, nodes = build(steps)
    assert dict(index) == {pack_tokens(key): value for key, value in truth.items()}
    assert len(list(index)) == len(truth)
    for key, node in nodes.items():
        assert index.insert(pack_tokens(key)) is node


@settings(max_examples=400, deadline=None)
@given(steps, sequences)
def test_matches_are_every_value_that_shares_a_prefix_longest_first(steps: list[tuple[str, Key]], asked: Key) -> None:
    index, truth, _ = build(steps)
    found = list(index.matches(pack_tokens(asked)))
    lengths = [num_tokens for num_tokens, _ in found]
    assert lengths == sorted(lengths, reverse=True)
    want = Counter((shared(key, asked), value) for key, value in truth.items() if shared(key, asked))
    assert Counter(pair for pair in found if pair[0]) == want


@settings(max_examples=200, deadline=None)
@given(steps, sequences)
def test_of_equally_long_matches_the_shortest_sequence_comes_first(steps: list[tuple[str, Key]], asked: Key) -> None:
    """A cache that holds little more than what is asked for is the one to continue."""
    index, truth, _ = build(steps)
    keys = {value: key for key, value in truth.items()}
    best = max((shared(key, asked) for key in truth), default=0)
    first = next(index.matches(pack_tokens(asked)), None)
    if best:
        assert first is not None
        assert shared(keys[first[1]], asked) == best
        if asked in truth and best == len(asked):
            assert first[1] == truth[asked]


@settings(max_examples=200, deadline=None)
@given(steps)
def test_no_node_is_kept_that_nothing_needs(steps: list[tuple[str, Key]]) -> None:
    """Field case 53: an index that a million sequences went through is as small as what is left in it."""
    index, truth, _ = build([step for step in steps if step[1]])
    nodes, useless = shape(index)
    assert useless == 0
    assert nodes <= max(0, 2 * len(truth) - 1)


@settings(max_examples=100, deadline=None)
@given(steps, st.randoms(use_true_random=False))
def test_removing_everything_in_any_order_leaves_an_empty_tree(
    steps: list[tuple[str, Key]], rng: random.Random
) -> None:
    index, _, nodes = build(steps)
    order = list(nodes.values())
    rng.shuffle(order)
    for node in order:
        index.remove(node)
        assert shape(index)[1] == 0
    assert list(index) == []
    assert not index._root.children


def test_an_empty_index_matches_nothing() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    assert list(index.matches(pack_tokens([1, 2]))) == list(index.matches(b"")) == list(index) == []


def test_long_sequences_that_share_a_long_prefix_are_told_apart() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    base = list(range(20_000))
    for name, key in {"a": [*base, 1], "b": [*base, 2], "c": base[:10_000], "d": [*base[:5000], 7]}.items():
        index.insert(pack_tokens(key)).value = name
    found = list(index.matches(pack_tokens([*base, 2, 3])))
    assert found == [(20_001, "b"), (20_000, "a"), (10_000, "c"), (5_000, "d")]
