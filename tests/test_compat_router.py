"""The matrix and the router: pure functions over plain values, every branch, without torch."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from langgraph_latent.compat import Compatibility, Difference, Level, compare
from langgraph_latent.errors import ConfigError, RouteError
from langgraph_latent.router import Cost, EdgePolicy, EdgeRouter, Route, choose
from langgraph_latent.spec import LayerSpec, ModelSpec

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
)
OTHER: dict[str, Any] = {
    "architecture": "MistralForCausalLM",
    "hidden_size": 64,
    "vocab_size": 321,
    "layers": (LAYER,) * 2,
    "rope": "",
    "config": "d" * 64,
    "weights": "x" * 64,
    "tokenizer": "u" * 64,
    "template": "d" * 64,
    "adapters": ("lora:1234",),
    "dtype": "bfloat16",
    "quantization": "fp8",
    "attention": "eager",
    "max_positions": 4096,
    "bytes_per_token": 192,
    "schema": 99,
}
TEXT_FIELDS = {"architecture", "hidden_size", "vocab_size", "layers", "rope", "config", "tokenizer", "schema"}

EXACT = Compatibility(Level.EXACT)
SIBLING = Compatibility(Level.SIBLING, (Difference("weights", "w", "x"),))
FOREIGN = Compatibility(Level.TEXT, (Difference("hidden_size", "32", "64"), Difference("tokenizer", "t", "u")))


# -- identity and the matrix -----------------------------------------------------------------------------------------


def test_the_other_values_cover_every_field_but_the_name() -> None:
    assert set(OTHER) == {field.name for field in dataclasses.fields(ModelSpec)} - {"name"}


def test_a_model_is_itself_under_any_name() -> None:
    twin = dataclasses.replace(SPEC, name="another/folder")
    assert twin.identity == SPEC.identity
    assert compare(SPEC, twin) == Compatibility(Level.EXACT, ())


@pytest.mark.parametrize("field", OTHER)
def test_any_other_field_is_another_model_and_is_named_as_the_reason(field: str) -> None:
    """A fine-tune with an equal config differs in its weights only, and is another model."""
    other = dataclasses.replace(SPEC, **{field: OTHER[field]})
    assert other.identity != SPEC.identity
    result = compare(SPEC, other)
    assert result.level is (Level.TEXT if field in TEXT_FIELDS else Level.SIBLING)
    assert [difference.field for difference in result.differences] == [field]
    assert result.reasons[0].startswith(f"{field} differs (")
    assert compare(other, SPEC).level is result.level


@pytest.mark.parametrize(
    "layer",
    [
        LayerSpec("sliding", 24, 2, 8, 8),
        LayerSpec("full", 0, 1, 8, 8),
        LayerSpec("full", 0, 2, 16, 8),
        LayerSpec("full", 0, 2, 8, 16),
    ],
)
def test_one_layer_of_another_shape_is_enough_for_text(layer: LayerSpec) -> None:
    other = dataclasses.replace(SPEC, layers=(LAYER, layer, LAYER))
    assert compare(SPEC, other).level is Level.TEXT
    assert compare(SPEC, other).differences[0].field == "layers"


def test_every_difference_is_listed_in_the_order_of_the_fields() -> None:
    other = dataclasses.replace(SPEC, **OTHER)
    assert [difference.field for difference in compare(SPEC, other).differences] == list(OTHER)


def test_long_values_are_shortened_in_reasons() -> None:
    reasons = compare(SPEC, dataclasses.replace(SPEC, **OTHER)).reasons
    assert all(len(reason) < 220 for reason in reasons)
    assert "hidden_size differs (32 / 64)" in reasons


REASONS = """
import dataclasses, json
from langgraph_latent.compat import compare
from langgraph_latent.spec import LayerSpec, ModelSpec
a = ModelSpec("n", "A", 1, 2, (LayerSpec("full", 0, 2, 8, 8), LayerSpec("sliding", 4, 2, 8, 8)), "", "g", "w", "t", "c",
              ("x:1", "y:2"), "float32", "", "sdpa", 0, 1)
