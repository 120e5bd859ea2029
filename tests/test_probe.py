"""What the probe finds of tiny models of many kinds, what it refuses of broken ones, and what it remembers.

Broken models are a tiny llama with one thing patched, so that it is known which promise must be lost.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from langgraph_latent import ChatLatent
from langgraph_latent.engine import findings as findings_module
from langgraph_latent.engine import model as model_module
from langgraph_latent.engine import probe
from langgraph_latent.engine.findings import FINDINGS_FILE, Findings, unprobed
from langgraph_latent.engine.loader import ModelKey, acquire, release
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import UnsupportedLayerError
from langgraph_latent.kv.rope import RotationSpec
from langgraph_latent.testing import tiny_model, tiny_tokenizer
from langgraph_latent.testing.catalogue import catalogue, save_toy

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "vocab_size": 320,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
WINDOW = 16
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 16}
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW},
    "gemma3_text": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_oss": {"sliding_window": WINDOW, **EXPERTS},
    "moshi": {"sliding_window": WINDOW},
    "llama4_text": {"attention_chunk_size": WINDOW, "num_local_experts": 2, "intermediate_size_mlp": 64},
    "deepseek_v3": {
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
    },
    "qwen3_next": {
        **EXPERTS,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "shared_expert_intermediate_size": 32,
    },
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 16, "expand": 2, "n_groups": 2},
    "jamba": {"num_experts": 2, "mamba_d_state": 8, "attn_layer_period": 2, "attn_layer_offset": 1},
    "falcon_h1": {"mamba_d_ssm": 32, "mamba_n_heads": 4} | {k: v for k, v in MAMBA.items() if k != "mamba_n_heads"},
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "rotary_dim": 4, "n_positions": 512},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "bloom": {"n_layer": 3, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 3, "max_seq_len": 512},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "phi3": {
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_theta": 10_000.0,
            "rope_type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
            "original_max_position_embeddings": 64,
        },
    },
    "rwkv": {"attention_hidden_size": 32},
    "xlstm": {"num_heads": 4},
    "recurrent_gemma": {"lru_width": 32, "attention_window_size": WINDOW},
}


def fields_of(model_type: str) -> dict[str, Any]:
    stock = CONFIG_MAPPING[model_type]()
    known = vars(stock).keys() | stock.attribute_map.keys()
    return {name: value for name, value in SMALL.items() if name in known} | EXTRA.get(model_type, {})


def toy(model_type: str = "llama", seed: int = 0, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[model_type](**{**fields_of(model_type), **fields})
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return tiny_tokenizer()


Load = Callable[..., ResidentModel]


@pytest.fixture
def load(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """`load(model, weights="w")`: the model as a resident one, with a memory of this test's own."""
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path))
    return lambda model, weights="w", **options: ResidentModel(model, tokenizer, "toy", weights, **options)


# -- what is found -----------------------------------------------------------------------------------------------------

