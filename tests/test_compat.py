"""What can pass between two models: every field of a spec, alone and together, without torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from langgraph_latent.spec.compat import Compatibility, Level, compare
from langgraph_latent.spec.spec import NO_IDENTITY, Capabilities, LayerSpec, ModelSpec, StateTensor

LAYER = LayerSpec("full", 0, 2, 8, 8)
SPEC = ModelSpec(
    name="folder/a",
    architecture="LlamaForCausalLM",
    hidden_size=32,
    vocab_size=320,
    layers=(LAYER,) * 3,
    rope='{"rope_theta": 10000.0}',
    config="c" * 64,
    weights="w" * 64,
    tokenizer="t" * 64,
    template="c" * 64,
    adapters=(),
    dtype="float32",
    quantization="",
    attention="sdpa",
    max_positions=2048,
    bytes_per_token=384,
    sketch="s" * 64,
)
OTHER: dict[str, tuple[Any, Level, str]] = {
    "architecture": ("MistralForCausalLM", Level.TEXT, "fitted adapter"),
    "hidden_size": (64, Level.TEXT, "fitted adapter"),
    "vocab_size": (321, Level.TEXT, "text only"),
    "layers": ((LAYER,) * 2, Level.TEXT, "fitted adapter"),
    "rope": ("", Level.TEXT, "the same rope settings"),
    "config": ("d" * 64, Level.TEXT, "the same config.json"),
    "weights": ("x" * 64, Level.SIBLING, "rounded copy of the same weights"),
    "tokenizer": ("u" * 64, Level.TEXT, "text only"),
    "template": ("d" * 64, Level.SIBLING, "valid token for token"),
    "adapters": (("lora:1234",), Level.SIBLING, "activate the same adapter"),
    "dtype": ("bfloat16", Level.SIBLING, "load both in float32"),
    "quantization": ("fp8", Level.SIBLING, "load both in the same quantisation"),
    "attention": ("eager", Level.SIBLING, "load both with the same one"),
    "max_positions": (4096, Level.SIBLING, "valid up to the shorter"),
    "bytes_per_token": (192, Level.SIBLING, ""),
}
"""Another value of every field of the identity, the level that it leaves, and words of what would help."""
FINE_TUNE = {"weights": "x" * 64, "sketch": "z" * 64}


def other(**fields: Any) -> ModelSpec:
    return dataclasses.replace(SPEC, **fields)


def notes(result: Compatibility) -> str:
    return "\n".join(result.notes)


def test_the_other_values_cover_every_field_of_the_identity() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(ModelSpec)} - set(NO_IDENTITY)


def test_a_spec_of_another_schema_is_compared_by_what_it_says() -> None:
    """A release must not make every saved handle a stranger's."""
    assert other(schema=99).identity == SPEC.identity
    assert compare(SPEC, other(schema=99)) == Compatibility(Level.EXACT)
    result = compare(SPEC, other(schema=99, dtype="bfloat16"))
    assert [difference.field for difference in result.differences] == ["dtype"]


def test_a_model_is_itself_under_any_name() -> None:
    twin = other(
        name="another/folder", schema=99, sketch="", capabilities=Capabilities(positions="rope", is_probed=True)
    )
    assert twin.identity == SPEC.identity
    assert compare(SPEC, twin) == Compatibility(Level.EXACT)


@pytest.mark.parametrize("field", OTHER)
def test_any_other_field_is_another_model_is_named_and_has_its_remedy(field: str) -> None:
    """A fine-tune with an equal config differs in its weights only, and is another model."""
    value, level, words = OTHER[field]
    model = other(**{field: value})
    assert model.identity != SPEC.identity
    result = compare(SPEC, model)
    assert result.level is level
    (difference,) = result.differences
    assert (difference.field, difference.is_known) == (field, True)
    assert str(difference) == result.reasons[0] == f"{field} differs ({difference.a} / {difference.b})"
    assert difference.a != difference.b
    assert len(result.notes) == bool(words)
    assert words in notes(result)
    assert compare(model, SPEC).level is level


