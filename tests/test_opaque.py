"""Opaque layers are handed over exactly: copied, never shared, never cropped, and counted."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import HumanMessage, SystemMessage
from test_attacks import MARKS_LAST
from transformers import LlamaConfig, cache_utils
from transformers.cache_utils import (
    DummyLayer,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
    QuantizedCache,
    QuantizedLayer,
)

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import CacheBudgetError, ConfigError, IntegrityError
from langgraph_latent.events import Decoded, Delivered, Diverged, Prefilled
from langgraph_latent.handle import KVHandle
from langgraph_latent.handle.tokens import pack_tokens
from langgraph_latent.kv import codec
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.opaque import copy_layer, fill_layer, move_layer, plain_of, tensors_of
from langgraph_latent.kv.state import KVState, KVTail
from langgraph_latent.pool.pool import CachePool, Namespace
from langgraph_latent.testing import CHATML, tiny_tokenizer
from langgraph_latent.testing.catalogue import catalogue, save_toy

HOME = Namespace("model", "")
STORY = "the team that reads the report hands over what it knows to the team that decides. "
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ '(an answer)' if m['role'] == 'assistant' and not loop.last else m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Tells an older answer otherwise than it was sampled."""


class GroupedLayer(QuantizedLayer):
    """A group-wise quantised layer that needs no package: like HQQ's, a tensor beside a dict of tensors."""

    def __init__(self) -> None:
        super().__init__(residual_length=6)

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        scale = tensor.abs().amax() / 127
        return (tensor / scale).round().to(torch.int8), {"scale": scale, "axis": axis}

    def _dequantize(self, qtensor: Any) -> torch.Tensor:
        return qtensor[0] * qtensor[1]["scale"]


def layer_makers() -> dict[str, Callable[[], Any]]:
    """Every cache layer of transformers that can be made here, and of ours."""
    sizes = {"max_cache_len": 16, "sliding_window": 6}
    makers: dict[str, Callable[[], Any]] = {"GroupedLayer": GroupedLayer}
    for name, kind in vars(cache_utils).items():
        if name.endswith("Layer") and inspect.isclass(kind) and not inspect.isabstract(kind):
            needed = sizes.keys() & inspect.signature(kind).parameters.keys()
            makers[name] = lambda kind=kind, needed=needed: kind(**{size: sizes[size] for size in needed})
    for name in ("QuantoQuantizedLayer", "HQQQuantizedLayer"):  # they need packages
        makers.pop(name)
    return makers


MAKERS = layer_makers()


def write(layer: Any, num_tokens: int = 5, seed: int = 0) -> list[torch.Tensor]:
    """Write so many tokens to a layer in every way that it has; what it gave back."""
    rng = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    given: list[torch.Tensor] = []
    if hasattr(layer, "update") and not isinstance(layer, DummyLayer):
        given += layer.update(some(1, 2, num_tokens, 4), some(1, 2, num_tokens, 4))
    if hasattr(layer, "update_indexer"):
        given.append(layer.update_indexer(some(1, num_tokens, 4)))
    if hasattr(layer, "update_conv_state"):
        given.append(layer.update_conv_state(some(1, 6, num_tokens), conv_kernel_size=4))
    if hasattr(layer, "update_recurrent_state"):
        given.append(layer.update_recurrent_state(some(1, 2, 4, 4)))
    return [tensor.clone() for tensor in given]


def written(name: str, seed: int = 0) -> Any:
    layer = MAKERS[name]()
    write(layer, seed=seed)
    return layer


def contents(layer: Any) -> dict[str, Any]:
    """What a layer holds, by path, so that it can be compared."""
    return {**plain_of(layer), **{path: (part.dtype, part.tolist()) for path, part in tensors_of(layer).items()}}


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from leaves(item)
    else:
        yield value


# -- layers as values ------------------------------------------------------------------------------------------------


def test_the_layers_of_every_kind_are_here() -> None:
    """So that none is left out below without being noticed."""
    assert set(MAKERS) >= {
        *("DynamicLayer", "DynamicSlidingWindowLayer", "DynamicIndexedLayer", "DummyLayer", "Fp8QuantizedLayer"),
        *("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer", "StaticLayer", "StaticSlidingWindowLayer"),
        *("LinearAttentionAndSlidingWindowAttentionLayer", "StaticIndexedLayer", "GroupedLayer"),
    }


