"""A KV state answers as transformers' own caches do, layer by layer; `test_opaque` has opaque ones."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconH1Config,
    Lfm2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.kv.buffer import KVBuffer, LayerStore
from langgraph_latent.kv.layers import LayerKind, empty_layers, layer_kinds
from langgraph_latent.kv.state import KVState, tensor_bytes

WINDOW = 6
FULL, SLIDING = LayerKind("full"), LayerKind("sliding", WINDOW)


def tokens(length: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pair = torch.randn(2, 1, 2, length, 4, generator=rng).to(dtype)
    return pair[0], pair[1]


def state_of(length: int, kinds: tuple[LayerKind, ...] = (FULL, SLIDING), seed: int = 0) -> KVState:
    with KVState.empty(kinds).append() as tail:
        for index, layer in enumerate(tail.cache.layers):
            layer.update(*tokens(length, seed + index))
        return tail.seal()


# -- kinds -----------------------------------------------------------------------------------------------------------


def test_layer_kinds_are_read_off_the_models_config() -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert layer_kinds(LlamaConfig(**small)) == (LayerKind("full"), LayerKind("full"))
    assert layer_kinds(MistralConfig(**small, sliding_window=24)) == (LayerKind("sliding", 24),) * 2
    assert layer_kinds(MistralConfig(**small, sliding_window=None)) == (LayerKind("full"),) * 2


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        (Qwen3NextConfig(num_hidden_layers=4, hidden_size=32), ["linear", "linear", "linear", "full"]),
        (Lfm2Config(num_hidden_layers=3, hidden_size=32, full_attn_idxs=[2]), ["linear", "linear", "full"]),
        (MambaConfig(num_hidden_layers=2, hidden_size=32), ["linear", "linear"]),
        (FalconH1Config(num_hidden_layers=2, hidden_size=32), ["hybrid", "hybrid"]),
    ],
    ids=["qwen3_next", "lfm2", "mamba", "falcon_h1"],
)
def test_a_layer_that_is_not_attention_over_tokens_is_opaque(config: PreTrainedConfig, kinds: list[str]) -> None:
    """Field case 32: a recurrent state can be handed over, and no part of it can be taken back."""
    known = layer_kinds(config)
    assert known == tuple(LayerKind(name) for name in kinds)
    state = KVState.from_layers(
        known,
        [tokens(5) if kind.has_tokens else layer for kind, layer in zip(known, empty_layers(config), strict=True)],
        5,
    )
    assert [layer is None for layer in state.opaque_layers] == [kind.has_tokens for kind in known]
    assert [length for length in range(7) if state.can_crop(length)] == [5]
    with pytest.raises(ValueError, match="5 tokens can't be cropped to 4"):
        state.crop(4)


def test_a_model_of_no_cache_layers_is_refused_with_what_to_do() -> None:
    with pytest.raises(UnsupportedLayerError, match=r"'llama'.*text edge"):
        layer_kinds(LlamaConfig(num_hidden_layers=0))


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize("length", range(14))
def test_first_needed_is_what_the_next_token_may_attend_to(window: int, length: int) -> None:
    """With a window of n, a token sees itself and the n - 1 tokens before it."""
    seen = [position for position in range(length) if length - position < window]
    assert LayerKind("sliding", window).first_needed(length) == (seen[0] if seen else length if length else 0)
    assert LayerKind("full").first_needed(length) == 0


# -- as transformers' own layers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 5, 6, 7, 13])
@pytest.mark.parametrize("sliding", [True, False])
def test_every_answer_is_transformers_own_layers_answer(chunk: int, sliding: bool) -> None:
    """At every length, for every query length: mask sizes, returned keys and values, sequence length, maximum."""
    stock = DynamicSlidingWindowLayer(sliding_window=WINDOW) if sliding else DynamicLayer()
    with KVState.empty((SLIDING if sliding else FULL,)).append() as tail:
        ours = tail.cache.layers[0]
        assert ours.is_sliding == stock.is_sliding
        assert ours.get_max_length() == stock.get_max_length()
        for step in range(30 // chunk):
            for query in range(1, 16):
                assert ours.get_mask_sizes(query) == stock.get_mask_sizes(query)
            assert ours.get_seq_length() == stock.get_seq_length() == tail.cache.get_seq_length()
            for mine, theirs in zip(ours.update(*tokens(chunk, step)), stock.update(*tokens(chunk, step)), strict=True):
                assert torch.equal(mine, theirs)
            kept = ours.get_seq_length() - SLIDING.first_needed(ours.get_seq_length()) if sliding else None
            if kept is None or kept == stock.keys.shape[-2]:
                assert torch.equal(ours.keys, stock.keys)
                assert torch.equal(ours.values, stock.values)


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3", "gpt2"])
def test_a_model_over_a_tail_gives_the_logits_of_one_forward(kind: str, tiny_folder: Callable[..., Path]) -> None:
    """Field cases 25 and 27, level 0: any split of a sequence gives the logits of the whole, past the window too."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(kind), dtype=torch.float32).eval()
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(3, 300, (1, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        whole = model(ids).logits[0]
        state = KVState.empty(layer_kinds(model.config))
        for begin, end in [(0, 40), (40, 41), (41, 70), (70, 71), (71, 90)]:
            with state.append() as tail:
                mask = torch.ones(1, end)
                logits = model(ids[:, begin:end], attention_mask=mask, **{name: tail.cache}).logits[0]
                assert torch.allclose(logits, whole[begin:end], atol=1e-4, rtol=0)
                state = tail.seal()
        stock = DynamicCache(config=model.config)
        model(ids, **{name: stock})
    for (keys, values), layer in zip(state.layers(), stock.layers, strict=True):
        assert torch.allclose(keys, layer.keys, atol=1e-4, rtol=0)
        assert torch.allclose(values, layer.values, atol=1e-4, rtol=0)


# -- crop ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(21))
def test_a_crop_is_the_state_that_was_there_before_by_view(length: int) -> None:
    """Field case 31: a crop takes a length to keep; keeping all or nothing are ordinary cases."""
    state = state_of(20)
    assert state.can_crop(length)
    cropped = state.crop(length)
    assert cropped.num_tokens == length
    for index, (keys, values) in enumerate(cropped.layers()):
        begin = cropped.kinds[index].first_needed(length)
        want = tokens(20, index)
        assert torch.equal(keys, want[0][:, :, begin:length])
        assert torch.equal(values, want[1][:, :, begin:length])
        assert keys.untyped_storage().data_ptr() == state.layer(index)[0].untyped_storage().data_ptr()
    assert state.num_tokens == 20


def test_cropping_to_the_whole_length_is_the_state_itself() -> None:
    state = state_of(5)
    assert state.crop(5) is state


@pytest.mark.parametrize("length", [-1, 6, 1000])
def test_a_crop_beyond_the_state_is_refused(length: int) -> None:
    state = state_of(5)
    assert not state.can_crop(length)
    with pytest.raises(ValueError, match=f"5 tokens can't be cropped to {length}"):
        state.crop(length)


def test_a_sliding_layer_that_came_without_its_past_refuses_crops_that_need_it() -> None:
    whole = state_of(20)
    came = KVState.from_layers(whole.kinds, [(k.clone(), v.clone()) for k, v in whole.layers()], 20)
    assert came.equals(whole)
    assert [length for length in range(21) if came.can_crop(length)] == [20]
    with pytest.raises(ValueError, match="can't be cropped"):
        came.crop(19)


def test_a_state_from_tensors_goes_on_like_the_one_it_was_taken_from() -> None:
    whole = state_of(20)
    came = KVState.from_layers(whole.kinds, whole.layers(), 20)
    grown = []
    for state in (whole, came):
        with state.append() as tail:
            for index, layer in enumerate(tail.cache.layers):
                layer.update(*tokens(9, 50 + index))
            grown.append(tail.seal())
    assert grown[0].equals(grown[1])
    assert grown[1].can_crop(25)
    assert grown[1].crop(25).equals(grown[0].crop(25))
    assert came.equals(whole)


# -- reading it ------------------------------------------------------------------------------------------------------


def test_the_empty_state_has_no_tokens_no_bytes_and_no_layers() -> None:
    state = KVState.empty((FULL, SLIDING))
    assert (state.num_tokens, state.nbytes, state.layers()) == (0, 0, [])
    assert state.can_crop(0)
    assert state.equals(KVState.empty((FULL, SLIDING)))
    assert state.checksum() == KVState.empty((FULL, SLIDING)).checksum()


def test_nbytes_counts_what_the_next_token_may_attend_to() -> None:
    state = state_of(20)
    per_token = 2 * 2 * 4 * 4  # keys and values, heads, dim, float32
    assert state.nbytes == per_token * (20 + WINDOW - 1)


def test_equal_content_in_other_storage_is_equal() -> None:
    one, two = state_of(20), state_of(23).crop(20)
    other = state_of(20)
    assert one.buffer is not other.buffer
    assert one.equals(other)
    assert one.checksum() == other.checksum()
    assert not one.equals(two)  # other tokens: the generator was asked for more at once


def test_any_changed_value_length_or_kind_is_unequal() -> None:
    base = state_of(20)
    for index in range(2):
        for part in range(2):
            pairs = [[k.clone(), v.clone()] for k, v in base.layers()]
            pairs[index][part][0, 1, -1, 3] += 1e-6
            other = KVState.from_layers(base.kinds, [(k, v) for k, v in pairs], 20)
            assert not base.equals(other)
            assert base.checksum() != other.checksum()
    assert not base.equals(base.crop(19))
    assert base.checksum() != base.crop(19).checksum()
    assert not state_of(4, (FULL, FULL)).equals(state_of(4, (FULL, SLIDING)))
    bf16 = KVState.from_layers(base.kinds, [(k.bfloat16(), v.bfloat16()) for k, v in base.layers()], 20)
    assert bf16.checksum() != base.checksum()


def test_an_append_leaves_length_and_checksum_of_its_parent() -> None:
    """Field case 40: nothing has a gradient, so a copy of a state's tensors is an ordinary copy."""
    state = state_of(20)
    before = state.checksum()
    with state.append() as tail:
        for layer in tail.cache.layers:
            layer.update(*tokens(200, 9))
        child = tail.seal()
    assert (state.checksum(), state.num_tokens) == (before, 20)
    assert child.num_tokens == 220
    assert not any(tensor.requires_grad for pair in child.layers() for tensor in pair)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_tensor_bytes_are_row_major_whatever_the_layout(dtype: torch.dtype) -> None:
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    turned = tensor.transpose(0, 2)
    assert bytes(tensor_bytes(turned)) == bytes(tensor_bytes(turned.clone(memory_format=torch.contiguous_format)))
    assert len(tensor_bytes(turned)) == tensor.nbytes
    assert bytes(tensor_bytes(tensor)) != bytes(tensor_bytes(turned)) or dtype is torch.bool


def test_a_state_keeps_its_buffer_alive_and_a_buffer_no_state() -> None:
    buffer = KVBuffer([LayerStore(*tokens(5))])
    state = KVState(buffer, (FULL,), 5)
    assert buffer.sealed == 5
    del state
    assert buffer.sealed == 0