@pytest.mark.parametrize(("one", "two"), list(itertools.combinations(OTHER, 2)))
def test_two_differences_leave_the_worse_level_of_the_two(one: str, two: str) -> None:
    result = compare(SPEC, other(**{field: OTHER[field][0] for field in (one, two)}))
    assert result.level is max(OTHER[one][1], OTHER[two][1])
    assert [difference.field for difference in result.differences] == [field for field in OTHER if field in (one, two)]


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec("sliding", 24, 2, 8, 8),
        LayerSpec("full", 0, 1, 8, 8),
        LayerSpec("full", 0, 2, 16, 8),
        LayerSpec("full", 0, 2, 8, 16),
        LayerSpec("linear"),
    ],
)
def test_one_layer_of_another_shape_is_enough_for_text(layer: LayerSpec) -> None:
    result = compare(SPEC, other(layers=(LAYER, layer, LAYER)))
    assert result.level is Level.TEXT
    assert [difference.field for difference in result.differences] == ["layers"]


def test_layers_are_told_as_people_read_them() -> None:
    wide, near = LayerSpec("full", 0, 2, 8, 4), LayerSpec("sliding", 24, 2, 8, 8)
    kept = LayerSpec("linear", tensors=(StateTensor("conv", (1, 96, -1), "float32"),))
    (difference,) = compare(SPEC, other(layers=(wide, wide, near, kept))).differences
    assert (difference.a, difference.b) == (
        "3 full, 2 x 8",
        "2 full, 2 x 8 and 4; 1 sliding 24, 2 x 8; 1 linear, conv 1 x 96 x n float32",
    )
    (difference,) = compare(other(layers=(LAYER, LAYER, near)), other(layers=(LAYER, near, LAYER))).differences
    assert (difference.a, difference.b) == ("layer 1: full, 2 x 8", "layer 1: sliding 24, 2 x 8")


def test_rope_parameters_are_told_where_they_differ() -> None:
    long = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "rope_theta": 10000.0}
    longer = {**long, "long_factor": [1.0] * 47 + [2.5]}
    one, two = (json.dumps({"full": rope, "near": {"rope_theta": 1e4}}, sort_keys=True) for rope in (long, longer))
    (difference,) = compare(other(rope=one), other(rope=two)).differences
    assert (difference.a, difference.b) == ("full.long_factor.47 1", "full.long_factor.47 2.5")
    (difference,) = compare(SPEC, other(rope="")).differences
    assert (difference.a, difference.b) == ("rope_theta 10000", "none")


def test_every_difference_is_listed_and_every_sentence_said_once() -> None:
    result = compare(SPEC, other(**{field: value for field, (value, _, _) in OTHER.items()}))
    assert [difference.field for difference in result.differences] == list(OTHER)
    assert len(set(result.notes)) == len(result.notes)
    assert all(len(reason) < 220 for reason in result.reasons)


# -- siblings --------------------------------------------------------------------------------------------------------


def test_a_rounded_copy_is_told_from_a_fine_tune_by_its_sketch() -> None:
    copy = other(weights="x" * 64, dtype="bfloat16", bytes_per_token=192)
    tuned = other(**FINE_TUNE, dtype="bfloat16", bytes_per_token=192)
    assert compare(SPEC, copy).level is compare(SPEC, tuned).level is Level.SIBLING
    assert "rounded copy of the same weights (float32 and bfloat16)" in notes(compare(SPEC, copy))
    assert "certificate" not in notes(compare(SPEC, copy))
    assert "certificate" in notes(compare(SPEC, tuned))
    assert "copy of" not in notes(compare(SPEC, tuned))


def test_a_rounded_copy_is_one_in_whatever_dtype_both_are_loaded() -> None:
    """On a CPU, files of any dtype are loaded in float32."""
    result = compare(SPEC, other(weights="x" * 64))
    assert result.level is Level.SIBLING
    assert "rounded copy of the same weights, by a sample" in notes(result)
    assert "certificate" not in notes(result)