b = dataclasses.replace(a, layers=(LayerSpec("sliding", 4, 2, 8, 8), LayerSpec("full", 0, 2, 8, 8)), adapters=())
print(json.dumps([compare(a, b).reasons, a.identity]))
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
    assert len(json.loads(results.pop())[1]) == 32


# -- choose ----------------------------------------------------------------------------------------------------------

ALL = frozenset(Level)
CHOICES: list[tuple[str, Compatibility, EdgePolicy, bool, Route, Level, str]] = [
    ("same model", EXACT, EdgePolicy(), True, Route.CACHE, Level.EXACT, "same_model"),
    ("same model, cache forced", EXACT, EdgePolicy(route=Route.CACHE), True, Route.CACHE, Level.EXACT, "same_model"),
    ("same model, judge", EXACT, EdgePolicy(judge=True), True, Route.CACHE, Level.EXACT, "same_model"),
    ("same model, all allowed", EXACT, EdgePolicy(allow=ALL), True, Route.CACHE, Level.EXACT, "same_model"),
    ("only exact", EXACT, EdgePolicy(allow=frozenset({Level.EXACT})), True, Route.CACHE, Level.EXACT, "same_model"),
    ("text forced", EXACT, EdgePolicy(route=Route.TEXT), True, Route.TEXT, Level.TEXT, "forced"),
    ("text forced, other model", FOREIGN, EdgePolicy(route=Route.TEXT), True, Route.TEXT, Level.TEXT, "forced"),
    ("text forced, behind", EXACT, EdgePolicy(route=Route.TEXT), False, Route.TEXT, Level.TEXT, "forced"),
    ("only text", EXACT, EdgePolicy(allow=frozenset({Level.TEXT})), True, Route.TEXT, Level.TEXT, "not_allowed"),
    ("other model", FOREIGN, EdgePolicy(), True, Route.TEXT, Level.TEXT, "other_model"),
    ("other model, behind", FOREIGN, EdgePolicy(), False, Route.TEXT, Level.TEXT, "other_model"),
    ("sibling", SIBLING, EdgePolicy(), True, Route.TEXT, Level.TEXT, "other_model"),
    ("sibling, judge", SIBLING, EdgePolicy(allow=ALL, judge=True), True, Route.TEXT, Level.TEXT, "other_model"),
    ("behind another", EXACT, EdgePolicy(), False, Route.TEXT, Level.TEXT, "not_first"),
    ("behind, judge", EXACT, EdgePolicy(allow=ALL, judge=True), False, Route.TEXT, Level.TEXT, "not_first"),
]


@pytest.mark.parametrize(
    ("compatibility", "policy", "first", "route", "level", "code"),
    [choice[1:] for choice in CHOICES],
    ids=[choice[0] for choice in CHOICES],
)
def test_the_best_route_that_works_and_is_allowed(
    compatibility: Compatibility, policy: EdgePolicy, first: bool, route: Route, level: Level, code: str
) -> None:
    decision = choose(compatibility, policy, first=first)
    assert (decision.route, decision.level, decision.code) == (route, level, code)
    assert decision.reason
    assert decision.compatibility is compatibility
    assert choose(compatibility, policy, first=first) == decision
    if code == "other_model":
        assert all(difference.field in decision.reason for difference in compatibility.differences)


REFUSALS: list[tuple[Compatibility, EdgePolicy, bool]] = [
    (FOREIGN, EdgePolicy(allow=frozenset({Level.EXACT})), True),
    (FOREIGN, EdgePolicy(route=Route.CACHE), True),
    (SIBLING, EdgePolicy(allow=frozenset({Level.EXACT})), True),
    (EXACT, EdgePolicy(allow=frozenset({Level.EXACT})), False),
    (EXACT, EdgePolicy(route=Route.CACHE), False),
    (EXACT, EdgePolicy(allow=frozenset()), True),
    (EXACT, EdgePolicy(allow=frozenset({Level.MOVED}), judge=True), True),
    (EXACT, EdgePolicy(allow=frozenset({Level.TEXT}), route=Route.CACHE), True),
    (EXACT, EdgePolicy(allow=frozenset({Level.EXACT}), route=Route.TEXT), True),
]