@pytest.mark.parametrize("name", MAKERS)
def test_nothing_is_in_a_layer_but_tensors_numbers_texts_dtypes_and_devices(name: str) -> None:
    """Anything else would be shared by copies and lost in files."""
    layer = written(name)
    known, others = [], []
    for leaf in leaves(vars(layer)):
        (others if isinstance(leaf, torch.dtype | torch.device) else known).append(leaf)
    assert len(known) == len(tensors_of(layer)) + len(plain_of(layer))
    assert all(leaf is None or isinstance(leaf, torch.Tensor | bool | int | float | str) for leaf in known), known


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_of_a_layer_shares_no_storage_and_goes_on_alike(name: str) -> None:
    layer = written(name)
    copied = copy_layer(layer)
    assert type(copied) is type(layer)
    assert contents(copied) == contents(layer)
    for path, part in tensors_of(layer).items():
        if part.numel():
            assert part.untyped_storage().data_ptr() != tensors_of(copied)[path].untyped_storage().data_ptr()
    before = contents(layer)
    given = write(copied, 3, seed=1)
    assert contents(layer) == before
    assert name == "DummyLayer" or contents(copied) != before
    for mine, theirs in zip(given, write(layer, 3, seed=1), strict=True):
        assert torch.equal(mine, theirs)
    assert contents(copied) == contents(layer)


@pytest.mark.parametrize("name", MAKERS)
def test_a_copy_of_an_empty_layer_begins_alike_and_leaves_it_empty(name: str) -> None:
    layer = MAKERS[name]()
    before = contents(layer)
    write(copy_layer(layer))
    assert contents(layer) == before == contents(MAKERS[name]())


@pytest.mark.parametrize("name", MAKERS)
def test_a_moved_layer_is_on_the_device_and_says_so(name: str) -> None:
    layer = written(name)
    before = contents(layer)
    moved = move_layer(layer, torch.device("meta"))
    assert {part.device.type for part in tensors_of(moved).values()} <= {"meta"}
    assert {leaf.type for leaf in leaves(vars(moved)) if isinstance(leaf, torch.device)} <= {"meta"}
    assert {path: part.shape for path, part in tensors_of(moved).items()} == {
        path: part.shape for path, part in tensors_of(layer).items()
    }
    assert plain_of(moved) == plain_of(layer)
    assert contents(layer) == before
    assert contents(move_layer(layer, torch.device("cpu"))) == before


@pytest.mark.parametrize("name", MAKERS)
def test_a_filled_layer_goes_on_like_the_one_whose_leaves_it_has(name: str) -> None:
    template, layer = written(name, seed=3), written(name)
    write(layer, 4, seed=4)
    before = contents(template)
    filled = fill_layer(template, {**tensors_of(copy_layer(layer)), **plain_of(layer)})
    assert contents(filled) == contents(layer)
    assert contents(template) == before
    for mine, theirs in zip(write(filled, 2, seed=5), write(layer, 2, seed=5), strict=True):
        assert torch.equal(mine, theirs)
    assert contents(template) == before


def test_a_tensor_is_named_by_its_path() -> None:
    hybrid = written("LinearAttentionAndFullAttentionLayer")
    assert list(tensors_of(hybrid)) == ["keys", "values", "conv_states.0", "recurrent_states.0"]
    assert plain_of(hybrid)["has_previous_state.0"] is True
    grouped = written("GroupedLayer")
    assert {"_quantized_keys.0", "_quantized_keys.1.scale"} <= set(tensors_of(grouped))
    assert plain_of(grouped)["_quantized_keys.1.axis"] == 0
    assert isinstance(copy_layer(grouped)._quantized_keys, tuple)


# -- states with opaque layers --------------------------------------------------------------------------------------

KINDS = (LayerKind("full"), LayerKind("linear"), LayerKind("hybrid"), LayerKind("none"))
PER_TOKEN = 2 * 2 * 4 * 4  # keys and values, heads, dim, float32
CONV_AND_RECURRENT = (6 * 4 + 2 * 4 * 4) * 4


def empty_state() -> KVState:
    layers = [None, LinearAttentionLayer(), LinearAttentionAndFullAttentionLayer(), DummyLayer()]
    return KVState.empty(KINDS, layers)


def feed(tail: KVTail, num_tokens: int, seed: int = 0) -> None:
    """What a model call on so many tokens does to a tail."""
    for index, layer in enumerate(tail.cache.layers):
        write(layer, num_tokens, 10 * seed + index)
    tail.fed(num_tokens)


def extended(state: KVState, num_tokens: int, seed: int = 0) -> KVState:
    with state.append() as tail:
        feed(tail, num_tokens, seed)
        return tail.seal()


def state_of(num_tokens: int, seed: int = 0) -> KVState:
    return extended(empty_state(), num_tokens, seed)


