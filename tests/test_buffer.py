"""Append-only storage: whoever continues the end writes in place, everyone else copies, nothing is overwritten."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_latent.kv.buffer import KVBuffer, LayerStore, capacity_for
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.state import KVState

HEADS, KEY_DIM, VALUE_DIM = 2, 4, 6
FULL = (LayerKind("full"), LayerKind("full"))
MIXED = (LayerKind("full"), LayerKind("sliding", 8))

Reference = list[tuple[torch.Tensor, torch.Tensor]]


def fresh(length: int, seed: int, num_layers: int = 2) -> Reference:
    """Keys and values of `length` new tokens, other ones for every seed and layer."""
    rng = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(1, HEADS, length, KEY_DIM, generator=rng),
            torch.randn(1, HEADS, length, VALUE_DIM, generator=rng),
        )
        for _ in range(num_layers)
    ]


def write(tail: Any, new: Reference) -> None:
    """What a model does in one forward: update every layer of the cache."""
    for layer, (keys, values) in zip(tail.cache.layers, new, strict=True):
        layer.update(keys, values)


def grown(state: KVState, new: Reference, expected: int = 0) -> KVState:
    with state.append(expected) as tail:
        write(tail, new)
        return tail.seal()


def joined(old: Reference | None, new: Reference) -> Reference:
    """The plain torch reference: concatenation."""
    if old is None:
        return new
    return [(torch.cat([k, nk], 2), torch.cat([v, nv], 2)) for (k, v), (nk, nv) in zip(old, new, strict=True)]


def cut(old: Reference | None, length: int) -> Reference | None:
    return None if old is None or not length else [(k[:, :, :length], v[:, :, :length]) for k, v in old]


def assert_sees(state: KVState, reference: Reference | None) -> None:
    length = 0 if reference is None else reference[0][0].shape[2]
    assert state.num_tokens == length
    for (keys, values), (want_keys, want_values), kind in zip(
        state.layers(), reference or (), state.kinds, strict=False
    ):
        begin = kind.first_needed(length)
        assert torch.equal(keys, want_keys[:, :, begin:])
        assert torch.equal(values, want_values[:, :, begin:])


# -- capacity --------------------------------------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.integers(1, 1 << 24))
def test_spare_capacity_is_at_most_a_quarter_or_64_tokens(num_tokens: int) -> None:
    spare = capacity_for(num_tokens) - num_tokens
    assert 0 < spare <= max(num_tokens / 4, 64)


@pytest.mark.parametrize("steps", [[1000], [1000, 1], [10] * 60, [1] * 400, [700, 200, 200], [64, 1, 1], [3000, 800]])
def test_storage_never_has_more_spare_than_that(steps: list[int]) -> None:
    state, length = KVState.empty(FULL), 0
    for seed, step in enumerate(steps):
        state, length = grown(state, fresh(step, seed)), length + step
        for store in state.buffer.layers:
            assert store.keys is not None
            assert length <= store.keys.shape[-2] <= length + max(length / 4, 64)
    token_bytes = 2 * HEADS * (KEY_DIM + VALUE_DIM) * 4
    assert state.nbytes == length * token_bytes
    assert state.buffer.nbytes <= (length + max(length / 4, 64)) * token_bytes


def test_storage_of_a_known_final_length_is_allocated_once() -> None:
    state = KVState.empty(FULL)
    with state.append(3000) as tail:
        write(tail, fresh(512, 0))
        where = [(store.keys.data_ptr(), store.values.data_ptr()) for store in tail.claim.buffer.layers]  # type: ignore[union-attr]
        for seed in range(1, 6):
            write(tail, fresh(497, seed))
        assert [(store.keys.data_ptr(), store.values.data_ptr()) for store in tail.claim.buffer.layers] == where  # type: ignore[union-attr]
        assert tail.seal().num_tokens == 512 + 5 * 497


def test_an_empty_buffer_holds_nothing() -> None:
    buffer = KVBuffer.empty(3)
    assert (buffer.nbytes, buffer.sealed, len(buffer.layers)) == (0, 0, 3)
    assert LayerStore().nbytes == 0


# -- in place or by copy ---------------------------------------------------------------------------------------------


def addresses(state: KVState) -> list[int]:
    return [tensor.data_ptr() for store in state.buffer.layers for tensor in (store.keys, store.values)]  # type: ignore[union-attr]


def test_a_chain_of_appends_stays_in_one_buffer_without_a_copy() -> None:
    """Four agents on one context hold the bytes of one cache; the prefix is never copied."""
    state = grown(KVState.empty(FULL), fresh(1000, 0))
    buffer, where, reference = state.buffer, addresses(state), fresh(1000, 0)
    chain = [state]
    for seed in range(1, 5):
        chain.append(grown(chain[-1], fresh(50, seed)))
        reference = joined(reference, fresh(50, seed))
    assert all(link.buffer is buffer for link in chain)
    assert addresses(chain[-1]) == where
    assert_sees(chain[-1], reference)
    for index, link in enumerate(chain):
        assert_sees(link, cut(reference, 1000 + 50 * index))


def test_a_second_child_copies_and_the_first_sees_no_change() -> None:
    parent = grown(KVState.empty(FULL), fresh(100, 0))
    first = grown(parent, fresh(5, 1))
    second = grown(parent, fresh(7, 2))
    assert first.buffer is parent.buffer
    assert second.buffer is not parent.buffer
    assert not set(addresses(first)) & set(addresses(second))
    base = fresh(100, 0)
    assert_sees(parent, base)
    assert_sees(first, joined(base, fresh(5, 1)))
    assert_sees(second, joined(base, fresh(7, 2)))


def test_a_copy_is_made_on_the_first_write_only() -> None:
    parent = grown(KVState.empty(FULL), fresh(100, 0))
    keeper = grown(parent, fresh(1, 1))
    with parent.append() as tail:
        assert tail.claim.buffer.nbytes == 0
        assert tail.seal() is parent
    assert keeper.num_tokens == 101


def test_a_child_may_take_the_tail_once_nobody_sees_it_any_more() -> None:
    """What only dead states saw is free space: a retry after a dropped answer appends in place."""
    parent = grown(KVState.empty(FULL), fresh(100, 0))
    dropped = grown(parent, fresh(5, 1))
    del dropped
    gc.collect()
    child = grown(parent, fresh(7, 2))
    assert child.buffer is parent.buffer
    assert_sees(child, joined(fresh(100, 0), fresh(7, 2)))


def test_tokens_that_were_not_sealed_leave_no_trace() -> None:
    parent = grown(KVState.empty(FULL), fresh(10, 0))
    with parent.append() as tail:
        write(tail, fresh(5, 1))
    assert_sees(parent, fresh(10, 0))
    child = grown(parent, fresh(3, 2))
    assert child.buffer is parent.buffer
    assert_sees(child, joined(fresh(10, 0), fresh(3, 2)))


def test_a_writer_that_failed_gives_its_claim_back() -> None:
    parent = grown(KVState.empty(FULL), fresh(10, 0))
    with pytest.raises(RuntimeError, match="out of memory"), parent.append():
        raise RuntimeError("out of memory")
    assert grown(parent, fresh(3, 2)).buffer is parent.buffer


def test_a_forward_that_broke_between_layers_counts_no_token() -> None:
    parent = grown(KVState.empty(FULL), fresh(10, 0))
    with parent.append() as tail:
        tail.cache.layers[0].update(*fresh(4, 1)[0])
        assert tail.num_tokens == 10
        assert tail.seal() is parent
    assert_sees(grown(parent, fresh(2, 3)), joined(fresh(10, 0), fresh(2, 3)))


def test_states_sealed_on_the_way_keep_their_length() -> None:
    with KVState.empty(FULL).append() as tail:
        write(tail, fresh(10, 0))
        early = tail.seal()
        write(tail, fresh(500, 1))
        late = tail.seal()
    assert early.buffer is late.buffer
    assert_sees(early, fresh(10, 0))
    assert_sees(late, joined(fresh(10, 0), fresh(500, 1)))


def test_growth_keeps_what_every_earlier_state_sees() -> None:
    state, reference, kept = KVState.empty(MIXED), None, []
    for seed in range(30):
        state, reference = grown(state, fresh(37, seed)), joined(reference, fresh(37, seed))
        kept.append((state, reference))
    assert len({one.buffer for one, _ in kept}) == 1
    for one, seen in kept:
        assert_sees(one, seen)


def test_old_storage_is_freed_with_its_last_reader() -> None:
    state = grown(KVState.empty(FULL), fresh(100, 0))
    old = state.buffer.layers[0].keys
    assert old is not None
    state = grown(state, fresh(500, 1))
    assert state.buffer.layers[0].keys is not old
    referrers = [one for one in gc.get_referrers(old) if isinstance(one, LayerStore)]
    assert not referrers


# -- any tree of appends, forks, crops -------------------------------------------------------------------------------

steps = st.lists(
    st.tuples(
        st.sampled_from(["append", "append", "append", "crop", "drop", "unsealed", "hold", "let_go"]),
        st.integers(0, 10_000),
        st.integers(1, 90),
    ),
    min_size=8,
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(steps=steps, kinds=st.sampled_from([FULL, MIXED]))
def test_any_tree_of_appends_forks_and_crops_equals_plain_concatenation(
    steps: list[tuple[str, int, int]], kinds: tuple[LayerKind, ...]
) -> None:
    """Field case 50: whatever a fork writes, the branch that was left sees what it always saw."""
    alive: list[tuple[KVState, Reference | None]] = [(KVState.empty(kinds), None)]
    held: list[tuple[Any, Reference | None]] = []
    for seed, (what, which, length) in enumerate(steps):
        state, reference = alive[which % len(alive)]
        if what == "append":
            new = fresh(length, seed)
            alive.append((grown(state, new, expected=which % 300), joined(reference, new)))
        elif what == "crop" and state.num_tokens:
            shorter = which % (state.num_tokens + 1)
            if state.can_crop(shorter):
                alive.append((state.crop(shorter), cut(reference, shorter)))
        elif what == "drop" and len(alive) > 1:
            alive.pop(which % len(alive))
            del state
        elif what == "unsealed":
            with state.append() as tail:
                write(tail, fresh(length, seed))
        elif what == "hold":  # a writer that is still at it while others go on
            tail = state.append()
            write(tail, fresh(length, seed))
            held.append((tail, joined(reference, fresh(length, seed))))
        elif what == "let_go" and held:
            tail, written = held.pop()
            alive.append((tail.seal(), written))
            tail.close()
        for one, seen in alive:
            assert_sees(one, seen)
    for tail, _ in held:
        tail.close()


# -- claims ----------------------------------------------------------------------------------------------------------


class View:
    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens


def test_only_the_end_can_be_claimed_and_only_once() -> None:
    buffer = KVBuffer.empty(1)
    view = View(10)
    buffer.add_view(view)
    assert not buffer.claim(9)
    assert buffer.claim(10)
    assert not buffer.claim(10)
    buffer.release()
    longer = View(12)
    buffer.add_view(longer)
    assert not buffer.claim(10)
    assert buffer.claim(12)
    buffer.release()
    del longer
    gc.collect()
    assert buffer.sealed == 10
    assert buffer.claim(10)


def test_of_eight_threads_that_claim_at_once_one_wins() -> None:
    for _ in range(150):
        state = grown(KVState.empty(FULL), fresh(4, 0))
        gate, won = threading.Barrier(8), []

        def claim(state: KVState = state, gate: threading.Barrier = gate, won: list[bool] = won) -> None:
            gate.wait()
            won.append(state.buffer.claim(4))

        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(won) == [False] * 7 + [True]


def test_eight_threads_that_extend_one_state_see_only_their_own_tokens() -> None:
    """Law 5 on tensors: one state, 8 threads, 25 appends each, none sees another's tokens or changes the base."""
    base = grown(KVState.empty(MIXED), fresh(60, 0))
    before, wrong = base.checksum(), []

    def extend(number: int) -> None:
        for turn in range(25):
            state, reference = base, fresh(60, 0)
            for step in range(3):
                new = fresh(1 + (number + turn) % 40, 1000 * number + 10 * turn + step)
                state, reference = grown(state, new), joined(reference, new)
            try:
                assert_sees(state, reference)
            except AssertionError as error:
                wrong.append((number, turn, error))

    threads = [threading.Thread(target=extend, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (base.checksum(), base.num_tokens) == (before, 60)


def test_a_view_can_be_added_while_others_are_dropped() -> None:
    """States die in whatever thread held them last; claiming at that moment must not fail."""
    base = grown(KVState.empty(FULL), fresh(4, 0))
    stop, errors = threading.Event(), []

    def churn() -> None:
        try:
            while not stop.is_set():
                for length in (1, 2, 3):
                    base.crop(length)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2000):
            if base.buffer.claim(4):
                base.buffer.release()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors
