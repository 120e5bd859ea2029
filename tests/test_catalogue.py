"""Every toy of the catalogue is built from its config alone and runs: finite, repeatable, causal, input-dependent."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from langgraph_latent.errors import ConfigError
from langgraph_latent.testing.catalogue import (
    LEFT_OUT,
    NUM_HEADS,
    OVERRIDES,
    SIZES,
    VARIANTS,
    VOCABULARY,
    Toy,
    catalogue,
    save_toy,
)

pytestmark = pytest.mark.slow

TOYS = catalogue()
KINDS = {
    "bailing_hybrid": {"linear_attention", "full_attention"},
    "cohere2": {"sliding_attention", "full_attention"},
    "deepseek_v4": {"heavily_compressed_attention", "compressed_sparse_attention"},
    "falcon_h1": {"hybrid"},
    "gemma2": {"sliding_attention", "full_attention"},
    "gemma3_text": {"sliding_attention", "full_attention"},
    "gemma3n_text": {"sliding_attention", "full_attention"},
    "gemma4_text": {"sliding_attention", "full_attention"},
    "gpt_oss": {"sliding_attention", "full_attention"},
    "bamba": {"linear_attention", "full_attention"},
    "granitemoehybrid": {"linear_attention", "full_attention"},
    "jamba": {"linear_attention", "full_attention"},
    "lfm2": {"conv", "full_attention"},
    "llama4_text": {"chunked_attention", "full_attention"},
    "minimax_m3_vl_text": {"minimax_m3_sparse", "full_attention"},
    "nemotron_h": {"linear_attention", "full_attention", "moe", "mlp"},
    "qwen2": {"sliding_attention", "full_attention"},
    "qwen3_next": {"linear_attention", "full_attention"},
    "recurrent_gemma": {"linear_attention", "sliding_attention"},
    "zamba": {"linear_attention", "hybrid"},
    "zaya": {"hybrid", "hybrid_sliding"},
}


@cache
def toy_model(name: str) -> PreTrainedModel:
    """A toy's model, built once for all tests of this file."""
    return TOYS[name].model()


def logits_of(model: PreTrainedModel, ids: torch.Tensor, *, use_cache: bool = False) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids, use_cache=use_cache).logits


@pytest.mark.parametrize("name", TOYS)
def test_a_toy_runs_with_and_without_a_cache(name: str) -> None:
    model = toy_model(name)
    assert model.dtype == torch.float32
    assert not model.training
    assert sum(weight.numel() for weight in model.parameters()) < 4_000_000
    ids = torch.randint(3, VOCABULARY, (1, 50), generator=torch.Generator().manual_seed(0))
    logits = logits_of(model, ids)
    assert logits.shape == (1, 50, VOCABULARY)
    assert logits.isfinite().all()
    assert torch.equal(logits_of(model, ids), logits)
    assert (logits_of(model, ids, use_cache=True) - logits).abs().max() <= 1e-4
    other = torch.cat([ids[:, :25], (ids[:, 25:] + 1) % VOCABULARY], dim=1)
    moved = (logits_of(model, other) - logits).abs().amax(dim=(0, 2))
    assert moved[:25].max() <= 1e-4, "an early token saw a later one"
    assert moved[25:].min() > 1e-2


@pytest.mark.parametrize("name", TOYS)
def test_every_token_of_the_vocabulary_is_plain_text_to_a_toy(name: str) -> None:
    assert logits_of(toy_model(name), torch.arange(VOCABULARY).view(4, -1)).isfinite().all()


@pytest.mark.parametrize("name", ["llama", "gemma4", "qwen3_next", "deepseek_v4", "rwkv", "phi3-longrope"])
def test_equal_seeds_give_equal_weights_and_leave_the_random_state_alone(name: str) -> None:
    state = torch.get_rng_state()
    first, again, other = (TOYS[name].model(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", TOYS)
def test_a_saved_toy_is_loaded_as_the_same_model(name: str, tmp_path: Path) -> None:
    loaded = AutoModelForCausalLM.from_pretrained(save_toy(tmp_path / name, name))
    ids = torch.arange(40)[None]
    assert torch.equal(logits_of(loaded, ids), logits_of(toy_model(name), ids))


def test_a_saved_toy_has_the_tiny_tokenizer(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_toy(tmp_path, "llama"))
    assert len(tokenizer) <= VOCABULARY
    assert tokenizer.decode(tokenizer("any text: ünïcödé")["input_ids"]) == "any text: ünïcödé"


def test_every_causal_type_of_transformers_is_in_the_catalogue_or_left_out_for_a_reason() -> None:
    types = {toy.model_type for toy in TOYS.values()}
    assert types | set(LEFT_OUT) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert not types & set(LEFT_OUT)
    assert set(OVERRIDES) <= types
    assert set(VARIANTS) <= set(TOYS)
    assert all(LEFT_OUT.values())


@pytest.mark.parametrize("name", KINDS)
def test_a_family_that_mixes_layers_is_mixed_in_its_toy(name: str) -> None:
    assert set(TOYS[name].config().layer_types) == KINDS[name]


def test_a_toy_has_a_config_of_its_own_for_each_call() -> None:
    toy = Toy("mine", "llama", {"num_hidden_layers": 2})
    first, second = toy.config(), toy.config()
    assert first is not second
    assert (first.num_hidden_layers, first.num_attention_heads, first.vocab_size) == (2, NUM_HEADS, SIZES["vocab_size"])


def test_a_name_that_is_no_toy_is_refused_with_the_reason_or_the_names(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="encoder-decoder"):
        save_toy(tmp_path, "bart")
    with pytest.raises(ConfigError, match=r"lama.*llama-yarn"):
        save_toy(tmp_path, "lama")
