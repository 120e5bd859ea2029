"""The pool keeps its budget and its books, whatever is asked of it and from however many threads."""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_latent.errors import CacheBudgetError, IntegrityError
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.policies import LRU, Candidate
from langgraph_latent.pool.pool import CachePool, Namespace

HOME = Namespace("model", "")
KINDS = (LayerKind("full"),)
TOKEN_BYTES = 2 * 4  # keys and values, one head, one dim, float32


def keys_of(ids: list[int]) -> torch.Tensor:
    """One number per token that only depends on the ids up to it, as a model's keys would."""
    running, out = 0, []
    for token in ids:
        running = (running * 31 + token + 1) % 9973
        out.append(float(running))
    return torch.tensor(out).reshape(1, 1, len(ids), 1)


def extend(state: KVState, ids: list[int], expected: int = 0) -> KVState:
    """The state of all of `ids`, whose first tokens are in `state`."""
    with state.append(expected or len(ids)) as tail:
        new = keys_of(ids)[:, :, state.num_tokens :]
        for layer in tail.cache.layers:
            layer.update(new, -new)
        return tail.seal()


def state_of(ids: list[int], kinds: tuple[LayerKind, ...] = KINDS) -> KVState:
    return extend(KVState.empty(kinds), ids)


def put(pool: CachePool, ids: list[int], handle: str, space: Namespace = HOME, owner: str = "") -> object:
    return pool.put(space, pack_tokens(ids), state_of(ids), handle, owner)


def ids_of(name: int, length: int = 20) -> list[int]:
    """Tokens that share nothing with another name's."""
    return [name * 1000 + index for index in range(length)]


ONE = capacity_for(20) * TOKEN_BYTES
"""Bytes of the storage of one state of 20 tokens."""


def pool_for(num_states: float) -> CachePool:
    return CachePool(int(num_states * ONE))


def pool_and_clock(num_states: float) -> tuple[CachePool, list[float]]:
    """A pool, and the seconds that its clock shows, in a list of one."""
    now = [0.0]
    return CachePool(int(num_states * ONE), clock=lambda: now[0]), now


# -- finding ---------------------------------------------------------------------------------------------------------


def test_the_longest_prefix_is_found_and_cropped_to_what_is_shared() -> None:
    pool = pool_for(10)
    put(pool, [1, 2, 3], "a")
    put(pool, [1, 2, 3, 4, 5, 6], "b")
    put(pool, [1, 9, 9], "c")
    for asked, limit, want in [
        ([1, 2, 3, 4, 5, 6], 99, 6),
        ([1, 2, 3, 4, 5, 6, 7, 8], 99, 6),
        ([1, 2, 3, 4, 7], 99, 4),
        ([1, 2, 3], 99, 3),
        ([1, 2, 3], 2, 2),
        ([1, 9, 8], 99, 2),
        ([1], 99, 1),
    ]:
        found = pool.longest_prefix(HOME, pack_tokens(asked), limit)
        assert found is not None
        assert found.num_tokens == want
        assert torch.equal(found.layer(0)[0], keys_of(asked)[:, :, :want])
    assert pool.longest_prefix(HOME, pack_tokens([8, 8]), 99) is None
    assert pool.longest_prefix(HOME, pack_tokens([1, 2, 3]), 0) is None
    assert pool.longest_prefix(HOME, b"", 99) is None


def test_reuse_never_crosses_models_or_tenants() -> None:
    """Field case 60: equal prompts of two tenants share nothing, not even the time they take."""
    pool = pool_for(10)
    put(pool, [1, 2, 3], "a", Namespace("model", "acme"))
    for other in (HOME, Namespace("model", "other"), Namespace("other", "acme")):
        assert pool.longest_prefix(other, pack_tokens([1, 2, 3]), 99) is None
    assert pool.longest_prefix(Namespace("model", "acme"), pack_tokens([1, 2, 3]), 99) is not None


def test_a_state_that_can_not_be_cropped_gives_way_to_the_next_best() -> None:
    """Field case 33: a sliding cache without its past only serves those who continue it."""
    kinds = (LayerKind("sliding", 4),)
    whole = state_of([1, 2, 3, 4, 5, 6, 7, 8], kinds)
    came = KVState.from_layers(kinds, [(k.clone(), v.clone()) for k, v in whole.layers()], 8)
    pool = pool_for(10)
    pool.put(HOME, pack_tokens([1, 2, 3, 4, 5, 6, 7, 8]), came, "late")
    pool.put(HOME, pack_tokens([1, 2, 3]), state_of([1, 2, 3], kinds), "early")
    found = pool.longest_prefix(HOME, pack_tokens([1, 2, 3, 4, 5, 9]), 99)
    assert found is not None
    assert found.num_tokens == 3
    assert pool.longest_prefix(HOME, pack_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9]), 99) is came