NOT_ROWS, NOT_SDPA = "not all of its layers are full or sliding-window", "its attention is not transformers' sdpa"
ABSOLUTE = "learned or absolute positions"
FOUND: dict[str, tuple[str, dict[str, str]]] = {
    "llama": ("rope, half-split, 8 of 8 channels", {}),
    "mistral": ("rope, half-split, 8 of 8 channels", {}),
    "gemma2": ("rope, half-split, 8 of 8 channels", {"batch": NOT_SDPA}),
    "gemma3_text": ("2 x rope, half-split, 8 of 8 channels; 2 x rope, half-split, 8 of 8 channels", {}),
    "cohere2": ("2 x rope, interleaved, 8 of 8 channels; 2 x none", {}),
    "smollm3": ("3 x rope, half-split, 8 of 8 channels; 1 x none", {}),
    "phi3": ("rope, half-split, 8 of 8 channels (longrope)", {}),
    "phi": ("rope, half-split, 4 of 8 channels", {}),
    "glm": ("rope, interleaved, 4 of 8 channels", {}),
    "gptj": ("rope, interleaved, 4 of 8 channels", {}),
    "gpt_oss": ("rope, half-split, 8 of 8 channels (yarn)", {"batch": NOT_SDPA}),
    "gpt2": ("learned or absolute", {"move": ABSOLUTE}),
    "opt": ("learned or absolute", {"move": ABSOLUTE}),
    "bloom": ("ALiBi", {"batch": NOT_SDPA}),
    "mpt": ("ALiBi", {"batch": NOT_SDPA}),
    "deepseek_v3": ("rope, half-split, 8 of 8 channels", {"batch": "changes its keys after it has cached them"}),
    "llama4_text": ("3 x rope, interleaved, 8 of 8 channels; 1 x none", {"batch": NOT_ROWS}),
    "qwen3_next": (
        "rope, half-split, 2 of 8 channels",
        {"crop": r"3 linear\): no part .* taken back", "move": r"3 linear\): no part .* moved", "batch": NOT_ROWS},
    ),
    "mamba": ("none: no attention layers", {"crop": "4 linear", "move": "4 linear", "batch": NOT_ROWS}),
    "mamba2": ("none: no attention layers", {"crop": "4 linear", "move": "4 linear", "batch": NOT_ROWS}),
    "jamba": ("none", {"crop": "2 linear", "move": "2 linear", "batch": NOT_ROWS}),
    "falcon_h1": (
        "rope, half-split, 8 of 8 channels",
        {"crop": "4 hybrid", "move": "4 hybrid", "batch": NOT_ROWS},
    ),
    "bamba": (
        "rope, half-split, 4 of 8 channels",
        {"crop": "2 linear", "move": "2 linear", "batch": NOT_ROWS},
    ),
}
STEPWISE = {"mamba", "jamba"}
"""Their forward over a cache takes the first token alone."""
PLACED = {"bamba"}
"""Their forward places tokens after a cache wrongly unless it is given their positions."""


@pytest.mark.parametrize("model_type", FOUND)
def test_what_each_model_can_do_is_found(model_type: str, load: Load) -> None:
    model = load(toy(model_type))
    positions, refusals = FOUND[model_type]
    capabilities = model.spec.capabilities
    assert capabilities.is_probed
    assert capabilities.positions == positions
    assert dict(capabilities.refusals).keys() == refusals.keys()
    for capability, reason in refusals.items():
        with pytest.raises(AssertionError, match=reason):
            raise AssertionError(capabilities.refusal(capability))
    assert model.findings.is_stepwise == (model_type in STEPWISE)
    assert model.findings.gives_positions == (model_type in PLACED)
    assert len(model.rotations) == len(model.kinds)


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "gptj", "gpt2", "deepseek_v3"])
def test_positions_are_found_in_narrow_dtypes_too(model_type: str, load: Load) -> None:
    """However many layers there are: what rounding does to the first ones does not hide the keys of the last ones."""
    deep = {"num_hidden_layers": 12} if model_type in ("llama", "deepseek_v3") else {}
    model = load(toy(model_type, dtype=torch.bfloat16, **deep))
    assert model.spec.dtype == "bfloat16"
    assert model.spec.capabilities.positions == FOUND[model_type][0]


REFUSED = {
    "moshi": "gives other logits when its tokens are fed in parts",  # wrong past its window, in transformers itself
    "recurrent_gemma": "gives other logits when its tokens are fed in parts",
    "rwkv": "[Uu]se a text edge",
    "xlstm": "[Uu]se a text edge",
}


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_no_cache_of_transformers_holds_is_refused_with_the_reason(model_type: str, load: Load) -> None:
    model = toy(model_type)
    with pytest.raises(UnsupportedLayerError, match=REFUSED[model_type]) as caught:
        load(model)
    assert "'toy'" in str(caught.value)
    assert type(model).__name__ in str(caught.value)


# -- broken models -----------------------------------------------------------------------------------------------------


