"""Specs from files alone against what transformers makes of the same files, and digests that need no torch."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache

from langgraph_latent.errors import ModelLoadError
from langgraph_latent.kv.layers import layer_kinds
from langgraph_latent.spec import digest
from langgraph_latent.spec.compat import Level, compare
from langgraph_latent.spec.config import config_digest, plain, rope_of, text_config
from langgraph_latent.spec.digest import bfloat16_bits, digests
from langgraph_latent.spec.folder import folder_spec
from langgraph_latent.spec.tokenizer import template_digest, tokenizer_digest
from langgraph_latent.testing.catalogue import catalogue

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GQA = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 64}
WIDE = {**GQA, "head_dim": 16}
GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": 300, "bos_token_id": 0}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    **GQA,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LINEAR = {f"linear_{name}": 2 for name in ("num_value_heads", "num_key_heads")}
LINEAR |= {f"linear_{name}": 8 for name in ("key_head_dim", "value_head_dim")}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GQA),
    "llama, linear rope": (
        "llama",
        {**GQA, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}},
    ),
    "mistral, sliding": ("mistral", {**GQA, "sliding_window": 8}),
    "mistral, full": ("mistral", {**GQA, "sliding_window": None}),
    "mixtral": ("mixtral", {**GQA, **EXPERTS}),
    "qwen2": ("qwen2", GQA),
    "qwen2, sliding": ("qwen2", {**GQA, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "qwen3": ("qwen3", WIDE),
    "gemma2": ("gemma2", {**WIDE, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {**WIDE, "sliding_window": 8, "num_hidden_layers": 7}),
    "phi": ("phi", GQA),
    "phi3": ("phi3", GQA),
    "gpt2": ("gpt2", GPT),
    "gptj": ("gptj", {**GPT, "rotary_dim": 4}),
    "gpt_neox": ("gpt_neox", {**SMALL, "intermediate_size": 64}),
    "opt": ("opt", {**SMALL, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 4, "n_head": 4, "vocab_size": 300}),
    "falcon, multi-query": ("falcon", SMALL),
    "falcon, multi-head": ("falcon", {**SMALL, "multi_query": False}),
    "falcon, new": ("falcon", {**SMALL, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode": ("gpt_bigcode", GPT),
    "cohere2": ("cohere2", {**GQA, "sliding_window": 8}),
    "olmo2": ("olmo2", GQA),
    "gpt_oss": ("gpt_oss", {**WIDE, **EXPERTS}),
    "deepseek_v3": ("deepseek_v3", MLA),
    "llama4": ("llama4_text", {**GQA, "head_dim": 8, "attention_chunk_size": 8, "intermediate_size_mlp": 64}),
    "qwen3_next": ("qwen3_next", {**WIDE, **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 300}),
}


TOYS = catalogue()
KINDS_OF_MODELING_CODE = ("deepseek_v4", "minimax_m3_vl_text")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    """`saved("llama")`: a folder without a tokenizer, and the model that was saved into it."""
    made: dict[str, tuple[Path, Any]] = {}

    def save(name: str) -> tuple[Path, Any]:
        if name not in made:
            kind, fields = MODELS[name]
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()
            folder = tmp_path_factory.mktemp("saved")
            model.save_pretrained(folder)
            made[name] = folder, model
        return made[name]

    return save


def edited(folder: Path, to: Path, **fields: Any) -> Path:
    """A copy of a folder with other config fields; None takes a field away."""
    shutil.copytree(folder, to)
    config = {**json.loads((to / "config.json").read_text()), **fields}
    (to / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return to


# -- geometry --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_geometry_is_what_a_real_run_leaves_in_the_cache(name: str, saved: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = saved(name)
    spec = folder_spec(folder)
    cache = DynamicCache(config=model.config)
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    with torch.no_grad():
        model(input_ids=torch.arange(3, 10)[None], use_cache=True, **{argument: cache})
    assert [(layer.kind, layer.window) for layer in spec.layers] == [tuple(kind) for kind in layer_kinds(model.config)]
    nbytes = 0
    for layer, kept in zip(spec.layers, cache.layers, strict=True):
        if layer.kind in ("full", "sliding", "chunked"):
            assert kept.keys.shape[0::2] == (1, kept.keys.shape[2])
            assert (kept.keys.shape[1], kept.keys.shape[3]) == (layer.kv_heads, layer.key_dim)
            assert (kept.values.shape[1], kept.values.shape[3]) == (layer.kv_heads, layer.value_dim)
            nbytes += kept.keys[0, :, 0].nbytes + kept.values[0, :, 0].nbytes
    assert spec.bytes_per_token == nbytes
    config = model.config.get_text_config()
    assert spec.architecture == type(model).__name__
    assert (spec.hidden_size, spec.vocab_size) == (config.hidden_size, config.vocab_size)
    assert spec.max_positions == getattr(config, "max_position_embeddings", 0)
    assert spec.dtype == "float32"


@pytest.mark.parametrize("name", MODELS)
def test_a_config_alone_gives_the_same_spec_but_for_the_weights(
    name: str, saved: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, _ = saved(name)
    alone, whole = folder_spec(folder / "config.json"), folder_spec(folder)
    assert (alone.weights, alone.sketch, alone.tokenizer, alone.template) == ("", "", "", "")
    assert dataclasses.replace(alone, name=whole.name, weights=whole.weights, sketch=whole.sketch) == whole
    assert compare(alone, whole).level is Level.SIBLING
    assert [difference.field for difference in compare(alone, whole).differences] == ["weights"]


@pytest.mark.parametrize("name", MODELS)
def test_rope_and_config_are_those_of_the_config_that_transformers_makes(
    name: str, saved: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = saved(name)
    spec = folder_spec(folder)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    assert spec.rope == (json.dumps(plain(rope), sort_keys=True) if rope else "")
    assert rope_of(config) == spec.rope
    assert config_digest(config) == spec.config


@pytest.mark.parametrize("name", TOYS)
def test_a_config_file_of_any_type_gives_what_its_loaded_model_has(name: str, tmp_path: Path) -> None:
    config = TOYS[name].config()
    config.save_pretrained(tmp_path)
    spec, text = folder_spec(tmp_path), text_config(config)
    assert (spec.config, spec.rope) == (config_digest(text), rope_of(text))
    if config.model_type in KINDS_OF_MODELING_CODE:  # transformers makes no cache layers before the model is imported
        return
    if config.model_type == "rwkv":  # it runs over no cache layers of transformers, which takes it for full attention
        assert {layer.kind for layer in spec.layers} == {"linear"}
        return
    assert [(layer.kind, layer.window) for layer in spec.layers] == [tuple(kind) for kind in layer_kinds(config)]


def test_shapes_are_believed_and_not_the_config(saved: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = saved("llama")
    truth = folder_spec(folder)
    lied = edited(folder, tmp_path / "lied", num_key_value_heads=4, head_dim=None)
    assert folder_spec(lied).layers == truth.layers
    assert folder_spec(lied / "config.json").layers != truth.layers


def test_packed_weights_have_no_shapes_to_believe(saved: Callable[[str], tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = saved("llama")
    packed = edited(folder, tmp_path / "packed", quantization_config={"quant_method": "bitsandbytes"}, dtype="bfloat16")
    tensors = load_file(packed / "model.safetensors")
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    spec, truth = folder_spec(packed), folder_spec(folder)
    assert (spec.quantization.split()[0], spec.dtype) == ("bitsandbytes", "bfloat16")
    assert (spec.layers, spec.config) == (truth.layers, truth.config)
    assert compare(spec, truth).level is Level.SIBLING


# -- spellings -------------------------------------------------------------------------------------------------------

LLAMA_1 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 64,
    "vocab_size": 300,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "use_cache": True,
}
LLAMA_3_ROPE = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
QWEN = {**LLAMA_1, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "rope_theta": 1000000}
GEMMA3_TEXT = {"model_type": "gemma3_text", "hidden_size": 256, "num_hidden_layers": 7, "sliding_window": 1024}
OLD: dict[str, dict[str, Any]] = {
    "no rope at all": LLAMA_1,
    "rope_theta": {**LLAMA_1, "rope_theta": 500000, "rope_scaling": None},
    "type": {**LLAMA_1, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama3": {**LLAMA_1, "rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA_3_ROPE}},
    "windows that are off": {**QWEN, "use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
    "windows that are on": {**QWEN, "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
    "mistral's window is absent": {**LLAMA_1, "model_type": "mistral", "rope_theta": 1e4},
    "mixtral's theta is absent": {**LLAMA_1, "model_type": "mixtral", "sliding_window": None},
    "rotary_pct": {
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "vocab_size": 300,
        "rotary_pct": 0.5,
        "rotary_emb_base": 10000,
    },
    "nested, with defaults left out": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": {**GEMMA3_TEXT, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 32, "num_hidden_layers": 1},
    },
}


@pytest.mark.parametrize("name", OLD)
def test_an_old_config_is_what_transformers_reads_from_it(name: str, tmp_path: Path) -> None:
    """Saved again by today's transformers it is spelled otherwise, and is the same."""
    (tmp_path / "config.json").write_text(json.dumps(OLD[name]))
    config = AutoConfig.from_pretrained(tmp_path)
    config.save_pretrained(tmp_path / "new")
    old, new = folder_spec(tmp_path / "config.json"), folder_spec(tmp_path / "new" / "config.json")
    assert old.layers == new.layers
    assert [(layer.kind, layer.window) for layer in old.layers] == [tuple(kind) for kind in layer_kinds(config)]
    text = config.get_text_config()
    rope = {name: value for name, value in text.rope_parameters.items() if name != "type"}
    assert old.rope == new.rope == json.dumps(plain(rope), sort_keys=True)
    assert (old.hidden_size, old.vocab_size) == (text.hidden_size, text.vocab_size)
    assert old.dtype == new.dtype
    if "max_position_embeddings" in OLD[name]:
        assert old.max_positions == new.max_positions


def test_a_list_of_layers_says_how_many_there_are(tmp_path: Path) -> None:
    """nemotron_h names no number of layers; older files of it spell the list by letters."""
    letters = {"hybrid_override_pattern": "ME*-"}
    listed = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]}
    sizes = {"model_type": "nemotron_h", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 100}
    specs = []
    for name, layers in (("letters", letters), ("listed", listed)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**sizes, **layers}))
        specs.append(folder_spec(tmp_path / f"{name}.json"))
    assert specs[0].identity == specs[1].identity
    config = AutoConfig.for_model(**sizes, **listed)
    assert [(layer.kind, layer.window) for layer in specs[0].layers] == [tuple(kind) for kind in layer_kinds(config)]


def test_two_spellings_of_one_model_are_no_difference(tmp_path: Path) -> None:
    for name in ("rope_theta", "type", "llama3"):
        (tmp_path / "config.json").write_text(json.dumps(OLD[name]))
        AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "new")
        result = compare(folder_spec(tmp_path / "config.json"), folder_spec(tmp_path / "new" / "config.json"))
        assert [difference.field for difference in result.differences] == ["weights"], name


@pytest.mark.parametrize(
    ("field", "value", "differing"),
    [
        ("rms_norm_eps", 1e-5, "config"),
        ("hidden_act", "gelu", "config"),
        ("num_attention_heads", 8, "config"),
        ("attention_bias", True, "config"),
        ("rope_theta", 5e5, "rope"),
        ("num_key_value_heads", 1, "layers"),
        ("num_hidden_layers", 3, "layers"),
        ("sliding_window", 16, "layers"),
        ("hidden_size", 64, "hidden_size"),
        ("vocab_size", 301, "vocab_size"),
        ("quantization_config", {"quant_method": "gptq"}, "quantization"),
    ],
)
def test_what_shapes_the_numbers_is_seen(field: str, value: Any, differing: str, tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps({**LLAMA_1, "head_dim": 8}))
    two.write_text(json.dumps({**LLAMA_1, "head_dim": 8, field: value}))
    result = compare(folder_spec(one), folder_spec(two))
    assert differing in [difference.field for difference in result.differences if difference.is_known]


def test_what_does_not_is_not(tmp_path: Path) -> None:
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(LLAMA_1))
    noise = {"transformers_version": "4.1", "_name_or_path": "x", "use_cache": False, "attention_dropout": 0.1}
    two.write_text(
        json.dumps(
            {**LLAMA_1, **noise, "bos_token_id": 5, "attention_bias": False, "head_dim": None, "pruned_heads": {}}
        )
    )
    assert [difference.field for difference in compare(folder_spec(one), folder_spec(two)).differences] == ["weights"]


@pytest.mark.parametrize("model_type", ["cohere2", "falcon", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "mixtral"])
def test_what_is_assumed_of_a_silent_config_is_transformers_default(model_type: str, tmp_path: Path) -> None:
    stock = AutoConfig.for_model(model_type)
    sizes = {
        stock.attribute_map.get(size, size): getattr(stock, size)
        for size in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    }
    (tmp_path / "silent.json").write_text(json.dumps({"model_type": model_type, **sizes}))
    stock.save_pretrained(tmp_path)
    silent, full = folder_spec(tmp_path / "silent.json"), folder_spec(tmp_path / "config.json")
    assert dataclasses.replace(silent, name=full.name, dtype=full.dtype, architecture=full.architecture) == full
    assert silent.config == config_digest(stock)