# -- budget ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_is_named() -> None:
    pool = pool_for(3)
    for name in range(3):
        assert put(pool, ids_of(name), f"h{name}") == []
    assert pool.longest_prefix(HOME, pack_tokens(ids_of(0)), 99) is not None
    assert put(pool, ids_of(3), "h3") == ["h1"]
    assert put(pool, ids_of(4), "h4") == ["h2"]
    assert [name for name in range(5) if pool.has(f"h{name}")] == [0, 3, 4]
    pool.check_integrity()


def test_two_agents_that_take_turns_both_stay_cached() -> None:
    """Field case 62: main agent and sub-agent do not push each other out."""
    pool = pool_for(2.5)
    put(pool, ids_of(1), "main")
    put(pool, ids_of(2), "sub")
    for turn in range(10):
        for name in (1, 2):
            found = pool.longest_prefix(HOME, pack_tokens([*ids_of(name), 7 + turn]), 99)
            assert found is not None
            assert found.num_tokens == 20


def test_storage_that_is_shared_is_counted_once() -> None:
    pool = CachePool(1 << 20)
    state, ids = state_of(ids_of(0)), ids_of(0)
    pool.put(HOME, pack_tokens(ids), state, "h0")
    before = pool.size_info().used_bytes
    assert before == state.buffer.nbytes
    for step in range(1, 10):
        ids = [*ids, step]
        state = extend(state, ids)
        pool.put(HOME, pack_tokens(ids), state, f"h{step}")
    pool.put(HOME, pack_tokens(ids[:5]), state.crop(5), "cropped")
    info = pool.size_info()
    assert (info.num_entries, info.num_buffers) == (11, 1)
    assert info.used_bytes == before
    pool.check_integrity()


def test_a_buffer_that_grew_is_counted_at_its_new_size() -> None:
    pool = CachePool(1 << 20)
    state, ids = state_of(ids_of(0)), ids_of(0)
    pool.put(HOME, pack_tokens(ids), state, "h0")
    longer = ids_of(0, 1000)
    grown = extend(state, longer)
    assert grown.buffer is state.buffer
    pool.put(HOME, pack_tokens(longer), grown, "h1")
    assert pool.size_info().used_bytes == grown.buffer.nbytes > 7000
    pool.check_integrity()


def test_what_a_reader_appended_without_keeping_it_is_counted_too() -> None:
    """An export feeds the pending token, a failed decode leaves its storage grown: the budget must know."""
    pool = CachePool(1 << 20)
    state = state_of(ids_of(0))
    pool.put(HOME, pack_tokens(ids_of(0)), state, "h0")
    extend(state, ids_of(0, 2000))
    assert state.buffer.nbytes > 16_000
    assert pool.size_info().used_bytes == state.buffer.nbytes


def test_a_cache_larger_than_the_budget_is_refused_and_the_rest_stays() -> None:
    pool = pool_for(2)
    put(pool, ids_of(0), "h0")
    with pytest.raises(CacheBudgetError, match=r"memory=") as caught:
        put(pool, ids_of(1, 500), "big")
    assert f"{pool.budget_bytes:,}" in str(caught.value)
    assert pool.has("h0")
    assert not pool.has("big")
    assert pool.size_info().num_entries == 1
    pool.check_integrity()


def test_a_grown_chain_evicts_what_its_own_buffer_can_not_spare() -> None:
    """The new state is in use, its ancestors share its storage: others go, never the whole budget over."""
    pool = pool_for(3)
    put(pool, ids_of(1), "pinned")
    pool.pin("pinned")
    state = state_of(ids_of(0))
    pool.put(HOME, pack_tokens(ids_of(0)), state, "h0")
    longer = ids_of(0, 160)  # its storage alone fits; next to the pinned one it does not
    grown = extend(state, longer)
    assert 2 * ONE < grown.buffer.nbytes <= 3 * ONE
    lost = pool.put(HOME, pack_tokens(longer), grown, "h1")
    assert sorted(lost) == ["h0", "h1"]
    info = pool.size_info()
    assert info.used_bytes == ONE <= info.budget_bytes
    assert pool.has("pinned")
    pool.check_integrity()