class Forward:
    """Patches a model's forward; its signature is kept."""

    def __init__(self, model: PreTrainedModel, change: Callable[..., Any]) -> None:
        forward = model.forward
        self.calls = 0

        def patched(self_: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return change(forward, *args, **kwargs)

        patched.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
        model.forward = types.MethodType(patched, model)


def cache_name(kwargs: dict[str, Any]) -> str:
    return "cache" if "cache" in kwargs else "past_key_values"


def begins_again(kwargs: dict[str, Any]) -> bool:
    cache = kwargs.get(cache_name(kwargs))
    return cache is None or not cache.get_seq_length()


def attention_patched(model: PreTrainedModel, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes what every attention layer returns, (batch, seq, hidden)."""
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda _, args, output: (change(output[0]), *output[1:]))


def test_a_model_that_sees_the_future_is_refused(load: Load) -> None:
    model = toy()
    attention_patched(model, lambda output: output + output.mean(1, keepdim=True))
    with pytest.raises(UnsupportedLayerError, match="it is not causal"):
        load(model)


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize("is_text", [False, True])
def test_a_model_that_keeps_state_in_itself_is_refused(is_reset: bool, is_text: bool, load: Load) -> None:
    """Its positions are a running sum, of tokens or of their ids, that may begin again with each sequence.

    Alone, every sequence is right; two in turn read each other's sum.
    """
    kept = torch.tensor(0)

    def keeping(forward: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal kept
        ids = kwargs["input_ids"]
        if is_reset and begins_again(kwargs):
            kept = torch.tensor(0)
        sums = kept + (ids if is_text else torch.ones_like(ids)).cumsum(-1)
        kept = sums[0, -1]
        return forward(*args, **{**kwargs, "position_ids": sums})

    model = toy()
    Forward(model, keeping)
    with pytest.raises(UnsupportedLayerError, match="keeps state elsewhere"):
        load(model)


def test_a_model_that_does_not_use_its_cache_is_refused(load: Load) -> None:
    def forget(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(*args, **{**kwargs, cache_name(kwargs): None, "attention_mask": None})

    model = toy()
    Forward(model, forget)
    with pytest.raises(UnsupportedLayerError, match="does not use the cache that it is given"):
        load(model)


def test_a_model_that_is_wrong_past_its_window_is_refused(load: Load) -> None:
    """Its cache drops what its attention still looks at: only a run longer than the window can tell."""
    assert load(toy("mistral"), "right").kinds[0].window == WINDOW
    model = toy("mistral")
    model.model.config = model.config.__class__(**{**model.config.to_dict(), "sliding_window": None})
    with pytest.raises(UnsupportedLayerError, match="when its tokens are fed in parts"):
        load(model, "wrong")


@pytest.mark.parametrize("window", [300, 3000])
def test_a_window_too_wide_to_be_filled_is_made_narrow_for_the_probe(window: int, load: Load) -> None:
    with pytest.raises(UnsupportedLayerError, match="past its sliding window"):
        load(toy("moshi", sliding_window=window))
    fine = toy("mistral", sliding_window=window)
    model = load(fine)
    assert {kind.window for kind in model.kinds} == {window}
    assert fine.config.sliding_window == window
    assert not any(getattr(module, "sliding_window", window) != window for module in fine.modules())
    assert not model.spec.capabilities.refusals


def test_a_wide_window_of_an_opaque_layer_is_made_narrow_too(load: Load) -> None:
    toy = catalogue()["zaya"]
    fine = replace(toy, overrides={**toy.overrides, "sliding_window": 3000}).model()
    model = load(fine)
    assert {kind.window for kind in model.kinds} == {0, 3000}
    with probe.narrowed(model, {3000}):
        widths = {getattr(layer, "sliding_window", None) for layer in model.empty_state().opaque_layers}
    assert widths == {None, probe.NARROW}
    assert {getattr(layer, "sliding_window", None) for layer in model.empty_state().opaque_layers} == {None, 3000}


def test_a_model_that_ignores_position_ids_loses_batch(load: Load) -> None:
    """It places tokens after those of its cache, whatever it is given: a packed batch is at wrong positions."""
    model = toy()
    Forward(model, lambda forward, *args, **kwargs: forward(*args, **{**kwargs, "position_ids": None}))
    refusals = dict(load(model).spec.capabilities.refusals)
    assert "when several requests share a call" in refusals["batch"]
    assert "crop" not in refusals


class HiddenFrequencies(torch.nn.Module):
    """A rotary module whose frequencies are in no buffer."""

    def __init__(self, rotary: Any, power: float) -> None:
        super().__init__()
        self._hidden = [rotary]
        self._power = power

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        angles = position_ids[..., None].float() * self._hidden[0].inv_freq ** self._power
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()


@pytest.mark.parametrize("is_decoy", [False, True])
def test_keys_turned_by_frequencies_that_are_in_no_buffer_are_not_moved(is_decoy: bool, load: Load) -> None:
    """With other frequencies in a buffer, too: these do not explain the keys."""
    model = toy()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = HiddenFrequencies(rotary, 0.9)
    if is_decoy:
        model.model.register_buffer("inv_freq", rotary.inv_freq)
    assert dict(load(model).spec.capabilities.refusals).keys() == {"move"}
    assert ABSOLUTE in load(model).spec.capabilities.refusal("move")


def test_a_forward_that_ignores_embeddings_or_takes_none_loses_think(load: Load) -> None:
    model = toy()

    def ignoring(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("inputs_embeds", None) is not None:
            kwargs["input_ids"] = torch.full((1, 1), 7)
        return forward(*args, **kwargs)

    Forward(model, ignoring)
    refusals = dict(load(model, "ignores").spec.capabilities.refusals)
    assert refusals.keys() == {"think"}
    assert "its logits differ from its own input embeddings" in refusals["think"]

    def taking_none(forward: Any, *args: Any, **kwargs: Any) -> Any:
        if "inputs_embeds" in kwargs:
            raise TypeError("forward() got an unexpected keyword argument 'inputs_embeds'")
        return forward(*args, **kwargs)

    model = toy()
    Forward(model, taking_none)
    refusals = dict(load(model, "takes none").spec.capabilities.refusals)
    assert refusals.keys() == {"think"}
    assert "raises TypeError" in refusals["think"]


def test_a_model_that_counts_embeddings_from_zero_loses_think(load: Load) -> None:
    """As RoBERTa does: right for a whole prompt of embeddings, wrong over a cache."""

    def from_zero(forward: Any, *args: Any, **kwargs: Any) -> Any:
        embeds = kwargs.get("inputs_embeds")
        if embeds is not None:
            kwargs["position_ids"] = torch.arange(embeds.shape[1])[None]
        return forward(*args, **kwargs)

    model = toy()
    Forward(model, from_zero)
    assert dict(load(model).spec.capabilities.refusals).keys() == {"think"}


def test_a_model_that_mixes_neighbours_in_a_call_loses_batch(load: Load) -> None:
    """Right alone, wrong in a packed batch: it takes its tokens' places from the call, and there they are another's."""

    def wrong_in_a_batch(forward: Any, *args: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            kwargs["position_ids"] = kwargs["position_ids"].flip(-1)
        return forward(*args, **kwargs)

    model = toy()
    Forward(model, wrong_in_a_batch)
    refusals = dict(load(model, "wrong").spec.capabilities.refusals)
    assert refusals.keys() == {"batch"}
    assert "when several requests share a call" in refusals["batch"]


def test_logits_that_are_no_numbers_are_refused(load: Load) -> None:
    model = toy()
    with torch.no_grad():
        model.lm_head.weight[5, 3] = float("nan")
    with pytest.raises(UnsupportedLayerError):
        load(model)


# -- what is remembered ------------------------------------------------------------------------------------------------

NUM_CALLS = 16
"""Forward calls of a probe of a plain model: what its time is made of."""
NUM_CALLS_REMEMBERED = 1
"""One short run shows the shapes of the cache."""


def calls_of(load: Load, model: PreTrainedModel, weights: str = "w", **options: Any) -> int:
    """How many forward calls it takes to load a model."""
    counted = Forward(model, lambda forward, *args, **kwargs: forward(*args, **kwargs))
    load(model, weights, **options)
    return counted.calls


def test_a_probe_takes_few_forward_calls_and_is_remembered(load: Load) -> None:
    assert calls_of(load, toy()) == NUM_CALLS
    assert calls_of(load, toy()) == NUM_CALLS_REMEMBERED


def test_what_was_remembered_is_what_was_found(load: Load) -> None:
    for model_type in ("llama", "gemma3_text", "jamba", "gpt2"):
        found, remembered = (load(toy(model_type), model_type) for _ in range(2))
        assert remembered.findings == found.findings
        assert remembered.spec == found.spec
        assert remembered.spec.capabilities == found.spec.capabilities
        assert remembered.takes_mask == found.takes_mask
        pairs = zip(remembered.rotations, found.rotations, strict=True)
        for mine, theirs in ((a, b) for one, other in pairs for a, b in zip(one, other, strict=True)):
            assert (mine is None) == (theirs is None)
            assert mine is None or torch.equal(mine.inv_freq, theirs.inv_freq)


def test_findings_are_believed_for_the_same_model_only(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for other weights, another config, dtype, attention, or claims of another version."""
    load(toy())
    assert calls_of(load, toy(), "other weights") == NUM_CALLS
    assert calls_of(load, toy(rms_norm_eps=1e-3)) == NUM_CALLS
    scaled = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
    assert calls_of(load, toy(rope_parameters=scaled)) == NUM_CALLS
    assert calls_of(load, toy(max_position_embeddings=128)) == NUM_CALLS
    assert calls_of(load, toy(dtype=torch.bfloat16)) == NUM_CALLS
    assert calls_of(load, toy(dtype=torch.float16)) == NUM_CALLS
    eager = toy()
    eager.set_attn_implementation("eager")
    assert calls_of(load, eager) > NUM_CALLS_REMEMBERED
    assert calls_of(load, toy()) == NUM_CALLS_REMEMBERED
    monkeypatch.setattr(model_module, "VERSION", findings_module.VERSION + 1)
    assert calls_of(load, toy()) == NUM_CALLS


CHILD = """
import sys
from transformers import LlamaForCausalLM
from langgraph_latent.engine.loader import ModelKey, acquire
calls = 0
forward = LlamaForCausalLM.forward
def counted(*args, **kwargs):
    global calls
    calls += 1
    return forward(*args, **kwargs)
counted.__signature__ = __import__("inspect").signature(forward)
LlamaForCausalLM.forward = counted
model = acquire(ModelKey(sys.argv[1], device="cpu"))
print(calls, len(model.spec.capabilities.refusals), model.spec.capabilities.positions, sep="|")
"""


@pytest.mark.slow
def test_another_process_runs_no_probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "cache"))
    folder = tiny_model(tmp_path / "llama")

    def child() -> list[str]:
        result = subprocess.run(
            [sys.executable, "-c", CHILD, str(folder)], capture_output=True, text=True, check=True, timeout=120
        )
        return result.stdout.strip().split("|")

    findings = ["0", "rope, half-split, 8 of 8 channels"]
    assert child() == [str(NUM_CALLS), *findings]
    assert child() == [str(NUM_CALLS_REMEMBERED), *findings]