@pytest.mark.parametrize(("compatibility", "policy", "first"), REFUSALS)
def test_where_no_route_is_left_the_error_says_why_and_what_to_do(
    compatibility: Compatibility, policy: EdgePolicy, first: bool
) -> None:
    with pytest.raises(RouteError) as caught:
        choose(compatibility, policy, first=first)
    text = str(caught.value)
    level = compatibility.level if first or compatibility.level > Level.EXACT else Level.MOVED
    assert level.name in text
    assert "Level.TEXT" in text
    assert (policy.route.value if policy.route else "nothing") in text
    assert all(allowed.name in text for allowed in policy.levels)
    assert all(reason in text for reason in compatibility.reasons)


def every_policy() -> list[EdgePolicy]:
    subsets = itertools.chain.from_iterable(itertools.combinations(Level, size) for size in range(len(Level) + 1))
    return [
        EdgePolicy(allow=frozenset(allow), route=route, judge=judge)
        for allow in subsets
        for route in (None, Route.CACHE, Route.TEXT)
        for judge in (False, True)
    ]


def test_no_policy_ever_gets_a_level_or_route_that_it_does_not_allow() -> None:
    """Law 7, over every policy there is."""
    policies = every_policy()
    assert len(policies) == 32 * 3 * 2
    for policy, compatibility, first in itertools.product(policies, (EXACT, SIBLING, FOREIGN), (True, False)):
        try:
            decision = choose(compatibility, policy, first=first)
        except RouteError:
            text_works = Level.TEXT in policy.levels and policy.route in (None, Route.TEXT)
            cache_works = first and compatibility is EXACT and Level.EXACT in policy.levels
            assert not text_works
            assert not (cache_works and policy.route in (None, Route.CACHE))
            continue
        assert decision.level in policy.allow
        assert not policy.judge or decision.level in (Level.EXACT, Level.TEXT)
        assert policy.route in (None, decision.route)
        assert (decision.route is Route.CACHE) == (decision.level is Level.EXACT)
        if decision.route is Route.CACHE:
            assert first
            assert compatibility is EXACT


# -- policies --------------------------------------------------------------------------------------------------------


def test_by_default_only_exact_and_text_are_allowed_and_failures_fall_back() -> None:
    policy = EdgePolicy()
    assert policy.allow == policy.levels == {Level.EXACT, Level.TEXT}
    assert policy.may_fall_back


@pytest.mark.parametrize(
    ("policy", "may"),
    [
        (EdgePolicy(on_failure="raise"), False),
        (EdgePolicy(allow=frozenset({Level.EXACT})), False),
        (EdgePolicy(route=Route.CACHE), False),
        (EdgePolicy(route=Route.TEXT), True),
        (EdgePolicy(judge=True), True),
        (EdgePolicy(allow=frozenset({Level.MOVED, Level.EXACT}), judge=True), False),
    ],
)
def test_a_failing_cache_is_replaced_by_text_only_where_text_is_allowed(policy: EdgePolicy, may: bool) -> None:
    assert policy.may_fall_back is may


def test_a_judge_compares_on_exact_caches_or_text_whatever_is_allowed() -> None:
    assert EdgePolicy(allow=ALL, judge=True).levels == {Level.EXACT, Level.TEXT}
    assert EdgePolicy(allow=frozenset({Level.SIBLING}), judge=True).levels == frozenset()