def test_no_sketch_proves_nothing() -> None:
    one, two = other(sketch=""), other(sketch="", weights="x" * 64, dtype="bfloat16")
    assert "copy of" not in notes(compare(one, two))


@pytest.mark.parametrize(("two", "widest"), [("bfloat16", "float32"), ("float64", "float64"), ("float16", "float32")])
def test_the_dtype_to_load_both_in_loses_nothing(two: str, widest: str) -> None:
    assert f"load both in {widest} " in notes(compare(SPEC, other(dtype=two)))


# -- what is not known -----------------------------------------------------------------------------------------------


def test_unknown_weights_are_never_exact() -> None:
    """Not even where the identity is equal: two config files say nothing of the weights."""
    unknown = other(weights="", sketch="")
    for one, two in ((unknown, unknown), (unknown, SPEC), (SPEC, unknown)):
        result = compare(one, two)
        assert result.level is Level.SIBLING
        (difference,) = result.differences
        assert difference.field == "weights"
        assert not difference.is_known
        assert "may differ" in str(difference)
        assert "weights unknown" in notes(result)
        assert "certificate" not in notes(result)
        assert "could be exact" in notes(result)
        assert result.could_be_exact


def test_what_is_known_to_differ_could_not_be_exact() -> None:
    for fields in ({"weights": "", "dtype": "bfloat16"}, {"weights": "", "rope": ""}, {"weights": "x"}, {}):
        result = compare(SPEC, other(**fields))
        assert not result.could_be_exact
        assert "could be exact" not in notes(result)


@pytest.mark.parametrize("field", ["weights", "tokenizer", "template", "attention"])
def test_what_is_unknown_on_one_side_is_no_difference_that_is_known(field: str) -> None:
    result = compare(SPEC, other(**{field: ""}))
    assert result.level is Level.SIBLING
    assert [difference.is_known for difference in result.differences] == [False]
    assert notes(result).startswith(f"{field} unknown")


def test_an_empty_field_that_means_none_is_a_difference() -> None:
    (difference,) = compare(SPEC, other(quantization="fp8")).differences
    assert difference.is_known
    assert compare(SPEC, other(rope="")).level is Level.TEXT


# -- capabilities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "words"),
    [
        ("append", "only text reaches"),
        ("crop", "a prefix"),
        ("move", "level 1 is refused"),
        ("think", "latent steps"),
    ],
)
def test_what_the_receiver_can_not_do_is_said_with_the_reason(capability: str, words: str) -> None:
    limited = other(capabilities=Capabilities(((capability, "a reason of its own"),)))
    assert limited.identity == SPEC.identity
    (note,) = compare(SPEC, limited).notes
    assert words in note
    assert note.endswith(": a reason of its own")
    assert compare(limited, SPEC).notes == ()
    assert compare(SPEC, limited).level is Level.EXACT


# -- across processes ------------------------------------------------------------------------------------------------

REASONS = """
import dataclasses, json
from langgraph_latent.spec.compat import compare
from langgraph_latent.spec.spec import LayerSpec, ModelSpec
a = ModelSpec("n", "A", 1, 2, (LayerSpec("full", 0, 2, 8, 8), LayerSpec("sliding", 4, 2, 8, 8)), "", "g", "w", "t", "c",
              ("x:1", "y:2"), "float32", "", "sdpa", 0, 1)
b = dataclasses.replace(a, layers=(LayerSpec("sliding", 4, 2, 8, 8), LayerSpec("full", 0, 2, 8, 8)), adapters=())
result = compare(a, b)
print(json.dumps([result.reasons, result.notes, a.identity]))
"""


def test_reasons_and_identity_are_the_same_in_every_process() -> None:
    """A trace can be compared with another run's, and an identity is a promise across processes."""
    results = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", REASONS], capture_output=True, text=True, env=environment, timeout=60, check=True
        )
        results.add(done.stdout)
    assert len(results) == 1
    assert len(json.loads(results.pop())[-1]) == 32