def changed(entry: dict[str, Any], **fields: Any) -> str:
    return json.dumps({key: {**value, **fields} for key, value in entry.items()})


CORRUPT: dict[str, Callable[[dict[str, Any]], str]] = {
    "empty": lambda entry: "",
    "not JSON": lambda entry: "{half of a",
    "not an object": lambda entry: "[1, 2]",
    "no findings": lambda entry: json.dumps(dict.fromkeys(entry)),
    "a list": lambda entry: json.dumps({key: [1] for key in entry}),
    "text": lambda entry: json.dumps(dict.fromkeys(entry, "findings")),
    "a field less": lambda entry: json.dumps({key: {"takes_mask": True} for key in entry}),
    "refusals without reasons": lambda entry: changed(entry, refusals=["batch"]),
    "rotations of another shape": lambda entry: changed(entry, rotations=[[["inv_freq"], None]]),
    "a number for rotations": lambda entry: changed(entry, rotations=3),
}


@pytest.mark.parametrize("how", CORRUPT)
def test_a_corrupt_memory_is_ignored_and_mended(how: str, load: Load, tmp_path: Path) -> None:
    load(toy())
    file = tmp_path / FINDINGS_FILE
    (tmp_path / "stored").write_text(file.read_text())
    file.write_text(CORRUPT[how](json.loads(file.read_text())))
    assert calls_of(load, toy()) == NUM_CALLS
    assert json.loads(file.read_text()).items() >= json.loads((tmp_path / "stored").read_text()).items()
    assert calls_of(load, toy()) == NUM_CALLS_REMEMBERED


