"""Cached keys moved to other positions are the keys that the model itself computes there, for every kind of rotation.

Truth is stock transformers: the same tokens at two positions. Attention sees only distances, so in every layer the keys
of one differ from those of the other by the rotation alone.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, DynamicCache, GPT2Config, PreTrainedModel

from langgraph_latent.kv.rope import (
    LAYOUTS,
    Layout,
    Rotation,
    RotationSpec,
    find_rotation,
    frequencies,
    rotation_of,
)

TOLERANCE = 1e-4
NUM_TOKENS, START, PROBED = 9, 128, 5
"""Tokens of a block, the position that it is computed at, and the distance at which its rotation is looked for."""
DELTAS = (1, 7, 100, -1, -100, -START)
ORIGINAL = 512
"""Positions of the models whose frequencies change with the length: all tests stay below it."""
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "max_position_embeddings": ORIGINAL,
    "initializer_range": 0.3,
    "vocab_size": 64,
    "bos_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
BASE = {"rope_theta": 10_000.0}
WINDOWED = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}


@dataclass(frozen=True)
class Case:
    """A model type and how its layers carry positions.

    Attributes:
        part: what is rotated, "keys" or "values".
        plain: layers without positions.
    """

    name: str
    model_type: str
    layout: Layout = "half-split"
    width: int = 16
    channels: int = 16
    config: dict[str, Any] = field(default_factory=dict)
    part: str = "keys"
    plain: tuple[int, ...] = ()
    num_frequencies: int = 1


def scaled(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {**BASE, "rope_type": rope_type, **parameters}}


CASES = [
    Case("default", "llama"),
    Case("linear", "llama", config=scaled("linear", factor=4.0)),
    Case(
        "llama3",
        "llama",
        config=scaled(
            "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
        ),
    ),
    Case("yarn", "llama", config=scaled("yarn", factor=8.0, original_max_position_embeddings=64)),
    Case("dynamic", "llama", config=scaled("dynamic", factor=4.0)),
    Case(
        "longrope",
        "phi3",
        config={
            **scaled(
                "longrope",
                short_factor=[1 + step / 8 for step in range(8)],
                long_factor=[1.0 + step for step in range(8)],
                original_max_position_embeddings=ORIGINAL,
            ),
            "original_max_position_embeddings": ORIGINAL,
            "max_position_embeddings": 4 * ORIGINAL,
        },
    ),
    Case("partial gpt_neox", "gpt_neox", width=4, config={"rotary_pct": 0.25}),
    Case("partial phi", "phi", width=8, config={"partial_rotary_factor": 0.5}),
    Case("partial stablelm", "stablelm", width=4, config={"partial_rotary_factor": 0.25}),
    Case(
        "table gptj",
        "gptj",
        "interleaved",
        width=8,
        config={"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": ORIGINAL, "rotary_dim": 8},
    ),
    Case("interleaved glm", "glm", "interleaved", width=8),
    Case("interleaved cohere", "cohere", "interleaved"),
    Case(
        "two frequencies gemma3",
        "gemma3_text",
        config={
            **WINDOWED,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        num_frequencies=2,
    ),
    Case("no position smollm3", "smollm3", plain=(3,)),
    Case("no position cohere2", "cohere2", "interleaved", config=WINDOWED, plain=(1, 3)),
    Case(
        "multimodal qwen2_vl",
        "qwen2_vl_text",
        config={"rope_parameters": {**BASE, "rope_type": "default", "mrope_section": [4, 2, 2]}},
    ),
    Case(
        "latent deepseek_v3",
        "deepseek_v3",
        width=8,
        channels=8,
        part="values",
        config={
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
    ),
    Case("norms on keys qwen3", "qwen3"),
]
by_name = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
Parts = dict[str, torch.Tensor]


@cache
def model_of(name: str) -> PreTrainedModel:
    case = next(case for case in CASES if case.name == name)
    make = CONFIG_MAPPING[case.model_type]
    known = vars(make()) | make.attribute_map
    config = make(**{key: value for key, value in SMALL.items() if key in known} | case.config)
    torch.manual_seed(0)
    kind: Any = AutoModel if case.model_type == "qwen2_vl_text" else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config).eval()
    for parameter in model.parameters():  # norms of ones and biases of zeros would hide what is done to them
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@cache
def layers_at(name: str, start: int) -> list[Parts]:
    """What stock transformers caches of the same tokens at positions `start` and on, layer by layer."""
    model = model_of(name)
    kept = DynamicCache(config=model.config)
    name_of_cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids, positions = torch.arange(3, 3 + NUM_TOKENS)[None], torch.arange(start, start + NUM_TOKENS)[None]
    with torch.no_grad():
        model(input_ids=ids, position_ids=positions, use_cache=True, **{name_of_cache: kept})
    return [{"keys": layer.keys, "values": layer.values} for layer in kept.layers]


def found(case: Case, start: int = START, delta: int = PROBED) -> list[RotationSpec | None]:
    """The rotation of each layer, looked for between two positions; None for a layer that has none."""
    known = frequencies(model_of(case.name))
    pairs = zip(layers_at(case.name, start), layers_at(case.name, start + delta), strict=True)
    return [find_rotation(old[case.part], new[case.part], delta, known, TOLERANCE) for old, new in pairs]


def rotations(case: Case) -> list[Rotation | None]:
    known = frequencies(model_of(case.name))
    return [spec and rotation_of(spec, known) for spec in found(case)]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return float((actual - expected).abs().max()) <= tolerance * float(expected.abs().max())


# -- against the models themselves -----------------------------------------------------------------------------------


@by_name
def test_the_rotation_of_every_layer_is_found(case: Case) -> None:
    specs = found(case)
    assert [index for index, spec in enumerate(specs) if spec is None] == list(case.plain)
    known = frequencies(model_of(case.name))
    for spec in specs:
        if spec is not None:
            assert spec.layout == case.layout
            assert (2 * len(known[spec.frequencies]), spec.begin) == (case.width, 0)
    assert len({spec.frequencies for spec in specs if spec}) == case.num_frequencies
    assert layers_at(case.name, START)[0][case.part].shape[-1] == case.channels


@by_name
@pytest.mark.parametrize("delta", DELTAS)
def test_moved_keys_are_the_keys_that_the_model_computes_there(case: Case, delta: int) -> None:
    there = layers_at(case.name, START + delta)
    other = "values" if case.part == "keys" else "keys"
    for here, truth, rotation in zip(layers_at(case.name, START), there, rotations(case), strict=True):
        moved = rotation.shift(here[case.part], delta) if rotation else here[case.part]
        assert close(moved, truth[case.part])
        assert close(here[other], truth[other])


@by_name
def test_the_test_can_tell_positions_apart(case: Case) -> None:
    """Unmoved, and moved the wrong way or by one too many, keys are far from what the model computes there."""
    for index, rotation in enumerate(rotations(case)):
        here, truth = (layers_at(case.name, start)[index][case.part] for start in (START, START + 7))
        if rotation is not None:
            assert not any(close(rotation.shift(here, wrong), truth, 100 * TOLERANCE) for wrong in (0, -7, 8))


@by_name
def test_the_same_rotation_is_found_anywhere(case: Case) -> None:
    assert found(case, 0, 5) == found(case, 300, 5) == found(case, START, 1) == found(case, START, -31) == found(case)


def test_local_and_global_layers_of_gemma3_have_their_own_frequencies() -> None:
    """Frequencies of the other kind of layer do not explain the keys of a layer."""
    case = next(case for case in CASES if case.model_type == "gemma3_text")
    known = frequencies(model_of(case.name))
    specs = found(case)
    assert specs[0] == specs[2] != specs[1] == specs[3]
    local, everywhere = specs[0], specs[1]
    assert local is not None
    assert everywhere is not None
    assert torch.allclose(known[local.frequencies][0] / known[everywhere.frequencies][0], torch.tensor(8.0))
    old, new = (layers_at(case.name, start)[0]["keys"] for start in (START, START + PROBED))
    assert find_rotation(old, new, PROBED, {"global": known[everywhere.frequencies]}, TOLERANCE) is None


def test_an_attention_factor_is_not_applied_twice() -> None:
    """It is in the keys when they are cached; a move must leave their lengths alone."""
    model = model_of("yarn")
    assert model.model.rotary_emb.attention_scaling > 1.1
    case = next(case for case in CASES if case.name == "yarn")
    for parts, rotation in zip(layers_at("yarn", START), rotations(case), strict=True):
        keys = parts["keys"]
        assert rotation is not None
        assert torch.equal(rotation.shift(keys, 0), keys)
        for delta in DELTAS:
            moved = rotation.shift(keys, delta)
            assert torch.allclose(moved.norm(dim=-1), keys.norm(dim=-1), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_table_of_narrow_numbers_still_gives_exact_frequencies(dtype: torch.dtype) -> None:
    """GPT-J keeps sines and cosines by position. In two bytes, the first rows alone do not give the frequencies."""
    exact = frequencies(model_of("table gptj"))
    narrow = frequencies(copy.deepcopy(model_of("table gptj")).to(dtype))  # type: ignore[arg-type]
    assert narrow.keys() == exact.keys() != set()
    for name, inv_freq in exact.items():
        assert float((narrow[name] - inv_freq).abs().max()) * ORIGINAL < 0.02


# -- the arithmetic ----------------------------------------------------------------------------------------------------

INV_FREQ = 10_000.0 ** -(torch.arange(6) / 6)
ROTATIONS = [Rotation(INV_FREQ, layout, begin) for layout in LAYOUTS for begin in (0, 4)]
KEYS = torch.randn(1, 2, 11, 16, generator=torch.Generator().manual_seed(0))
every_rotation = pytest.mark.parametrize("rotation", ROTATIONS, ids=str)


@every_rotation
def test_shift_turns_each_pair_by_position_times_frequency(rotation: Rotation) -> None:
    """Against complex numbers."""
    for delta in (0, 1, -3, 250):
        moved = rotation.shift(KEYS, delta)
        for pair, frequency in enumerate(INV_FREQ.tolist()):
            first, second = (pair, pair + 6) if rotation.layout == "half-split" else (2 * pair, 2 * pair + 1)
            turn = torch.polar(torch.tensor(1.0), torch.tensor(delta * frequency))
            begin = rotation.begin
            expected = torch.complex(KEYS[..., begin + first], KEYS[..., begin + second]) * turn
            assert torch.allclose(moved[..., begin + first], expected.real, atol=1e-4)
            assert torch.allclose(moved[..., begin + second], expected.imag, atol=1e-4)


@every_rotation
def test_shift_leaves_its_input_and_the_other_channels_alone(rotation: Rotation) -> None:
    before = KEYS.clone()
    moved = rotation.shift(KEYS, 37)
    assert torch.equal(KEYS, before)
    end = rotation.begin + 12
    assert torch.equal(moved[..., : rotation.begin], KEYS[..., : rotation.begin])
    assert torch.equal(moved[..., end:], KEYS[..., end:])
    assert not torch.equal(moved[..., rotation.begin : end], KEYS[..., rotation.begin : end])
    assert (moved.shape, moved.dtype) == (KEYS.shape, KEYS.dtype)
    moved.zero_()
    assert torch.equal(KEYS, before)


@every_rotation
def test_shifts_add_up_and_undo_each_other(rotation: Rotation) -> None:
    assert torch.equal(rotation.shift(KEYS, 0), KEYS)
    for one in (1, 7, 100, 1000):
        assert torch.allclose(rotation.shift(rotation.shift(KEYS, one), -one), KEYS, atol=1e-5)
        for other in (-13, 5):
            twice = rotation.shift(rotation.shift(KEYS, one), other)
            assert torch.allclose(twice, rotation.shift(KEYS, one + other), atol=1e-3)


@every_rotation
def test_a_shift_for_each_token_is_each_token_shifted(rotation: Rotation) -> None:
    deltas = torch.tensor([0, 1, -1, 5, 5, 100, -100, 31, 2, 3, 1000])
    together = rotation.shift(KEYS, deltas)
    for index, delta in enumerate(deltas.tolist()):
        alone = rotation.shift(KEYS[:, :, index : index + 1], delta)
        assert torch.allclose(together[:, :, index : index + 1], alone, atol=1e-6)


@every_rotation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_keys_are_turned_in_float32_and_rounded_once(rotation: Rotation, dtype: torch.dtype) -> None:
    """Angles rounded to two bytes would be off by whole turns at large distances."""
    keys = KEYS.to(dtype)
    for delta in (1, 100, 5000):
        moved = rotation.shift(keys, delta)
        assert moved.dtype == dtype
        assert torch.equal(moved, rotation.shift(keys.float(), delta).to(dtype))
        exact = rotation.shift(keys.double().float(), delta)
        assert float((moved.float() - exact).abs().max()) <= torch.finfo(dtype).eps * float(exact.abs().max())


def test_frequencies_of_a_narrower_type_are_not_narrowed_further() -> None:
    """Frequencies that a model holds in two bytes are what it computes with; the angles are float32 all the same."""
    narrow = replace(ROTATIONS[0], inv_freq=INV_FREQ.bfloat16())
    wide = replace(ROTATIONS[0], inv_freq=INV_FREQ.bfloat16().float())
    assert torch.equal(narrow.shift(KEYS, 777), wide.shift(KEYS, 777))


# -- what is not found -------------------------------------------------------------------------------------------------


def after(delta: int = PROBED, rotation: Rotation = ROTATIONS[0]) -> torch.Tensor:
    return rotation.shift(KEYS, delta)


@every_rotation
def test_a_rotation_is_found_by_its_effect(rotation: Rotation) -> None:
    known = {"decoy": INV_FREQ * 1.01, "true": INV_FREQ, "wide": torch.rand(9)}
    spec = find_rotation(KEYS, after(PROBED, rotation), PROBED, known, TOLERANCE)
    assert spec == RotationSpec("true", rotation.layout, rotation.begin)
    assert spec is not None
    assert torch.equal(rotation_of(spec, known).inv_freq, INV_FREQ)


@every_rotation
def test_a_rotation_the_other_way_is_found_as_that(rotation: Rotation) -> None:
    known = {"true": INV_FREQ}
    spec = find_rotation(KEYS, rotation.shift(KEYS, -PROBED), PROBED, known, TOLERANCE)
    assert spec == RotationSpec("true", rotation.layout, rotation.begin, -1)
    assert spec is not None
    assert torch.allclose(rotation_of(spec, known).shift(KEYS, 30), rotation.shift(KEYS, -30))


NOT_FOUND: dict[str, tuple[torch.Tensor, int, Sequence[torch.Tensor]]] = {
    "no frequencies are known": (after(), PROBED, ()),
    "other frequencies": (after(), PROBED, (INV_FREQ * 1.001, INV_FREQ.flip(0))),
    "fewer frequencies": (after(), PROBED, (INV_FREQ[:4],)),
    "more frequencies than channels": (after(), PROBED, (torch.cat([INV_FREQ, INV_FREQ]),)),
    "another distance": (after(), PROBED + 1, (INV_FREQ,)),
    "channels in the middle": (after(PROBED, replace(ROTATIONS[0], begin=2)), PROBED, (INV_FREQ,)),
    "another pairing": (after().flip(-1), PROBED, (INV_FREQ,)),
    "scaled as well": (after() * 1.01, PROBED, (INV_FREQ,)),
    "one token differs": (after(torch.tensor([5] * 10 + [6])), PROBED, (INV_FREQ,)),  # type: ignore[arg-type]
    "not a number": (after() * float("nan"), PROBED, (INV_FREQ,)),
    "not moved": (KEYS, PROBED, (INV_FREQ,)),
}


@pytest.mark.parametrize("why", NOT_FOUND)
def test_what_no_rotation_explains_is_not_found(why: str) -> None:
    moved, delta, known = NOT_FOUND[why]
    named = {str(index): inv_freq for index, inv_freq in enumerate(known)}
    assert find_rotation(KEYS, moved, delta, named, TOLERANCE) is None


@by_name
def test_the_other_layout_is_not_found(case: Case) -> None:
    """With channels paired the wrong way, no frequencies of the model explain its keys."""
    known = frequencies(model_of(case.name))
    old, new = (layers_at(case.name, start)[0][case.part] for start in (START, START + PROBED))
    order = torch.arange(case.width).reshape(2, -1).T.flatten()  # half-split -> interleaved
    if case.layout == "interleaved":
        order = order.argsort()
    old, new = (torch.cat([part[..., order], part[..., case.width :]], -1) for part in (old, new))
    spec = find_rotation(old, new, PROBED, known, TOLERANCE)
    assert spec is not None
    assert spec.layout != case.layout


# -- frequencies -------------------------------------------------------------------------------------------------------


def test_frequencies_are_found_once_and_only_those_of_rotations() -> None:
    """GPT-2 has buffers and none of them; every layer of GPT-J has a table of its own, and all are one."""
    gpt2: Any = AutoModelForCausalLM.from_config(GPT2Config(n_embd=32, n_layer=2, n_head=4))
    gpt2.register_buffer("some_table", torch.rand(8, 8))
    gpt2.register_buffer("some_zeros", torch.zeros(8, 8))
    gpt2.register_buffer("one_row", torch.ones(1, 8))
    assert frequencies(gpt2) == {}
    assert len(frequencies(model_of("table gptj"))) == 1
    assert len(frequencies(model_of("default"))) == 1
    assert len(frequencies(model_of("two frequencies gemma3"))) == 2


def test_the_frequencies_of_a_table_are_those_that_it_was_made_from() -> None:
    (inv_freq,) = frequencies(model_of("table gptj")).values()
    assert torch.allclose(inv_freq, 10_000.0 ** -(torch.arange(4) / 4), rtol=1e-5)


def test_a_rotation_says_what_it_turns() -> None:
    assert str(ROTATIONS[3]) == "interleaved, 12 channels from 4"