def test_the_budget_holds_again_once_pins_that_exceeded_it_end() -> None:
    for undo in ("unpin", "ttl"):
        pool, now = pool_and_clock(2)
        put(pool, ids_of(1), "a")
        state = state_of(ids_of(0))
        pool.put(HOME, pack_tokens(ids_of(0)), state, "b")
        for handle in ("a", "b"):
            pool.pin(handle, None if undo == "unpin" else 0.2)
        grown = extend(state, ids_of(0, 100))  # in place: the pinned buffer grows under its pin
        pool.put(HOME, pack_tokens(ids_of(0, 100)), grown, "b2")
        assert pool.has("a")
        assert pool.has("b")
        if undo == "unpin":
            pool.unpin("a")
            pool.unpin("b")
        else:
            now[0] += 0.25
        pool.check_integrity()
        put(pool, ids_of(5), "next")
        pool.check_integrity()
        assert pool.has("next")
        assert pool.size_info().used_bytes <= pool.budget_bytes


def test_nothing_is_kept_for_no_tokens() -> None:
    pool = pool_for(2)
    assert pool.put(HOME, b"", KVState.empty(KINDS), "none") == []
    assert not pool.has("none")
    assert pool.size_info().num_entries == 0


def test_tensors_are_freed_with_their_entry() -> None:
    """Field case 14: what the pool lets go is memory again."""
    pool = pool_for(10)
    state = state_of(ids_of(0))
    storage = weakref.ref(state.buffer)
    pool.put(HOME, pack_tokens(ids_of(0)), state, "h0")
    del state
    gc.collect()
    assert storage() is not None
    pool.drop("h0")
    gc.collect()
    assert storage() is None


# -- pins, handles, owners -------------------------------------------------------------------------------------------


def test_a_pinned_cache_stays_until_it_is_unpinned_as_often() -> None:
    """Field case 65: whoever knows that a cache is needed again says so."""
    pool = pool_for(2)
    put(pool, ids_of(0), "kept")
    assert pool.pin("kept")
    assert pool.pin("kept")
    for name in range(1, 6):
        put(pool, ids_of(name), f"h{name}")
    assert pool.has("kept")
    assert pool.size_info().num_pinned == 1
    pool.unpin("kept")
    put(pool, ids_of(6), "h6")
    assert pool.has("kept")
    pool.unpin("kept")
    put(pool, ids_of(7), "h7")
    put(pool, ids_of(8), "h8")
    assert not pool.has("kept")
    pool.check_integrity()


@pytest.mark.parametrize("ttl_s", [None, 3600])
def test_a_pin_follows_its_handle_to_other_tokens_and_back_from_nothing(ttl_s: float | None) -> None:
    """The handle's cache is put again: longer, as an ingested one is, or rebuilt after it failed in use."""
    pool = pool_for(3)
    put(pool, ids_of(0), "kept")
    assert pool.pin("kept", ttl_s)
    state = state_of(ids_of(0, 95))
    pool.put(HOME, pack_tokens(ids_of(0, 95)), state, "kept")
    assert pool.size_info().num_pinned == 1
    pool.drop_storage(state)
    assert pool.size_info().num_pinned == 0
    put(pool, ids_of(0, 95), "kept")
    for name in range(1, 6):
        put(pool, ids_of(name), f"h{name}")
    assert pool.has("kept")
    pool.unpin("kept")
    assert pool.size_info().num_pinned == 0
    for name in range(6, 9):
        put(pool, ids_of(name), f"h{name}")
    assert not pool.has("kept")
    pool.check_integrity()


def test_a_pin_with_a_time_limit_ends_by_itself() -> None:
    pool, now = pool_and_clock(2)
    put(pool, ids_of(0), "kept")
    assert pool.pin("kept", ttl_s=0.15)
    put(pool, ids_of(1), "h1")
    put(pool, ids_of(2), "h2")
    assert pool.has("kept")
    now[0] += 0.2
    assert pool.size_info().num_pinned == 0
    put(pool, ids_of(3), "h3")
    put(pool, ids_of(4), "h4")
    assert not pool.has("kept")


def test_pinning_what_is_gone_says_so() -> None:
    pool = pool_for(2)
    assert not pool.pin("nobody")
    pool.unpin("nobody")
    assert pool.drop("nobody") == []
    assert pool.release("nobody") == []
    pool.check_integrity()


def test_when_pins_fill_the_budget_the_newcomer_goes_and_is_named() -> None:
    pool = pool_for(2)
    for name in range(2):
        put(pool, ids_of(name), f"h{name}")
        pool.pin(f"h{name}")
    assert put(pool, ids_of(2), "late") == ["late"]
    assert not pool.has("late")
    assert pool.size_info().used_bytes <= pool.budget_bytes
    pool.check_integrity()