def test_a_sealed_state_is_a_snapshot() -> None:
    with empty_state().append() as tail:
        feed(tail, 5)
        first = tail.seal()
        before = first.checksum()
        feed(tail, 3, seed=1)
        second = tail.seal()
        after = second.checksum()
        feed(tail, 1, seed=2)
    assert (first.num_tokens, second.num_tokens) == (5, 8)
    assert (first.checksum(), second.checksum()) == (before, after)
    assert first.equals(state_of(5))
    assert second.equals(extended(state_of(5), 3, seed=1))


def test_appending_to_a_state_leaves_it_as_it_was() -> None:
    state = state_of(5)
    before = state.checksum()
    child = extended(state, 3, seed=1)
    assert state.checksum() == before
    assert (state.num_tokens, child.num_tokens) == (5, 8)
    assert child.buffer is state.buffer
    assert not any(
        mine is theirs for mine, theirs in zip(state.opaque_layers[1:3], child.opaque_layers[1:3], strict=True)
    )


def test_branches_at_the_same_time_are_as_each_alone() -> None:
    """Field case 37 for recurrent layers: fan-out copies opaque layers too."""
    state = state_of(5)
    before = state.checksum()
    with state.append() as first, state.append() as second:
        for seed in (1, 2):
            feed(first, 2, seed)
            feed(second, 2, seed + 10)
        branches = first.seal(), second.seal()
    for branch, seeds in zip(branches, [(1, 2), (11, 12)], strict=True):
        alone = state_of(5)
        for seed in seeds:
            alone = extended(alone, 2, seed)
        assert branch.equals(alone)
    assert state.checksum() == before
    assert not branches[0].equals(branches[1])


def test_no_part_of_an_opaque_layer_can_be_taken_back() -> None:
    """Field case 32: a crop that kept the recurrent state would be silently wrong."""
    state = state_of(5)
    assert [length for length in range(-1, 8) if state.can_crop(length)] == [5]
    assert state.crop(5) is state
    for length in (0, 4, 6):
        with pytest.raises(ValueError, match=f"5 tokens can't be cropped to {length}"):
            state.crop(length)


def test_a_layer_that_keeps_nothing_does_not_stand_in_the_way_of_a_crop() -> None:
    with KVState.empty((LayerKind("full"), LayerKind("none")), [None, DummyLayer()]).append() as tail:
        feed(tail, 5)
        state = tail.seal()
    assert state.crop(3).num_tokens == 3
    assert state.crop(3).layers()[1] == ()


def test_a_failed_call_spoils_a_tail_and_nothing_else() -> None:
    """What it wrote into an opaque layer can't be taken back."""
    state = state_of(5)
    before = state.checksum()
    with state.append() as tail:
        feed(tail, 2, seed=1)
        write(tail.cache.layers[1], 1)  # and then the call fails
        tail.rewind(7)
        assert tail.num_tokens == 7
        with pytest.raises(RuntimeError, match=r"failed model call .* half-written"):
            _ = tail.cache
        assert tail.seal() is state
    assert state.checksum() == before
    assert extended(state, 2, seed=1).equals(extended(state_of(5), 2, seed=1))


def test_a_failed_call_over_attention_layers_alone_spoils_nothing() -> None:
    with KVState.empty((LayerKind("full"), LayerKind("none")), [None, DummyLayer()]).append() as tail:
        feed(tail, 5)
        write(tail.cache.layers[0], 2)
        tail.rewind(5)
        feed(tail, 1, seed=1)
        assert tail.seal().num_tokens == 6


def test_bytes_of_opaque_layers_are_counted() -> None:
    state = state_of(5)
    assert state.opaque_nbytes == 2 * CONV_AND_RECURRENT + 5 * PER_TOKEN  # linear and hybrid
    assert state.nbytes == state.opaque_nbytes + 5 * PER_TOKEN
    assert state.buffer.nbytes == capacity_for(5) * PER_TOKEN
    assert (empty_state().nbytes, empty_state().opaque_nbytes) == (0, 0)
    assert state.shape == (1, 2, 5, 4)
    assert KVState.empty((LayerKind("linear"),), [LinearAttentionLayer()]).shape == ()


def test_parts_are_named_and_layers_are_their_tensors() -> None:
    state = state_of(5)
    assert [list(state.tensors(index)) for index in range(4)] == [
        ["keys", "values"],
        ["conv_states.0", "recurrent_states.0"],
        ["keys", "values", "conv_states.0", "recurrent_states.0"],
        [],
    ]
    assert [len(tensors) for tensors in state.layers()] == [2, 2, 4, 0]


@pytest.mark.parametrize(("index", "path"), [(1, "conv_states.0"), (1, "recurrent_states.0"), (2, "keys")])
def test_any_changed_value_in_an_opaque_layer_is_unequal(index: int, path: str) -> None:
    state, other = state_of(5), state_of(5)
    assert state.equals(other)
    assert state.checksum() == other.checksum()
    tensors_of(other.opaque_layers[index])[path].flatten()[-1] += 1e-6
    assert not state.equals(other)
    assert state.checksum() != other.checksum()