@pytest.mark.parametrize("field", ["hidden_act", "rms_norm_eps"])
def test_a_field_whose_default_is_known_may_be_left_out(field: str, base: Path, tmp_path: Path) -> None:
    silent = edited(base, tmp_path / "silent", **{field: None})
    assert folder_spec(silent).identity == folder_spec(base).identity
    config = AutoConfig.from_pretrained(silent)
    assert config_digest(text_config(config)) == folder_spec(silent).config


def test_a_field_whose_default_is_not_known_may_differ(base: Path, tmp_path: Path) -> None:
    one = folder_spec(edited(base, tmp_path / "one", unheard_of=3))
    two = folder_spec(edited(base, tmp_path / "two", unheard_of=4, other_switch=True))
    result = compare(one, folder_spec(base))
    assert result.level is Level.SIBLING
    assert result.reasons == ("config may differ (unheard_of 3 / unknown)",)
    assert "one config leaves it unsaid" in result.notes[0]
    result = compare(one, two)
    assert result.level is Level.TEXT
    assert result.reasons == ("config differs (other_switch unsaid, unheard_of 3 / other_switch true, unheard_of 4)",)


@pytest.mark.parametrize(("model_type", "silent_is"), [("llama", "false"), ("gpt2", "true")])
def test_embeddings_are_tied_where_transformers_ties_them_in_a_silent_config(
    model_type: str, silent_is: str, tmp_path: Path
) -> None:
    specs = {}
    for name, fields in (("absent", {}), ("true", {"tie_word_embeddings": True}), ("false", LLAMA_1)):
        old = {field: value for field, value in LLAMA_1.items() if field != "tie_word_embeddings"}
        (tmp_path / f"{name}.json").write_text(json.dumps({**old, **fields, "model_type": model_type}))
        specs[name] = folder_spec(tmp_path / f"{name}.json").config
    assert specs["absent"] == specs[silent_is]
    assert specs["true"] != specs["false"]


def test_layers_beyond_the_config_s_count_are_no_cache_layers(
    saved: Callable[[str], tuple[Path, Any]], tmp_path: Path
) -> None:
    """Checkpoints hold layers for multi-token prediction behind the others."""
    folder, _ = saved("llama")
    longer = edited(folder, tmp_path / "longer")
    tensors = load_file(longer / "model.safetensors")
    tensors["model.layers.4.self_attn.k_proj.weight"] = torch.zeros(8, 32)
    tensors["vision_tower.encoder.layers.0.self_attn.k_proj.weight"] = torch.zeros(24, 32)
    save_file(tensors, longer / "model.safetensors", metadata={"format": "pt"})
    assert folder_spec(longer).layers == folder_spec(folder).layers


# -- weights ---------------------------------------------------------------------------------------------------------


def test_the_weights_digest_is_over_every_tensor_as_torch_sees_it(tmp_path: Path) -> None:
    """A fixed form: digests are kept in handles and files."""
    dtypes = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
    dtypes += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "odd": torch.ones(3, dtype=torch.uint8)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = []
    for name, tensor in tensors.items():
        content = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        expected.append((name, hashlib.sha256(header + content).hexdigest()))
    assert digests(tmp_path).weights == hashlib.sha256(json.dumps(sorted(expected)).encode()).hexdigest()


def test_rounding_is_torch_s() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (100_000,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    special = [0.0, -0.0, math.inf, -math.inf, 3.4e38, 1e-45, 1.00390625, 1.01171875]
    numbers = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor(special)])
    expected = numbers.to(torch.bfloat16)
    rounded = torch.from_numpy(bfloat16_bits(numbers.numpy()).view(numpy.int16)).view(torch.bfloat16)
    assert torch.equal(rounded.isnan(), expected.isnan())
    assert torch.equal(rounded[~rounded.isnan()], expected[~expected.isnan()])