def test_levels_and_routes_may_be_given_as_plain_values() -> None:
    policy = EdgePolicy(allow=[0, 4], route="text")  # type: ignore[arg-type]
    assert policy == EdgePolicy(route=Route.TEXT)
    assert type(policy.route) is Route
    assert all(type(level) is Level for level in policy.allow)
    hash(policy)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow": [5]}, ["5", "EXACT", "TEXT"]),
        ({"allow": ["exact"]}, ["exact", "EXACT"]),
        ({"route": "pigeon"}, ["pigeon", "cache", "text"]),
        ({"on_failure": "ignore"}, ["ignore", "fall_back", "raise"]),
    ],
)
def test_an_impossible_policy_is_refused_with_the_known_values(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        EdgePolicy(**options)
    assert all(word in str(caught.value) for word in words)


def test_an_adapter_can_not_be_forced_while_there_is_none() -> None:
    """A forced route that is silently served by another one would be a lie."""
    with pytest.raises((ConfigError, RouteError)):
        choose(EXACT, EdgePolicy(route=Route.ADAPTER))


def test_a_policy_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EdgePolicy().judge = True  # type: ignore[misc]


# -- edges -----------------------------------------------------------------------------------------------------------


def test_the_most_specific_policy_of_an_edge_counts() -> None:
    own, to, of, default = (EdgePolicy(allow=frozenset({level, Level.TEXT})) for level in list(Level)[:4])
    router = EdgeRouter({("a", "b"): own, ("*", "b"): to, ("a", "*"): of}, default=default)
    assert router.policy("a", "b") is own
    assert router.policy("x", "b") is to
    assert router.policy("a", "x") is of
    assert router.policy("x", "y") is default
    assert router.policy("b", "a") is default
    assert router.policy("", "b") is to
    assert router.policy("", "") is default
    assert EdgeRouter().policy("a", "b") == EdgePolicy()


def test_receiver_comes_before_sender_where_both_sides_have_a_star() -> None:
    to, of = EdgePolicy(judge=True), EdgePolicy(route=Route.TEXT)
    assert EdgeRouter({("a", "*"): of, ("*", "b"): to}).policy("a", "b") is to


def test_a_router_keeps_its_own_copy_of_the_policies() -> None:
    policies = {("a", "b"): EdgePolicy(judge=True)}
    router = EdgeRouter(policies)
    policies.clear()
    assert router.policy("a", "b").judge


@pytest.mark.parametrize(
    "policies",
    [
        {"a": EdgePolicy()},
        {("a",): EdgePolicy()},
        {("a", "b", "c"): EdgePolicy()},
        {("a", "b"): None},
        {("a", "b"): Route.TEXT},
    ],
)
def test_what_is_no_edge_or_no_policy_is_refused(policies: Any) -> None:
    with pytest.raises(ConfigError, match="source node, receiving node"):
        EdgeRouter(policies)


# -- decisions -------------------------------------------------------------------------------------------------------


def test_a_decision_is_plain_data_for_a_message() -> None:
    plain = choose(FOREIGN, EdgePolicy()).to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert set(plain) == {"route", "level", "code", "reason"}
    assert (plain["route"], plain["level"], plain["code"]) == ("text", 4, "other_model")
    assert type(plain["level"]) is int
    assert type(plain["route"]) is str


def test_costs_are_added_without_losing_the_other_one() -> None:
    decision = choose(EXACT, EdgePolicy())
    estimated = dataclasses.replace(decision, estimated=Cost(16))
    both = dataclasses.replace(estimated, actual=Cost(17, 0.5))
    assert decision.estimated is decision.actual is None
    assert (both.estimated, both.actual) == (Cost(16), Cost(17, 0.5))
    assert both.route is decision.route


def test_a_cache_that_failed_becomes_a_decision_for_text_that_says_why() -> None:
    failed = choose(EXACT, EdgePolicy()).failed(MemoryError("no room"))
    assert (failed.route, failed.level, failed.code) == (Route.TEXT, Level.TEXT, "failed")
    assert "no room" in failed.reason
    assert failed.compatibility is EXACT