def test_a_state_with_another_number_of_tensors_is_unequal() -> None:
    state, other = state_of(5), state_of(5)
    other.opaque_layers[1].recurrent_states[0] = None
    assert not state.equals(other)
    assert not other.equals(state)
    assert state.checksum() != other.checksum()


def test_a_state_moves_opaque_layers_too() -> None:
    state = state_of(5)
    cpu, meta = torch.device("cpu"), torch.device("meta")
    assert state.to([cpu, cpu, cpu, None]) is state
    assert state.to([None] * 4) is state
    before = state.checksum()
    moved = state.to([cpu, meta, meta, None])
    assert [{part.device.type for part in layer} for layer in moved.layers()] == [{"cpu"}, {"meta"}, {"meta"}, set()]
    assert moved.opaque_layers[1].device == meta
    assert moved.num_tokens == 5
    assert state.checksum() == before
    partly = state.to([meta, None, cpu, None])
    assert [{part.device.type for part in layer} for layer in partly.layers()] == [{"meta"}, {"cpu"}, {"cpu"}, set()]
    assert partly.opaque_layers[1].device == cpu  # None: anywhere, so where it was


# -- the pool --------------------------------------------------------------------------------------------------------


def ids_of(name: int, length: int) -> bytes:
    """Tokens that share nothing with another name's."""
    return pack_tokens([name * 1000 + index for index in range(length)])


ONE = state_of(20).buffer.nbytes + state_of(20).opaque_nbytes
"""Bytes of a state of 20 tokens: of its buffer and of its opaque layers."""


def test_the_pool_counts_the_opaque_layers_of_each_entry() -> None:
    pool = CachePool(1 << 30)
    state = state_of(20)
    pool.put(HOME, ids_of(0, 20), state, "short")
    assert pool.size_info().used_bytes == ONE
    longer = extended(state, 5, seed=1)
    pool.put(HOME, ids_of(0, 25), longer, "long")
    assert pool.size_info().num_buffers == 1
    assert pool.size_info().used_bytes == longer.buffer.nbytes + state.opaque_nbytes + longer.opaque_nbytes
    pool.put(HOME, ids_of(0, 25), longer, "again")  # the same tokens are one entry
    assert pool.size_info().used_bytes == longer.buffer.nbytes + state.opaque_nbytes + longer.opaque_nbytes
    pool.check_integrity()
    pool.drop("short")
    assert pool.size_info().used_bytes == longer.buffer.nbytes + longer.opaque_nbytes
    pool.check_integrity()
    pool.clear()
    assert pool.size_info().used_bytes == 0
    pool.check_integrity()
    pool.put(HOME, ids_of(1, 20), state_of(20), "new")
    assert pool.size_info().used_bytes == ONE
    pool.check_integrity()


def test_the_budget_holds_with_opaque_layers() -> None:
    pool = CachePool(int(2.5 * ONE))
    lost = [pool.put(HOME, ids_of(name, 20), state_of(20), f"h{name}") for name in range(4)]
    assert lost == [[], [], ["h0"], ["h1"]]
    assert pool.size_info().used_bytes == 2 * ONE
    pool.check_integrity()


def test_a_recurrent_state_has_a_size_though_its_buffer_has_none() -> None:
    """A model without any attention layer: all its layers are opaque."""
    kinds = (LayerKind("linear"),)
    with KVState.empty(kinds, [LinearAttentionLayer()]).append() as tail:
        feed(tail, 5)
        state = tail.seal()
    assert (state.num_tokens, state.buffer.nbytes, state.nbytes) == (5, 0, CONV_AND_RECURRENT)
    pool = CachePool(CONV_AND_RECURRENT)
    assert pool.put(HOME, ids_of(0, 5), state, "a") == []
    assert pool.put(HOME, ids_of(1, 5), extended(KVState.empty(kinds, [LinearAttentionLayer()]), 5), "b") == ["a"]
    pool.check_integrity()
    with pytest.raises(CacheBudgetError, match="memory="):
        CachePool(CONV_AND_RECURRENT - 1).put(HOME, ids_of(0, 5), state, "a")