def test_a_memory_that_can_not_be_written_does_no_harm(load: Load, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "file"))
    for _ in range(2):
        assert calls_of(load, toy()) == NUM_CALLS


def test_findings_survive_json() -> None:
    rotations = ((RotationSpec("inv_freq", "interleaved", 4, -1), None), (None, None))
    changed = Findings(
        takes_mask=False, is_stepwise=True, refusals=(("move", "why"),), positions="ALiBi", rotations=rotations
    )
    for findings in (Findings(), changed):
        assert Findings.from_dict(json.loads(json.dumps(findings.to_dict()))) == findings


# -- without a probe ---------------------------------------------------------------------------------------------------


@pytest.fixture
def unprobed_llama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ResidentModel]:
    monkeypatch.setenv("LANGGRAPH_LATENT_CACHE", str(tmp_path / "cache"))
    key = ModelKey(str(tiny_model(tmp_path / "llama")), device="cpu")
    yield acquire(key, probe=False)
    release(key)


def test_a_skipped_probe_promises_what_needs_no_proof(unprobed_llama: ResidentModel) -> None:
    capabilities = unprobed_llama.spec.capabilities
    assert not capabilities.is_probed
    assert capabilities.positions == "not probed"
    assert dict(capabilities.refusals) == dict.fromkeys(("move", "think", "batch"), "the probe was skipped")
    assert capabilities.can("crop")
    assert capabilities.can("append")


def test_a_skipped_probe_runs_little_and_is_not_remembered(load: Load, tmp_path: Path) -> None:
    assert calls_of(load, toy(), probe=False) == NUM_CALLS_REMEMBERED
    assert not (tmp_path / FINDINGS_FILE).exists()
    assert calls_of(load, toy()) == NUM_CALLS
    assert load(toy(), probe=False).spec.capabilities.is_probed  # it was found out before


def test_a_skipped_probe_still_knows_opaque_layers(load: Load) -> None:
    model = load(toy("mamba2"), probe=False)
    assert "4 linear" in model.spec.capabilities.refusal("crop")
    assert model.findings == unprobed(model.kinds)


@pytest.mark.parametrize(("name", "words"), [("rwkv", "does not use the cache"), ("xlstm", "does not run over")])
def test_a_skipped_probe_refuses_what_has_no_cache_all_the_same(name: str, words: str, tmp_path: Path) -> None:
    chat = ChatLatent(model=str(save_toy(tmp_path, name)), probe=False)
    for ask in (lambda: chat.spec, lambda: chat.invoke("hello")):
        with pytest.raises(UnsupportedLayerError, match=f"{words}.*Use a text edge"):
            ask()