def test_handles_of_the_same_tokens_share_one_entry_and_are_lost_together() -> None:
    pool = pool_for(4)
    put(pool, ids_of(0), "a")
    put(pool, ids_of(0), "b")
    assert pool.size_info().num_entries == 1
    assert pool.drop("a") == ["a", "b"]
    assert not pool.has("b")
    pool.check_integrity()


def test_a_handle_that_moves_to_longer_tokens_is_found_there() -> None:
    """A handle's pending token may be fed later: the same id then stands for a longer state."""
    pool = pool_for(4)
    put(pool, ids_of(0, 19), "a")
    put(pool, ids_of(0, 20), "a")
    pool.check_integrity()
    pool.drop("a")
    found = pool.longest_prefix(HOME, pack_tokens(ids_of(0)), 99)
    assert found is None or found.num_tokens == 19
    pool.check_integrity()


def test_release_drops_what_nobody_else_owns_or_pins() -> None:
    """Field cases 53 and 65: a thread that ended leaves no cache behind, and takes none from others."""
    pool = pool_for(10)
    put(pool, ids_of(0), "own", owner="thread:1")
    put(pool, ids_of(1), "shared", owner="thread:1")
    put(pool, ids_of(1), "shared", owner="thread:2")
    put(pool, ids_of(2), "pinned", owner="thread:1")
    put(pool, ids_of(3), "other", owner="thread:2")
    pool.pin("pinned")
    assert pool.release("thread:1") == ["own"]
    assert [name for name in ("own", "shared", "pinned", "other") if pool.has(name)] == ["shared", "pinned", "other"]
    pool.check_integrity()
    assert pool.release("thread:1") == []
    assert sorted(pool.release("thread:2")) == ["other", "shared"]
    pool.check_integrity()


def test_what_was_also_made_outside_of_any_owner_outlives_the_owner() -> None:
    """`scope()`: a cache that was there before the block, or was made outside too, is not the block's to drop."""
    for first, second in [("", "scope:1"), ("scope:1", "")]:
        pool = pool_for(10)
        put(pool, ids_of(0), "outside", owner=first)
        put(pool, ids_of(0), "again", owner=second)
        assert pool.release("scope:1") == []
        assert pool.has("outside")
        pool.check_integrity()


def test_clear_drops_everything_pinned_or_not() -> None:
    pool = pool_for(10)
    for name in range(4):
        put(pool, ids_of(name), f"h{name}", owner="t")
    pool.pin("h1")
    assert sorted(pool.clear()) == ["h0", "h1", "h2", "h3"]
    info = pool.size_info()
    assert (info.used_bytes, info.num_entries, info.num_buffers, info.num_pinned) == (0, 0, 0, 0)
    assert pool.longest_prefix(HOME, pack_tokens(ids_of(0)), 99) is None
    pool.check_integrity()
    assert put(pool, ids_of(0), "h0") == []


def test_dropping_a_storage_drops_all_that_share_it_and_nothing_else() -> None:
    pool = pool_for(10)
    state = state_of(ids_of(0))
    pool.put(HOME, pack_tokens(ids_of(0)), state, "parent")
    child = extend(state, [*ids_of(0), 7])
    pool.put(HOME, pack_tokens([*ids_of(0), 7]), child, "child")
    put(pool, ids_of(1), "other")
    assert sorted(pool.drop_storage(child)) == ["child", "parent"]
    assert pool.drop_storage(child) == []
    assert pool.has("other")
    pool.check_integrity()


def test_broken_books_are_noticed() -> None:
    pool = pool_for(10)
    put(pool, ids_of(0), "h0", owner="t")
    nodes = pool._indexes.pop(HOME)
    with pytest.raises(IntegrityError, match="index and buffers"):
        pool.check_integrity()
    pool._indexes[HOME] = nodes
    entry = pool._handles.pop("h0")
    with pytest.raises(IntegrityError, match="handles"):
        pool.check_integrity()
    pool._handles["h0"] = entry
    del pool._owners["t"]
    with pytest.raises(IntegrityError, match="owners"):
        pool.check_integrity()


def test_lru_orders_by_last_use() -> None:
    candidates = [Candidate(1, 10, 3.0), Candidate(2, 99, 1.0), Candidate(3, 5, 2.0)]
    assert [candidate.key for candidate in LRU().order(candidates)] == [2, 3, 1]
    assert LRU().order([]) == []