def test_a_state_of_opaque_layers_serves_only_those_who_continue_it() -> None:
    """Field case 33 for recurrent layers: the next shorter one that fits is taken, or none."""
    pool = CachePool(1 << 30)
    short, long = state_of(5), state_of(9)
    pool.put(HOME, ids_of(0, 5), short, "short")
    pool.put(HOME, ids_of(0, 9), long, "long")
    assert pool.longest_prefix(HOME, ids_of(0, 12), 11) is long
    assert pool.longest_prefix(HOME, ids_of(0, 9), 8) is short  # the last token is to be fed again
    assert pool.longest_prefix(HOME, ids_of(0, 7) + ids_of(1, 3), 99) is short
    assert pool.longest_prefix(HOME, ids_of(0, 4) + ids_of(1, 3), 99) is None


def test_a_broken_count_of_opaque_bytes_is_noticed() -> None:
    pool = CachePool(1 << 30)
    pool.put(HOME, ids_of(0, 20), state_of(20), "h0")
    pool.check_integrity()
    pool._opaque_nbytes -= 1
    with pytest.raises(IntegrityError, match="opaque layers are counted"):
        pool.check_integrity()


# -- models ----------------------------------------------------------------------------------------------------------

TOYS = ["qwen3_next", "lfm2", "mamba2", "falcon_h1"]
READ, WRITTEN = list(range(40, 110)), [200, 7, 130, 41, 42, 99]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def toy() -> Callable[[str], ResidentModel]:
    """`toy("qwen3_next")`: a tiny random model with its probe's findings, made once."""
    made: dict[str, ResidentModel] = {}

    def make(name: str) -> ResidentModel:
        if name not in made:
            made[name] = ResidentModel(catalogue()[name].model(), tiny_tokenizer(), name, f"weights of {name}")
        return made[name]

    return make


def truth(model: ResidentModel, ids: list[int]) -> torch.Tensor:
    """Stock logits after the last token, from one forward over all of them without a cache."""
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((actual - expected).abs().max() / expected.abs().max()) <= TOLERANCE


def read(model: ResidentModel, ids: list[int]) -> KVState:
    with model.empty_state().append() as tail:
        model.prefill(ids, tail)
        return tail.seal()


def assert_continues(model: ResidentModel, state: KVState, before: list[int], behind: list[int]) -> None:
    """The half of `behind` at once, the rest token by token: every step gives the logits of one stock forward."""
    half = len(behind) // 2
    with state.append() as tail:
        assert_close(model.prefill(behind[:half], tail), truth(model, [*before, *behind[:half]]))
        for end in range(half + 1, len(behind) + 1):
            assert_close(model.prefill([behind[end - 1]], tail), truth(model, [*before, *behind[:end]]))


@pytest.mark.parametrize("name", TOYS)
def test_a_recurrent_state_goes_on_exactly(name: str, toy: Callable[[str], ResidentModel]) -> None:
    """Law 1 for opaque layers, from a state, from a state of a state, and after a file."""
    model = toy(name)
    state = read(model, READ)
    assert any(layer is not None for layer in state.opaque_layers)
    assert_continues(model, state, READ, WRITTEN)
    with state.append() as tail:
        model.prefill(WRITTEN, tail)
        assert_continues(model, tail.seal(), [*READ, *WRITTEN], [5, 6, 150])
    handle = KVHandle.root(model.spec.identity).extend("prompt", "", pack_tokens(READ), [])
    back = codec.decode(codec.encode(handle, state, model.spec), model.spec, model.opaque_layers).state
    assert back.equals(state)
    assert_continues(model, back, READ, WRITTEN)


@pytest.mark.parametrize("name", TOYS)
def test_no_shorter_prefix_of_a_recurrent_state_is_promised(name: str, toy: Callable[[str], ResidentModel]) -> None:
    """Field case 32, and the model's capabilities say why."""
    model = toy(name)
    state = read(model, READ)
    assert [length for length in range(len(READ) + 2) if state.can_crop(length)] == [len(READ)]
    with pytest.raises(ValueError, match="can't be cropped to 40"):
        state.crop(40)
    assert "opaque layers" in model.spec.capabilities.refusal("crop")
    assert model.spec.capabilities.can("append")


@pytest.mark.parametrize("name", TOYS)
def test_branches_of_a_recurrent_state_are_exact_and_leave_it_unchanged(
    name: str, toy: Callable[[str], ResidentModel]
) -> None:
    model = toy(name)
    state = read(model, READ)
    before = state.checksum()
    branches = [[200 + number, 9, 17 * number, 30] for number in range(4)]
    with ThreadPoolExecutor(len(branches)) as threads:
        list(threads.map(lambda behind: assert_continues(model, state, READ, behind), branches))
    assert state.checksum() == before
    assert_continues(model, state, READ, WRITTEN)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3_next", "falcon_h1", "gpt2"])