@pytest.fixture
def base(tiny_folder: Callable[..., Path]) -> Path:
    return tiny_folder("llama")


def test_the_same_folder_elsewhere_is_exact(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    one, two = folder_spec(base), folder_spec(tmp_path / "copy")
    assert one.name != two.name
    assert one.identity == two.identity
    assert compare(one, two).level is Level.EXACT
    assert all((one.weights, one.sketch, one.tokenizer, one.template))


def test_equal_configs_with_other_weights_are_never_exact(
    base: Path, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Be it one number in one tensor."""
    nudged = tmp_path / "nudged"
    shutil.copytree(base, nudged)
    tensors = load_file(nudged / "model.safetensors")
    tensors["model.layers.2.mlp.down_proj.weight"][0, 0] += 1e-3
    save_file(tensors, nudged / "model.safetensors", metadata={"format": "pt"})
    for other in (nudged, tiny_folder("llama", seed=1)):
        result = compare(folder_spec(base), folder_spec(other))
        assert result.level is Level.SIBLING
        assert [difference.field for difference in result.differences] == ["weights"]
        assert "certificate" in result.notes[0]


def test_a_bfloat16_copy_is_a_sibling_that_is_known_as_a_copy(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(tmp_path / "copy")
    one, two = folder_spec(base), folder_spec(tmp_path / "copy")
    assert (one.dtype, two.dtype) == ("float32", "bfloat16")
    assert one.sketch == two.sketch
    result = compare(one, two)
    assert result.level is Level.SIBLING
    assert {difference.field for difference in result.differences} == {"weights", "dtype", "bytes_per_token"}
    assert "rounded copy of the same weights" in result.notes[0]


def test_a_bfloat16_fine_tune_is_no_copy(base: Path, tiny_folder: Callable[..., Path], tmp_path: Path) -> None:
    tuned = tiny_folder("llama", seed=1)
    shutil.copytree(tuned, tmp_path / "tuned")
    AutoModelForCausalLM.from_pretrained(tuned, dtype=torch.bfloat16).save_pretrained(tmp_path / "tuned")
    assert folder_spec(base).sketch != folder_spec(tmp_path / "tuned").sketch


def test_a_sketch_is_the_same_in_other_shards_and_looks_at_no_more_than_a_sample(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert digests(tmp_path / "sharded") == digests(base)
    numbers = torch.arange(3 * digest.SKETCH_VALUES, dtype=torch.float32)
    sketches = set()
    for name, place in (("none", None), ("between", 1), ("at", 3)):
        tensor = numbers.clone()
        if place is not None:
            tensor[place] = -1
        (tmp_path / name).mkdir()
        save_file({"w": tensor}, tmp_path / name / "model.safetensors")
        sketches.add((place == 3, digests(tmp_path / name).sketch))
    assert len(sketches) == 2


def test_whoever_watches_hears_every_byte_once_and_nothing_when_it_is_known(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    heard: list[tuple[int, int]] = []
    folder_spec(tmp_path / "copy", lambda done, total: heard.append((done, total)))
    size = (tmp_path / "copy" / "model.safetensors").stat().st_size
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert {total for _, total in heard} == {size}
    assert 0.9 * size < heard[-1][0] < size  # all but the header
    heard.clear()
    folder_spec(tmp_path / "copy", lambda done, total: heard.append((done, total)))
    assert heard == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        b"\x05\0\0\0\0\0\0\0[1,2]",
        b"\x02\0\0\0\0\0\0\0{",
        b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}   1234',
        b'\x38\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}   1234',
        b'\x15\0\0\0\0\0\0\0{"a":{"dtype":"F32"}}',
    ],
)
def test_a_damaged_weights_file_is_refused(content: bytes, base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a safetensors file"):
        folder_spec(tmp_path / "copy")


def test_a_missing_shard_is_refused_and_named(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "copy" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"lacks 1 of 2 weight files, first 'model-00002.safetensors'"):
        folder_spec(tmp_path / "copy")


# -- tokenizer and template ------------------------------------------------------------------------------------------


def test_tokenizer_and_template_are_those_that_transformers_loads(base: Path) -> None:
    spec, tokenizer = folder_spec(base), AutoTokenizer.from_pretrained(base)
    assert spec.tokenizer == tokenizer_digest(tokenizer.backend_tokenizer.to_str())
    assert spec.template == template_digest(tokenizer.chat_template)


def test_the_form_of_a_tokenizer_file_does_not_matter_and_its_content_does(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    file = tmp_path / "copy" / "tokenizer.json"
    content = json.loads(file.read_text())
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    padded = {**content, "model": {**content["model"], "merges": merges}, "padding": {"strategy": "BatchLongest"}}
    file.write_text(json.dumps(padded, indent=4))
    assert folder_spec(tmp_path / "copy").tokenizer == folder_spec(base).tokenizer
    padded["model"]["merges"][0], padded["model"]["merges"][1] = merges[1], merges[0]
    file.write_text(json.dumps(padded))
    result = compare(folder_spec(tmp_path / "copy"), folder_spec(base))
    assert (result.level, result.differences[0].field) == (Level.TEXT, "tokenizer")


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizerFast", "PreTrainedTokenizerFast"])
def test_a_tokenizer_saved_again_is_the_one_that_is_loaded(name: str, base: Path, tmp_path: Path) -> None:
    """transformers gives it the normalizer and the other rules of its class, which a file need not name."""
    folder, again = tmp_path / "first", tmp_path / "again"
    shutil.copytree(base, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": name}))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.copytree(base, again)
    tokenizer.save_pretrained(again)
    loaded = tokenizer_digest(tokenizer.backend_tokenizer.to_str())
    assert folder_spec(folder).tokenizer == folder_spec(again).tokenizer == loaded


@pytest.mark.parametrize("fixture", ["smollm2", "tool_model"])
def test_a_real_tokenizer_saved_again_is_the_same(fixture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    for to in (first, again):  # without the weights
        to.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(request.getfixturevalue(fixture) / name, to)
    tokenizer = AutoTokenizer.from_pretrained(first)
    tokenizer.save_pretrained(again)
    loaded = tokenizer_digest(tokenizer.backend_tokenizer.to_str())
    assert folder_spec(first).tokenizer == folder_spec(again).tokenizer == loaded


def test_other_words_merges_and_added_tokens_are_other_tokenizers(base: Path) -> None:
    content = json.loads((base / "tokenizer.json").read_text())
    model, added = content["model"], content["added_tokens"]
    swapped = {word: {3: 4, 4: 3}.get(place, place) for word, place in model["vocab"].items()}
    others = [
        {**content, "model": {**model, "vocab": swapped}},
        {**content, "model": {**model, "merges": model["merges"][:-1]}},
        {**content, "added_tokens": added[:-1]},
        {**content, "added_tokens": [{**added[0], "content": "<|other|>"}, *added[1:]]},
    ]
    found = {tokenizer_digest(json.dumps(each)) for each in (content, *others)}
    assert len(found) == 1 + len(others)


def test_a_template_is_found_where_transformers_looks_for_it(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    file, config = (tmp_path / "copy" / name for name in ("chat_template.jinja", "tokenizer_config.json"))
    plain = json.loads(config.read_text())
    several = [{"name": "default", "template": "{{ 1 }}"}, {"name": "tool_use", "template": "{{ 2 }}"}]
    for in_config in ("{{ messages }}", several, None):
        config.write_text(json.dumps({**plain, "chat_template": in_config}))
        for in_file in ("{{ messages[0] }}\n", None):
            file.unlink(missing_ok=True)
            if in_file:
                file.write_text(in_file)
            loaded = AutoTokenizer.from_pretrained(tmp_path / "copy").chat_template
            assert folder_spec(tmp_path / "copy").template == template_digest(loaded)
    result = compare(folder_spec(tmp_path / "copy"), folder_spec(base))
    assert (result.level, [difference.field for difference in result.differences]) == (Level.SIBLING, ["template"])


def test_a_tokenizer_of_several_files_has_a_digest_and_none_has_none(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer.json").unlink()
    assert folder_spec(tmp_path / "copy").tokenizer == ""
    (tmp_path / "copy" / "tokenizer.model").write_bytes(b"pieces")
    one = folder_spec(tmp_path / "copy").tokenizer
    (tmp_path / "copy" / "tokenizer.model").write_bytes(b"other pieces")
    assert one
    assert folder_spec(tmp_path / "copy").tokenizer not in ("", one)


# -- where models are ------------------------------------------------------------------------------------------------


def test_a_hub_id_is_found_in_the_hub_s_cache(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "hub" / "models--owner--tiny"
    for revision in ("0000", "1111"):
        shutil.copytree(base, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("1111")
    (repository / "snapshots" / "0000" / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    spec = folder_spec("owner/tiny")
    assert spec.name == "owner/tiny"
    assert spec.identity == folder_spec(base).identity
    (repository / "refs" / "main").unlink()  # as after a download of a revision: whatever is there
    (repository / "snapshots" / "0000" / "config.json").unlink()
    assert folder_spec("owner/tiny") == spec
    with pytest.raises(ModelLoadError, match="hf download"):
        folder_spec("owner/other")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "/nowhere")
    with pytest.raises(ModelLoadError, match="hf download"):
        folder_spec("owner/tiny")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty", {}, "holds no config.json"),
        ("adapter", {"adapter_config.json": "{}"}, "pass its base model"),
        ("text", {"config.json": "not json"}, "can't be read as JSON"),
        ("list", {"config.json": "[]"}, "holds no JSON object"),
        ("other", {"config.json": '{"model_type": "resnet"}'}, "not a config of a language model"),
        ("bart", {"config.json": '{"model_type": "bart", "is_encoder_decoder": true}'}, r"encoder-decoder \(bart\)"),
        ("short", {"config.json": '{"model_type": "llama", "hidden_size": 32}'}, "lacks 'num_hidden_layers'"),
        ("flat", {"config.json": '{"model_type": "gpt2", "num_hidden_layers": 2}'}, "lacks 'hidden_size'.*n_embd"),
        ("unnamed", {"config.json": '{"hidden_size": 32}'}, "names no model type.*install a transformers"),
        ("new", {"config.json": '{"model_type": "llama9"}'}, "'llama9', which is unknown.*install a transformers"),
    ],
)
def test_what_is_no_model_is_refused_in_words(name: str, content: dict[str, str], words: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    for file, text in content.items():
        (tmp_path / name / file).write_text(text)
    with pytest.raises(ModelLoadError, match=words):
        folder_spec(tmp_path / name)


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./nowhere", "a/b/c", "no-such.json"])
def test_a_path_that_is_not_there_is_called_a_path(name: str) -> None:
    with pytest.raises(ModelLoadError, match=r"check the path|Check the spelling"):
        folder_spec(name)


def test_what_the_files_prove_impossible_is_refused(saved: Callable[[str], tuple[Path, Any]]) -> None:
    refused = {
        "llama": [],
        "bloom": [],
        "gpt2": ["move"],
        "mamba": ["crop", "move"],
        "qwen3_next": ["crop", "move"],
    }
    for name, capabilities in refused.items():
        found = folder_spec(saved(name)[0]).capabilities
        assert [capability for capability, _ in found.refusals] == capabilities, name
        assert not found.is_probed


def test_no_torch_is_needed_on_the_way(base: Path) -> None:
    code = (
        "import sys\nfrom langgraph_latent.spec.folder import folder_spec\n"
        "assert not {'torch', 'transformers', 'safetensors'} & set(sys.modules)\n"
        "sys.modules['torch'] = None\nprint(folder_spec(sys.argv[1]).identity)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(base)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == folder_spec(base).identity


@pytest.mark.parametrize(
    ("fields", "other"),
    [
        ({"model_type": "gpt2", "scale_attn_weights": False}, {"model_type": "gpt2"}),
        ({"model_type": "gpt_neox", "use_parallel_residual": False}, {"model_type": "gpt_neox"}),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True}, {"model_type": "qwen3_moe"}),
        (
            {"model_type": "llama", "quantization_config": {"load_in_4bit": True}},
            {"model_type": "llama", "quantization_config": {"load_in_8bit": True}},
        ),
    ],
)
def test_a_switch_against_its_default_is_another_model(
    fields: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    specs = []
    for name, config in (("a", fields), ("b", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps({**sizes, **config}))
        specs.append(folder_spec(tmp_path / f"{name}.json"))
    assert specs[0].identity != specs[1].identity


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_size": "abc"},
        {"rope_scaling": "linear"},
        {"quantization_config": "fp8"},
        {"layer_types": 5},
        {"num_hidden_layers": {}},
        {"vocab_size": float("inf")},
    ],
)
def test_a_config_that_is_none_is_refused_and_not_a_crash(fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    (tmp_path / "c.json").write_text(json.dumps({**sizes, **fields}))
    with pytest.raises(ModelLoadError):
        folder_spec(tmp_path / "c.json")