# -- any walk --------------------------------------------------------------------------------------------------------

walks = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "grow", "grow", "crop", "find", "pin", "pin_ttl", "unpin", "drop", "release"]),
        st.integers(0, 3),
        st.integers(1, 90),
    ),
    min_size=10,
    max_size=60,
)


def pinned_bytes(pool: CachePool) -> int:
    """Storage that pins hold: what may exceed the budget."""
    groups = pool._buffers.items()
    return sum(next(iter(group)).state.buffer.nbytes for _, group in groups if any(map(pool._is_pinned, group)))


@settings(max_examples=150, deadline=None)
@given(walk=walks, room=st.sampled_from([2, 3, 6]))
def test_any_walk_keeps_books_and_budget_and_answers_with_the_right_keys(
    walk: list[tuple[str, int, int]], room: int
) -> None:
    pins = Counter[str]()
    pool, now = pool_and_clock(room)
    for number, (what, name, length) in enumerate(walk):
        now[0] += 0.00003
        ids, handle, owner = ids_of(name, length), f"h{name}-{length % 3}", f"t{length % 3}"
        had_pins = pool.size_info().num_pinned > 0
        if what == "put":
            if state_of(ids).buffer.nbytes <= pool.budget_bytes:
                put(pool, ids, handle, owner=owner)
        elif what in ("grow", "crop"):
            found = pool.longest_prefix(HOME, pack_tokens(ids), length)
            if found is not None and what == "grow":
                longer = [*ids[: found.num_tokens], *range(number * 5000, number * 5000 + length)]
                grown = extend(found, longer)
                if grown.buffer.nbytes <= pool.budget_bytes:
                    pool.put(HOME, pack_tokens(longer), grown, f"g{number}", owner)
                else:  # what a workspace does with an answer that outgrew the budget
                    pool.drop_storage(grown)
            elif found is not None:
                shorter = found.crop(max(1, found.num_tokens // 2))
                pool.put(HOME, pack_tokens(ids[: shorter.num_tokens]), shorter, f"c{number}")
        elif what == "find":
            found = pool.longest_prefix(HOME, pack_tokens(ids), length)
            if found is not None:
                assert torch.equal(found.layer(0)[0], keys_of(ids)[:, :, : found.num_tokens])
        elif what == "pin":
            assert pool.pin(handle) == pool.has(handle)
            pins[handle] += 1
        elif what == "pin_ttl":
            pool.pin(handle, ttl_s=0.0001)
        elif what == "unpin":
            pool.unpin(handle)
        elif what == "drop":
            was_there = pool.has(handle)
            assert (handle in pool.drop(handle)) == was_there
        else:
            pool.release(owner)
        pool.check_integrity()
        info = pool.size_info()
        actual = sum(e.state.buffer.nbytes for e in {id(e.state.buffer): e for e in pool._entries()}.values())
        if what == "put":
            assert info.used_bytes == actual or had_pins
        assert info.used_bytes <= max(info.budget_bytes, pinned_bytes(pool))
    for handle in pins.elements():
        pool.unpin(handle)
    now[0] += 0.0002  # no pin with a time limit was longer
    assert pool.size_info().num_pinned == 0
    assert pool.size_info().used_bytes <= pool.budget_bytes
    pool.clear()
    pool.check_integrity()


def test_eight_threads_leave_sound_books_and_only_ever_find_right_keys() -> None:
    pool, now = pool_and_clock(12)
    wrong: list[object] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for turn in range(60):
                name, length = rng.randrange(6), rng.randint(1, 60)
                ids = ids_of(name, length)
                found = pool.longest_prefix(HOME, pack_tokens(ids), length)
                if found is not None and not torch.equal(found.layer(0)[0], keys_of(ids)[:, :, : found.num_tokens]):
                    wrong.append((number, turn))
                handle = f"{number}-{turn}"
                state = extend(found or KVState.empty(KINDS), ids)
                pool.put(HOME, pack_tokens(ids), state, handle, f"t{number}")
                match rng.randrange(6):
                    case 0:
                        pool.pin(handle, ttl_s=0.001)
                    case 1:
                        pool.drop(handle)
                    case 2:
                        pool.release(f"t{number}")
                    case 3:
                        pool.check_integrity()
                    case 4:
                        pool.size_info()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test must see it
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    now[0] += 0.01
    put(pool, ids_of(9), "last")
    pool.check_integrity()
    assert pool.size_info().used_bytes <= pool.budget_bytes