def test_a_mask_over_everything_changes_nothing(name: str, toy: Callable[[str], ResidentModel]) -> None:
    """Field case 27: over a cache and without one, for several tokens and for one."""
    model = toy(name)
    steps = [READ, WRITTEN[:3], WRITTEN[3:4]]
    logits: dict[str, list[torch.Tensor]] = {}
    states: list[KVState] = []
    for case in ("ones", "zero-free booleans", "none"):
        with model.empty_state().append() as tail:
            logits[case] = []
            for ids in steps:
                length = tail.num_tokens + len(ids)
                ones = torch.ones((1, length), dtype=torch.long)
                mask = {"ones": ones, "zero-free booleans": ones.bool(), "none": None}[case]
                logits[case].append(model.run(ids, tail, attention_mask=mask))
            states.append(tail.seal())
    for case in ("ones", "zero-free booleans"):
        for masked, plain in zip(logits[case], logits["none"], strict=True):
            assert_close(masked, plain)
    for index in range(len(model.kinds)):
        for masked, plain in zip(states[0].layer(index), states[2].layer(index), strict=True):
            torch.testing.assert_close(masked, plain, atol=1e-4, rtol=1e-4)
    assert_close(logits["none"][-1], truth(model, [*READ, *WRITTEN[:4]]))


# -- rollback and reuse through a chat model -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """`folder("qwen3_next", template)`: a toy saved with that chat template."""
    made: dict[tuple[str, str], Path] = {}

    def make(name: str, template: str = REWRITES) -> Path:
        if (name, template) not in made:
            made[name, template] = save_toy(tmp_path_factory.mktemp(name), name)
            tiny_tokenizer(template).save_pretrained(made[name, template])
        return made[name, template]

    return make


def alone(chat: ChatLatent, messages: list[Any]) -> str:
    """The answer in an empty workspace."""
    with LatentWorkspace() as empty:
        return str(ChatLatent(model=chat.model, workspace=empty, max_tokens=chat.max_tokens).invoke(messages).text)


def cache_read(reply: Any) -> int:
    return int(reply.usage_metadata["input_token_details"]["cache_read"])


@pytest.mark.parametrize("template", [REWRITES, MARKS_LAST], ids=["answer rewritten", "question rewritten"])
@pytest.mark.parametrize("name", TOYS)
def test_a_prompt_that_leaves_a_recurrent_handle_is_read_again(
    name: str, template: str, folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 32: the recurrent state has seen what the new prompt does not say, so nothing of it is reused."""
    chat = ChatLatent(model=str(folder(name, template)), workspace=ws, max_tokens=12)
    question, other = HumanMessage(STORY * 2), HumanMessage("and what did it decide?")
    first = chat.invoke([question])
    handle = ws.handle(first)
    before = ws.state_of(handle, chat.resident()).checksum()
    second = chat.invoke([other], inherit=handle)
    (diverged,) = [event for event in ws.tracer.events if isinstance(event, Diverged)]
    assert 20 < diverged.num_tokens < diverged.num_inherited == handle.num_tokens
    assert second.text == alone(chat, [question, first, other])
    assert cache_read(second) == 0
    route = second.response_metadata["kv_route"]
    assert (route["route"], route["code"]) == ("text", "diverged")
    assert f"{diverged.num_tokens} of {handle.num_tokens} tokens stay, 0 are reused" in route["reason"]
    assert "opaque layers" in route["reason"]
    assert [event.cache_read for event in ws.tracer.events if isinstance(event, Prefilled)][-1] == 0
    assert ws.state_of(handle, chat.resident()).checksum() == before


@pytest.mark.parametrize("name", TOYS)
def test_a_prompt_that_leaves_a_recurrent_handle_continues_what_was_read_before(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 32: the state of a shorter prefix is there, and the route names how much of the handle stays."""
    chat = ChatLatent(model=str(folder(name, MARKS_LAST)), workspace=ws, max_tokens=12)
    story = SystemMessage(STORY * 2)
    report = chat.read([story])
    question, other = HumanMessage("which team decides?"), HumanMessage("and what did it decide?")
    first = chat.invoke([question], inherit=report)
    assert cache_read(first) == report.num_tokens
    handle = ws.handle(first)
    second = chat.invoke([other], inherit=handle)
    assert second.text == alone(chat, [story, question, first, other])
    assert cache_read(second) == report.num_tokens
    route = second.response_metadata["kv_route"]
    assert (route["route"], route["code"]) == ("cache", "diverged")
    assert f"of {handle.num_tokens} tokens stay, {report.num_tokens} are reused" in route["reason"]
    delivered = [event for event in ws.tracer.events if isinstance(event, Delivered)][-1]
    assert delivered.cache_read == report.num_tokens


@pytest.mark.parametrize("name", TOYS)
def test_a_recurrent_handle_that_is_continued_is_reused_to_its_end(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """The other half of field case 32: no rollback, no loss. And several agents may continue it."""
    chat = ChatLatent(model=str(folder(name, CHATML)), workspace=ws, max_tokens=12)
    report = chat.read(STORY * 2)
    for question in ("which team decides?", "and who reads?"):
        reply = chat.invoke([HumanMessage(question)], inherit=report)
        assert reply.text == alone(chat, [HumanMessage(STORY * 2), HumanMessage(question)])
        assert cache_read(reply) == report.num_tokens
        assert reply.response_metadata["kv_route"]["route"] == "cache"


@pytest.mark.parametrize("name", TOYS)
def test_an_evicted_recurrent_handle_is_rebuilt_once_for_all_who_continue_it(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = ChatLatent(model=str(folder(name, CHATML)), workspace=ws, max_tokens=12)
    report = chat.read(STORY * 2)
    for handle in (report, ws.handle(chat.invoke("which team decides?", inherit=report))):
        questions = ("and who reads?", "who hands over?")
        expected = [chat.invoke(question, inherit=handle).text for question in questions]
        for one in (report, handle):
            ws.evict(one)
        replies = [chat.invoke(question, inherit=handle) for question in questions]
        assert [reply.text for reply in replies] == expected
        assert [cache_read(reply) for reply in replies] == [0, handle.num_tokens - handle.num_pending]
    ws.check_integrity()


def fail_at(model: ResidentModel, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this call of the model's forward, and none before or after it, run out of memory at its end."""
    stock, calls = model.model.forward, itertools.count(1)

    def failing(**arguments: Any) -> Any:
        output = stock(**arguments)
        if next(calls) == call:
            raise MemoryError("no room")
        return output

    monkeypatch.setattr(model.model, "forward", failing)


@pytest.mark.parametrize("name", TOYS)
def test_a_recurrent_state_that_fails_in_use_is_read_again(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ChatLatent(model=str(folder(name, CHATML)), workspace=ws, max_tokens=12)
    report = chat.read(STORY * 2)
    expected = alone(chat, [HumanMessage(STORY * 2), HumanMessage("which team decides?")])
    fail_at(chat.resident(), 1, monkeypatch)
    reply = chat.invoke("which team decides?", inherit=report)
    assert reply.text == expected
    assert reply.response_metadata["kv_route"]["code"] == "failed"
    assert "no room" in reply.response_metadata["kv_route"]["reason"]
    assert cache_read(reply) == 0


@pytest.mark.parametrize("name", TOYS)
def test_an_error_while_a_recurrent_model_answers_comes_out_as_it_is(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was sampled by then has no state any more; what was inherited is as good as before."""
    chat = ChatLatent(model=str(folder(name, CHATML)), workspace=ws, max_tokens=12)
    report = chat.read(STORY * 2)
    fail_at(chat.resident(), 4, monkeypatch)
    with pytest.raises(MemoryError, match="no room"):
        chat.invoke("which team decides?", inherit=report)
    assert [event.num_tokens for event in ws.tracer.events if isinstance(event, Decoded)] == [3]
    reply = chat.invoke("which team decides?", inherit=report)
    assert cache_read(reply) == report.num_tokens
    assert reply.text == alone(chat, [HumanMessage(STORY * 2), HumanMessage("which team decides?")])


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"])
def test_a_sliding_window_does_not_switch_the_reuse_of_prefixes_off(
    name: str, folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 33: the past beyond the window is kept for crops, and route and trace say what was reused."""
    chat = ChatLatent(model=str(folder(name)), workspace=ws, max_tokens=12)
    window = max(kind.window for kind in chat.resident().kinds)
    first = chat.invoke([HumanMessage(STORY * 2 + "which team decides?")])
    other = [HumanMessage(STORY * 2 + "and who reads?")]
    second = chat.invoke(other)
    assert second.text == alone(chat, other)
    assert cache_read(first) == 0
    assert cache_read(second) > 2 * window
    assert second.response_metadata["kv_route"]["code"] == "prefix"
    assert f"{cache_read(second)} leading tokens" in second.response_metadata["kv_route"]["reason"]
    assert [event.cache_read for event in ws.tracer.events if isinstance(event, Prefilled)] == [0, cache_read(second)]
    third = chat.invoke([HumanMessage("go on")], inherit=ws.handle(first))  # the template rewrites its answer
    assert third.response_metadata["kv_route"]["code"] == "diverged"
    assert cache_read(third) > 2 * window
    assert third.text == alone(chat, [HumanMessage(STORY * 2 + "which team decides?"), first, HumanMessage("go on")])


def test_a_sliding_cache_without_its_past_says_what_of_it_is_not_reused(
    folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 33: a file holds the window only. It is continued to its end, and nothing shorter is taken of it."""
    question, other = HumanMessage(STORY * 2), HumanMessage("go on")
    path = str(folder("mistral", MARKS_LAST))
    with LatentWorkspace() as sender:
        chat = ChatLatent(model=path, workspace=sender, max_tokens=12)
        blobs = [chat.export_kv_cache(chat.read([message])) for message in (question, SystemMessage(STORY * 2))]
    chat = ChatLatent(model=path, workspace=ws, max_tokens=12)
    rewritten, kept = (chat.ingest_kv_cache(blob or b"") for blob in blobs)
    reply = chat.invoke([other], inherit=kept)
    assert (cache_read(reply), reply.response_metadata["kv_route"]["route"]) == (kept.num_tokens, "cache")
    assert reply.text == alone(chat, [SystemMessage(STORY * 2), other])
    reply = chat.invoke([other], inherit=rewritten)
    (diverged,) = [event for event in ws.tracer.events if isinstance(event, Diverged)]
    assert 24 < diverged.num_tokens < rewritten.num_tokens
    route = reply.response_metadata["kv_route"]
    assert (cache_read(reply), route["route"], route["code"]) == (0, "text", "diverged")
    assert f"of {rewritten.num_tokens} tokens stay, 0 are reused" in route["reason"]
    assert [event.cache_read for event in ws.tracer.events if isinstance(event, Prefilled)] == [kept.num_tokens, 0]
    assert reply.text == alone(chat, [question, other])


# -- quantised layers ------------------------------------------------------------------------------------------------

QUANTISED = {"fp8": Fp8QuantizedLayer, "group-wise": GroupedLayer}


def quantised(make: Callable[[], Any], num_tokens: int = 0) -> KVState:
    kinds = (LayerKind("quantised"), LayerKind("full"))
    state = KVState.empty(kinds, [make(), None])
    return extended(state, num_tokens) if num_tokens else state


@pytest.mark.parametrize("name", QUANTISED)
def test_a_crop_of_quantised_layers_is_refused(name: str) -> None:
    """Field case 37: transformers' own crop skips the quantised part."""
    state = quantised(QUANTISED[name], 8)
    before = state.checksum()
    assert [length for length in range(10) if state.can_crop(length)] == [8]
    with pytest.raises(ValueError, match="8 tokens can't be cropped to 5"):
        state.crop(5)
    assert state.checksum() == before


@pytest.mark.parametrize("name", QUANTISED)
def test_branches_of_quantised_layers_are_as_each_alone(name: str) -> None:
    """Field case 37: a branch has a copy of the quantised part, also after it was quantised again."""
    state = quantised(QUANTISED[name], 8)
    before = state.checksum()
    with ThreadPoolExecutor(3) as threads:
        branches = list(threads.map(lambda seed: extended(extended(state, 4, seed), 5, seed + 10), (1, 2, 3)))
    assert state.checksum() == before
    for branch, seed in zip(branches, (1, 2, 3), strict=True):
        assert branch.equals(extended(extended(quantised(QUANTISED[name], 8), 4, seed), 5, seed + 10))
        stock = QUANTISED[name]()
        for num_tokens, own in ((8, 0), (4, seed), (5, seed + 10)):
            write(stock, num_tokens, 10 * own)
        assert contents(branch.opaque_layers[0]) == contents(stock)


def test_a_users_cache_config_is_left_as_it_was() -> None:
    """Field case 37: the dict that says how to quantise, and the cache made of it."""
    options = {"backend": "fp8"}
    config = LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4)
    cache = QuantizedCache(config=config, **options)
    before = [contents(layer) for layer in cache.layers]
    state = KVState.empty((LayerKind("quantised"),) * 2, cache.layers)
    assert extended(extended(state, 4), 3, seed=1).num_tokens == 7
    assert options == {"backend": "fp8"}
    assert [contents(layer) for layer in cache.layers] == before


@pytest.mark.parametrize("option", ["cache_config", "cache_implementation", "past_key_values"])
def test_a_cache_config_is_no_option_of_a_chat_model(option: str, folder: Callable[..., Path]) -> None:
    """What can't be honoured is refused by name, and the user's dict stays as it was."""
    given = {"backend": "fp8", "nbits": 4}
    with LatentWorkspace() as empty:
        with pytest.raises(ConfigError, match=option):
            ChatLatent(model=str(folder("llama")), workspace=empty, **{option: given})
        with pytest.raises(ConfigError, match=option):
            ChatLatent(model=str(folder("llama")), workspace=empty).invoke("go on", **{option: given})
    assert given == {"backend": "fp8", "nbits": 4}
