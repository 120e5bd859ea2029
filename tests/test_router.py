"""The router: the choice by a truth table over plain values, then the same choice in real workspaces."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from langchain_core.messages import HumanMessage, SystemMessage

from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, ModelSpec
from langgraph_latent.errors import ConfigError, RouteError, TenantError
from langgraph_latent.events import Delivered, Diverged, FellBack, Moved, Prefilled, Rebuilt, Routed
from langgraph_latent.kv.state import KVState
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router import codes
from langgraph_latent.router.choice import (
    MARGIN,
    OPTIONS,
    Facts,
    RouteDecision,
    Situation,
    by_identity,
    choose,
    choose_option,
    facts_of,
)
from langgraph_latent.router.codes import DecisionCode
from langgraph_latent.router.explain import Explanation, explain
from langgraph_latent.router.policy import Route
from langgraph_latent.router.rates import MIN_TOKENS, Cost, RateMeter, Rates
from langgraph_latent.spec.compat import Compatibility, Difference, Level
from langgraph_latent.testing import CHATML

EXACT = Compatibility(Level.EXACT)
SIBLING = Compatibility(Level.SIBLING, (Difference("weights", "w", "x"),))
FOREIGN = Compatibility(Level.TEXT, (Difference("hidden_size", "32", "64"), Difference("tokenizer", "t", "u")))
TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
REPORT = "the team that reads the report hands over what it knows to the team that decides"

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
        ({"allow": 0}, ["int", "EXACT"]),
        ({"on_failure": "ignore"}, ["ignore", "fall_back", "raise"]),
        ({"judge": "yes"}, ["yes", "True"]),
        ({"max_context_tokens": 0}, ["0", "tokens"]),
        ({"max_context_tokens": -5}, ["-5", "tokens"]),
        ({"max_context_tokens": 10.5}, ["10.5", "tokens"]),
        ({"max_context_tokens": True}, ["True", "tokens"]),
        ({"max_context_tokens": "8k"}, ["8k", "tokens"]),
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
    assert router.match("x", "b") == ("*", "b")
    assert router.match("x", "y") is None


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
    ("text forced, after another", EXACT, EdgePolicy(route=Route.TEXT), False, Route.TEXT, Level.TEXT, "forced"),
    ("only text", EXACT, EdgePolicy(allow=frozenset({Level.TEXT})), True, Route.TEXT, Level.TEXT, "not_allowed"),
    ("other model", FOREIGN, EdgePolicy(), True, Route.TEXT, Level.TEXT, "other_model"),
    ("other model, after another", FOREIGN, EdgePolicy(), False, Route.TEXT, Level.TEXT, "other_model"),
    ("sibling", SIBLING, EdgePolicy(), True, Route.TEXT, Level.TEXT, "other_model"),
    ("sibling, judge", SIBLING, EdgePolicy(allow=ALL, judge=True), True, Route.TEXT, Level.TEXT, "other_model"),
    ("after another", EXACT, EdgePolicy(), False, Route.TEXT, Level.TEXT, "not_first"),
    ("after another, judge", EXACT, EdgePolicy(allow=ALL, judge=True), False, Route.TEXT, Level.TEXT, "not_first"),
]


@pytest.mark.parametrize(
    ("compatibility", "policy", "first", "route", "level", "code"),
    [choice[1:] for choice in CHOICES],
    ids=[choice[0] for choice in CHOICES],
)
def test_the_best_route_that_works_and_is_allowed(
    compatibility: Compatibility, policy: EdgePolicy, first: bool, route: Route, level: Level, code: str
) -> None:
    decision = choose(compatibility, policy, Facts(first=first))
    assert (decision.route, decision.level, decision.code) == (route, level, code)
    assert decision.reason
    assert decision.compatibility is compatibility
    assert choose(compatibility, policy, Facts(first=first)) == decision
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
        choose(compatibility, policy, Facts(first=first))
    text = str(caught.value)
    level = compatibility.level if first or compatibility.level > Level.EXACT else Level.MOVED
    assert level.name in text
    assert "Level.TEXT" in text
    assert (policy.route.value if policy.route else "nothing") in text
    assert all(allowed.name in text for allowed in policy.levels)
    assert all(reason in text for reason in compatibility.reasons)


# -- every combination ---------------------------------------------------------------------------------------------

SLOW, FAST = Rates(1000.0, 1e6), Rates(1000.0, 1e12)
"""Moving a megabyte takes a second, or next to nothing; a thousand tokens are read in one."""


def every_policy() -> list[EdgePolicy]:
    subsets = itertools.chain.from_iterable(itertools.combinations(Level, size) for size in range(len(Level) + 1))
    policies = [
        EdgePolicy(allow=frozenset(allow), route=route, judge=judge)
        for allow in subsets
        for route in (None, Route.CACHE, Route.TEXT)
        for judge in (False, True)
    ]
    return policies + [EdgePolicy(route=route, max_context_tokens=100) for route in (None, Route.CACHE, Route.TEXT)]


def every_fact() -> list[Facts]:
    """Long and short handles, in the pool, gone from it and in between, here and elsewhere, with and without rates."""
    return [
        Facts(num_tokens, cached, move_bytes, text_tokens, rates, first, refusal)
        for num_tokens in (100, 400)
        for cached in (0, 40, num_tokens)
        if cached != 40 or num_tokens == 400
        for move_bytes in ((0, 10_000_000) if cached else (0,))
        for text_tokens in (None, 10)
        for rates in (Rates(), Rates(0.0, 1e6), SLOW, FAST)
        for first in (True, False)
        for refusal in ("", "it has recurrent layers")
    ]


def outcome(compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> RouteDecision | None:
    try:
        return choose(compatibility, policy, facts)
    except RouteError:
        return None


@pytest.fixture(scope="module")
def table() -> list[tuple[Compatibility, EdgePolicy, Facts, RouteDecision | None]]:
    rows = itertools.product((EXACT, SIBLING, FOREIGN), every_policy(), every_fact())
    return [(*row, outcome(*row)) for row in rows]


Table = list[tuple[Compatibility, EdgePolicy, Facts, RouteDecision | None]]


def test_the_table_has_every_code(table: Table) -> None:
    assert len(table) == 3 * len(every_policy()) * len(every_fact()) > 100_000
    assert {decision.code for *_, decision in table if decision} == {
        "same_model",
        "cheaper",
        "forced",
        "other_model",
        "not_first",
        "not_appendable",
        "not_allowed",
    }


def test_no_level_or_route_is_ever_taken_that_the_policy_does_not_allow(table: Table) -> None:
    """Law 7. A judge gets level 0 or text."""
    for _, policy, _, decision in table:
        if decision is None:
            continue
        assert decision.level in policy.allow
        assert not policy.judge or decision.level in (Level.EXACT, Level.TEXT)
        assert policy.route in (None, decision.route)
        assert (decision.route is Route.CACHE) == (decision.level is Level.EXACT)
        assert (decision.route is Route.TEXT) == (decision.level is Level.TEXT)


def test_a_cache_is_continued_only_where_it_works(table: Table) -> None:
    for compatibility, _, facts, decision in table:
        if decision is not None and decision.route is Route.CACHE:
            assert compatibility is EXACT
            assert facts.first
            assert not facts.append_refusal


def test_an_option_that_works_and_is_allowed_is_never_refused(table: Table) -> None:
    """And too long a handle always is."""
    for compatibility, policy, facts, decision in table:
        too_long = policy.max_context_tokens is not None and facts.num_tokens > policy.max_context_tokens
        text = Level.TEXT in policy.levels and policy.route is not Route.CACHE
        works = compatibility is EXACT and facts.first and not facts.append_refusal
        cache = works and Level.EXACT in policy.levels and policy.route is not Route.TEXT
        assert (decision is None) == (too_long or not (text or cache))


def test_text_is_taken_only_where_no_cache_can_be_or_it_is_clearly_cheaper(table: Table) -> None:
    """No silent fallback: the code says which, and level 0 wins ties."""
    for compatibility, policy, facts, decision in table:
        if decision is None or decision.route is not Route.TEXT or decision.code != "cheaper":
            continue
        without_text = dataclasses.replace(policy, allow=policy.allow - {Level.TEXT})
        exact = choose(compatibility, without_text, facts)
        assert decision.estimated is not None
        assert exact.estimated is not None
        assert decision.estimated.seconds is not None
        assert exact.estimated.seconds is not None
        assert decision.estimated.seconds < (1 - MARGIN) * exact.estimated.seconds
        assert str(decision.estimated) in decision.reason
        assert str(exact.estimated) in decision.reason


def test_costs_decide_between_options_only_where_both_are_known(table: Table) -> None:
    for _, _, facts, decision in table:
        if decision is None or decision.code != "cheaper":
            continue
        assert facts.rates.prefill_tokens_per_s
        assert facts.rates.move_bytes_per_s or not facts.move_bytes or not facts.cached_tokens
        assert facts.move_bytes or facts.cached_tokens < facts.num_tokens


def test_what_is_in_place_is_continued_whatever_the_rates(table: Table) -> None:
    for compatibility, policy, facts, decision in table:
        in_place = facts.cached_tokens == facts.num_tokens and not facts.move_bytes
        if in_place and decision is not None and decision.code in ("same_model", "cheaper"):
            assert decision.route is Route.CACHE
            assert decision.estimated == Cost(0, 0.0, 0)
            assert choose(compatibility, policy, facts._replace(rates=Rates(1.0, 1.0), text_tokens=1)) == decision


def test_an_estimate_is_of_the_option_that_is_taken(table: Table) -> None:
    for _, _, facts, decision in table:
        if decision is None:
            continue
        cost = decision.estimated
        assert cost is not None
        if decision.route is Route.TEXT:
            assert cost == facts.rates.cost(facts.num_tokens if facts.text_tokens is None else facts.text_tokens)
        elif decision.code == "cheaper" or not facts.cached_tokens:
            assert cost == facts.rates.cost(facts.num_tokens)
        else:
            assert cost == facts.rates.cost(facts.num_tokens - facts.cached_tokens, facts.move_bytes)


def test_the_choice_goes_by_the_refusals_that_are_explained(table: Table) -> None:
    for compatibility, policy, facts, _ in table[::11]:
        option, code, _ = choose_option(compatibility, policy, facts)
        possible = [each for each in OPTIONS if not each.refusal(compatibility, policy, facts)]
        assert option in possible or (option is None and not possible)
        if option is not None and option.route is Route.TEXT:
            assert (code == "cheaper") == any(each.route is Route.CACHE for each in possible)


def test_where_there_are_no_rates_the_best_level_wins() -> None:
    for facts in every_fact():
        unmeasured = facts._replace(rates=Rates(), first=True, append_refusal="")
        assert choose(EXACT, EdgePolicy(), unmeasured).code == "same_model"


def test_a_short_context_far_away_is_computed_again_and_a_long_one_near_is_moved() -> None:
    short = choose(EXACT, EdgePolicy(), Facts(100, 100, 10_000_000, rates=SLOW))
    assert (short.route, short.level, short.code, short.estimated) == (
        Route.CACHE,
        Level.EXACT,
        "cheaper",
        Cost(100, 0.1, 0),
    )
    assert "100 tokens to prefill, about 100 ms" in short.reason
    assert "10.0 MB to move, about 10.00 s" in short.reason
    moved = choose(EXACT, EdgePolicy(), Facts(400, 400, 10_000_000, rates=FAST))
    assert moved.code == "same_model"
    assert moved.estimated is not None
    assert moved.estimated.move_bytes == 10_000_000


@pytest.mark.parametrize("cached", [0, 400])
def test_a_short_text_is_re_read_instead_of_a_long_cache_that_is_gone_or_slow_to_move(cached: int) -> None:
    facts = Facts(400, cached, 10_000_000 if cached else 0, 40, SLOW)
    text = choose(EXACT, EdgePolicy(), facts)
    assert (text.route, text.level, text.code, text.estimated) == (
        Route.TEXT,
        Level.TEXT,
        "cheaper",
        Cost(40, 0.04),
    )
    assert "40 tokens to prefill, about 40 ms" in text.reason
    assert "400 tokens to prefill, about 400 ms" in text.reason
    for policy in (EdgePolicy(allow=frozenset({Level.EXACT})), EdgePolicy(route=Route.CACHE)):
        assert choose(EXACT, policy, facts).level is Level.EXACT


@pytest.mark.parametrize(("text_tokens", "route"), [(400, Route.CACHE), (365, Route.CACHE), (355, Route.TEXT)])
def test_level_0_wins_ties_and_small_gains(text_tokens: int, route: Route) -> None:
    assert choose(EXACT, EdgePolicy(), Facts(400, text_tokens=text_tokens, rates=SLOW)).route is route


def test_a_choice_changes_once_at_most_while_a_rate_rises() -> None:
    """Faster moving never turns against moving, faster reading never turns to it."""
    scale = [10.0**power for power in range(-3, 10)]
    for facts in every_fact():
        if not facts.move_bytes or not facts.first or facts.append_refusal:
            continue
        for fixed in scale:
            by_move = [choose(EXACT, EdgePolicy(), facts._replace(rates=Rates(fixed, rate))) for rate in scale]
            by_prefill = [choose(EXACT, EdgePolicy(), facts._replace(rates=Rates(rate, fixed))) for rate in scale]
            for decisions, starts, ends in ((by_move, False, True), (by_prefill, True, False)):
                moves = [bool(decision.estimated and decision.estimated.move_bytes) for decision in decisions]
                turns = [(a, b) for a, b in itertools.pairwise(moves) if a != b]
                assert turns in ([], [(starts, ends)])


def test_too_long_a_handle_is_refused_on_every_route_with_both_numbers_and_a_way_out() -> None:
    """Field case 69: a cache grows along a chain without bound."""
    for route, compatibility in itertools.product((None, Route.CACHE, Route.TEXT), (EXACT, FOREIGN)):
        policy = EdgePolicy(route=route, max_context_tokens=1_500)
        with pytest.raises(RouteError, match=r"1,501 tokens.*at most 1,500.*max_context_tokens"):
            choose(compatibility, policy, Facts(1_501))
    assert choose(EXACT, EdgePolicy(max_context_tokens=1_500), Facts(1_500)).route is Route.CACHE


def test_a_model_whose_cache_can_not_be_appended_to_gets_text_and_the_reason() -> None:
    facts = Facts(10, 10, append_refusal="it has recurrent layers")
    decision = choose(EXACT, EdgePolicy(), facts)
    assert (decision.route, decision.code) == (Route.TEXT, "not_appendable")
    assert "recurrent" in decision.reason
    with pytest.raises(RouteError, match="recurrent"):
        choose(EXACT, EdgePolicy(route=Route.CACHE), facts)


# -- rates ---------------------------------------------------------------------------------------------------------


def test_a_cost_has_seconds_only_where_every_rate_it_takes_is_known() -> None:
    assert Rates().cost(0) == Cost(0, 0.0)
    assert Rates().cost(5) == Cost(5, None)
    assert Rates(100.0).cost(5) == Cost(5, 0.05)
    assert Rates(100.0).cost(5, 7) == Cost(5, None, 7)
    assert Rates(0.0, 70.0).cost(0, 7) == Cost(0, 0.1, 7)
    assert Rates(100.0, 70.0).cost(5, 7).seconds == pytest.approx(0.15)


def test_a_meter_follows_what_it_measures_and_forgets() -> None:
    meter = RateMeter()
    assert meter.rates == Rates()
    for _ in range(10):
        meter.add_prefill(4096, 2.0)
    assert meter.rates.prefill_tokens_per_s == pytest.approx(2048)
    for _ in range(40):
        meter.add_prefill(4096, 1.0)
    assert meter.rates.prefill_tokens_per_s == pytest.approx(4096, rel=0.01)
    assert meter.rates.move_bytes_per_s == 0
    meter.add_move(1000, 0.5)
    assert meter.rates.move_bytes_per_s == pytest.approx(2000)


def test_short_prefills_change_a_rate_little_or_not_at_all() -> None:
    meter = RateMeter()
    meter.add_prefill(MIN_TOKENS - 1, 1.0)
    assert meter.rates == Rates()
    meter.add_prefill(4096, 1.0)
    meter.add_prefill(MIN_TOKENS, 0.05)
    assert meter.rates.prefill_tokens_per_s == pytest.approx(4096, rel=0.1)


def test_a_clock_that_stands_still_gives_no_rate() -> None:
    meter = RateMeter()
    meter.add_move(1000, 0.0)
    assert meter.rates == Rates()


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
    assert decision.estimated == Cost(0, 0.0)
    assert decision.actual is None
    assert (both.estimated, both.actual) == (Cost(16), Cost(17, 0.5))
    assert both.route is decision.route


def test_a_cache_that_failed_becomes_a_decision_for_text_that_says_why() -> None:
    failed = choose(EXACT, EdgePolicy()).failed(MemoryError("no room"))
    assert (failed.route, failed.level, failed.code) == (Route.TEXT, Level.TEXT, "failed")
    assert "no room" in failed.reason
    assert failed.compatibility is EXACT


def test_every_code_is_documented_once_with_what_it_means_and_what_to_do() -> None:
    rows = [line.strip("| ").split(" | ") for line in (codes.__doc__ or "").splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(get_args(DecisionCode))
    assert all(len(row) == 3 and all(row) for row in rows)


def test_every_code_that_a_decision_can_have_is_a_known_one_and_the_other_way_round(
    table: Table, tiny_chat: ChatLatent
) -> None:
    moved = EdgePolicy(allow=ALL)
    given = [decision for *_, decision in table if decision] + [
        choose(EXACT, moved, Facts(9, 9, level=Level.MOVED)),
        choose(EXACT, moved, Facts(9, 9, level=Level.MOVED, move_refusal="no rope")),
        choose(EXACT, moved, Facts(9, 9, has_latent_steps=True)),
        choose(EXACT, EdgePolicy(), Facts(9, unproven_tokens=9)),
        choose(EXACT, EdgePolicy()).failed(MemoryError()),
        choose(EXACT, EdgePolicy()).diverged(3, 3, 9),
    ]
    replies = [tiny_chat.invoke(REPORT), tiny_chat.invoke(REPORT)]
    found = {decision.code for decision in given} | {routed(reply)[2] for reply in replies}
    found.add(choose_option(EXACT, EdgePolicy(max_context_tokens=1), Facts(2)).code)
    assert found == set(get_args(DecisionCode))


# -- in a workspace ------------------------------------------------------------------------------------------------


@pytest.fixture
def other_chat(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> ChatLatent:
    """Another model: equal geometry, other weights."""
    return ChatLatent(model=str(tiny_folder("llama", seed=1)), workspace=ws, max_tokens=12)


@pytest.fixture
def far_chat(tiny_chat: ChatLatent, monkeypatch: pytest.MonkeyPatch) -> ChatLatent:
    """The tiny llama once more, as if on another device: what it is to use must be copied first."""
    chat = ChatLatent(model=tiny_chat.model, workspace=tiny_chat.workspace, max_tokens=12, device="cpu:0")
    near = tiny_chat.resident()
    assert chat.resident() is not near
    here: dict[int, Any] = {}

    def bytes_elsewhere(state: KVState, devices: Any) -> int:
        return 0 if devices is near.devices or id(state.buffer) in here else state.nbytes

    def to(state: KVState, devices: Any) -> KVState:
        layers = [tuple(tensor.clone() for tensor in layer) for layer in state.layers()]
        copied = KVState.from_layers(state.kinds, layers, state.num_tokens)
        here[id(copied.buffer)] = copied.buffer
        return copied

    monkeypatch.setattr(KVState, "bytes_elsewhere", bytes_elsewhere)
    monkeypatch.setattr(KVState, "to", to)
    return chat


def measured(ws: LatentWorkspace, chat: ChatLatent, rates: Rates) -> None:
    """As if a chat model's rates had been measured."""
    ws.models._meters[chat.resident()].rates = rates


def routed(reply: Any) -> tuple[str, int, str]:
    route = reply.response_metadata["kv_route"]
    return route["route"], route["level"], route["code"]


def kinds(ws: LatentWorkspace, kind: type[Any]) -> list[Any]:
    return [event for event in ws.tracer.events if isinstance(event, kind)]


def test_rates_are_measured_by_prefills_and_kept_per_model(
    tiny_chat: ChatLatent, other_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    assert ws.models.rates(tiny_chat.resident()) == ws.models.rates(other_chat.resident()) == Rates()
    tiny_chat.read(REPORT)
    (event,) = kinds(ws, Prefilled)
    rate = ws.models.rates(tiny_chat.resident()).prefill_tokens_per_s
    assert rate == pytest.approx(event.num_tokens / event.duration_s)
    assert ws.models.rates(other_chat.resident()) == Rates()
    tiny_chat.read(REPORT)  # nothing is fed, nothing is learnt
    rate = ws.models.rates(tiny_chat.resident()).prefill_tokens_per_s
    assert rate == pytest.approx(event.num_tokens / event.duration_s)


def test_an_evicted_handle_is_rebuilt_and_costs_what_was_estimated(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    doc = tiny_chat.read(REPORT)
    first = tiny_chat.invoke("who?", inherit=doc)
    ws.evict(doc)
    ws.evict(ws.handle(first))
    estimated = ws.explain(doc, tiny_chat).decision
    assert estimated is not None
    assert estimated.estimated is not None
    assert estimated.estimated.prefill_tokens == doc.num_tokens
    reply = tiny_chat.invoke("who?", inherit=doc)
    assert routed(reply) == ("cache", 0, "same_model")
    assert "gone" in reply.response_metadata["kv_route"]["reason"]
    assert [event.num_tokens for event in kinds(ws, Rebuilt)] == [doc.num_tokens]
    assert reply.text == first.text


def test_an_evicted_handle_written_under_other_tools_is_re_read_where_that_is_shorter(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Its tokens can't stay as they are; the answer is that of the text run."""
    chat = ChatLatent(model=str(tiny_folder("llama", template=TOOLS)), workspace=ws, max_tokens=8)
    tools = [{"name": f"tool_{number}", "description": REPORT, "parameters": {}} for number in range(3)]
    reply = chat.bind_tools(tools).invoke(REPORT)
    handle = ws.handle(reply)
    num_text_tokens = chat.get_num_tokens_from_messages([HumanMessage(REPORT)])
    assert handle.num_tokens > 2 * num_text_tokens
    ws.evict(handle)
    measured(ws, chat, Rates(1000.0, 1e9))
    explained = ws.explain(handle, chat, template_inputs=TemplateInputs()).decision
    again = chat.invoke("who?", inherit=handle)
    assert routed(again) == ("text", 4, "cheaper")
    assert explained is not None
    assert (explained.code, explained.reason) == ("cheaper", again.response_metadata["kv_route"]["reason"])
    with LatentWorkspace(memory="1GiB") as fresh:
        alone = ChatLatent(model=chat.model, workspace=fresh, max_tokens=8)
        assert again.text == alone.invoke([("human", REPORT), reply, ("human", "who?")]).text


def test_a_cache_elsewhere_is_moved_when_nothing_is_known_then_measured(
    tiny_chat: ChatLatent, far_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    doc = tiny_chat.read(REPORT)
    reply = far_chat.invoke("who?", inherit=doc)
    assert routed(reply) == ("cache", 0, "same_model")
    (moved,) = kinds(ws, Moved)
    assert (moved.num_tokens, moved.nbytes) == (doc.num_tokens, doc.nbytes)
    assert ws.models.rates(far_chat.resident()).move_bytes_per_s == pytest.approx(moved.nbytes / moved.duration_s)
    assert not ws.models.rates(tiny_chat.resident()).move_bytes_per_s
    assert kinds(ws, Delivered)[-1].cache_read == doc.num_tokens
    assert reply.text == tiny_chat.invoke("who?", inherit=doc).text


def test_a_short_cache_that_is_slow_to_move_is_computed_again(
    tiny_chat: ChatLatent, far_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    doc = tiny_chat.read(REPORT)
    measured(ws, far_chat, Rates(1000.0, 1.0))
    reply = far_chat.invoke("who?", inherit=doc)
    assert routed(reply) == ("cache", 0, "cheaper")
    assert kinds(ws, Moved) == []
    assert [event.num_tokens for event in kinds(ws, Rebuilt)] == [doc.num_tokens]
    assert reply.usage_metadata is not None
    assert reply.usage_metadata["input_token_details"]["cache_read"] == 0
    assert reply.text == tiny_chat.invoke("who?", inherit=doc).text


@pytest.mark.parametrize("rates", [Rates(), Rates(1000.0, 1e12), Rates(1e9, 1.0)])
def test_a_prefix_elsewhere_is_moved_by_the_same_rule_without_a_handle(
    tiny_chat: ChatLatent, far_chat: ChatLatent, ws: LatentWorkspace, rates: Rates
) -> None:
    doc = tiny_chat.read(REPORT)
    measured(ws, far_chat, rates)
    reply = far_chat.invoke([("human", REPORT), ("human", "who?")])
    is_moved = rates.move_bytes_per_s != 1.0
    assert [event.num_tokens for event in kinds(ws, Moved)] == ([doc.num_tokens] if is_moved else [])
    assert routed(reply)[0] == ("cache" if is_moved else "text")


@pytest.mark.parametrize("on_failure", ["fall_back", "raise"])
def test_a_move_that_fails_is_re_read_and_reported_or_raised(
    tiny_chat: ChatLatent,
    far_chat: ChatLatent,
    ws: LatentWorkspace,
    monkeypatch: pytest.MonkeyPatch,
    on_failure: Any,
) -> None:
    def full(state: KVState, devices: Any) -> KVState:
        raise RuntimeError("out of memory")

    doc = tiny_chat.read(REPORT)
    monkeypatch.setattr(KVState, "to", full)
    ws.router.default = EdgePolicy(on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(RuntimeError, match="out of memory"):
            far_chat.invoke("who?", inherit=doc)
        return
    reply = far_chat.invoke("who?", inherit=doc)
    assert routed(reply) == ("text", 4, "failed")
    (fell,) = kinds(ws, FellBack)
    assert (fell.handle, fell.from_route, fell.to_route) == (doc.id, "cache", "text")
    assert reply.text == tiny_chat.invoke("who?", inherit=doc).text


def test_too_long_a_handle_is_refused_before_anything_is_computed(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    doc = tiny_chat.read(REPORT)
    ws.router.default = EdgePolicy(max_context_tokens=doc.num_tokens - 1)
    before = len(kinds(ws, Prefilled))
    with pytest.raises(RouteError, match=f"{doc.num_tokens} tokens.*at most {doc.num_tokens - 1}"):
        tiny_chat.invoke("who?", inherit=doc)
    assert len(kinds(ws, Prefilled)) == before
    ws.router.default = EdgePolicy(max_context_tokens=doc.num_tokens)
    assert tiny_chat.invoke("who?", inherit=doc).text


# -- explanations --------------------------------------------------------------------------------------------------

SITUATIONS = list(
    itertools.product(
        ["same", "other", "far"],
        [
            EdgePolicy(),
            EdgePolicy(route=Route.TEXT),
            EdgePolicy(route=Route.CACHE),
            EdgePolicy(allow=frozenset({Level.TEXT})),
            EdgePolicy(allow=frozenset({Level.EXACT}), judge=True),
            EdgePolicy(max_context_tokens=3),
        ],
        ["kept", "evicted"],
        [Rates(), Rates(1000.0, 1.0), Rates(1.0, 1e12)],
    )
)


@pytest.mark.parametrize(("who", "policy", "where", "rates"), SITUATIONS)
def test_an_explanation_is_the_decision_that_is_taken_then(
    request: pytest.FixtureRequest,
    tiny_chat: ChatLatent,
    ws: LatentWorkspace,
    who: str,
    policy: EdgePolicy,
    where: str,
    rates: Rates,
) -> None:
    receiver = tiny_chat if who == "same" else request.getfixturevalue(f"{who}_chat")
    doc = tiny_chat.read(REPORT)
    if where == "evicted":
        ws.evict(doc)
    measured(ws, receiver, rates)
    ws.router.policies[("*", "")] = policy
    num_events = len(ws.tracer.events)
    explanation = ws.explain(doc, receiver)
    assert len(ws.tracer.events) == num_events
    assert repr(explanation) == explanation
    decision = explanation.decision
    if decision is None:
        with pytest.raises(RouteError) as caught:
            receiver.invoke("who?", inherit=doc)
        assert str(caught.value) in explanation
        return
    reply = receiver.invoke("who?", inherit=doc)
    assert decision.to_dict() == reply.response_metadata["kv_route"]
    (event,) = kinds(ws, Routed)
    assert (event.route, event.code, event.reason) == (decision.route.value, decision.code, decision.reason)
    assert f"{decision.code}: {decision.reason}" in explanation
    assert bool(kinds(ws, Moved)) == bool(decision.estimated and decision.estimated.move_bytes)


def test_an_explanation_holds_the_whole_reasoning(
    tiny_chat: ChatLatent, other_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    ws.router.policies[("*", "judge")] = EdgePolicy(judge=True, max_context_tokens=9_000)
    doc = tiny_chat.read(REPORT)
    text = ws.explain(doc, other_chat, node="judge")
    for spec in (tiny_chat.spec, other_chat.spec):
        assert spec.identity in text
        assert spec.name in text
    assert "weights differs" in text
    assert "('*', 'judge')" in text
    assert "for a judge" in text
    assert "9,000" in text
    assert f"{doc.num_tokens} tokens, 0 of them in the pool" in text
    for option in ("deliver", "rebuild", "re-read"):
        assert any(line.startswith(option) for line in text.splitlines())
    assert text.count("can't be taken") == 2
    assert text.count("; taken") == 1
    assert "tokens/s" in ws.explain(doc, tiny_chat)
    assert "the router's default" in ws.explain(doc, tiny_chat)


def test_a_spec_is_explained_like_the_chat_model_that_has_it(
    tiny_chat: ChatLatent, other_chat: ChatLatent, ws: LatentWorkspace
) -> None:
    doc = tiny_chat.read(REPORT)
    for chat in (tiny_chat, other_chat):
        assert ws.explain(doc, chat.spec) == ws.explain(doc, chat)
    stranger = dataclasses.replace(tiny_chat.spec, name="not/here", weights="f" * 64)
    assert "not/here" in ws.explain(doc, stranger)


def test_a_second_handle_is_explained_as_one(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    explanation = ws.explain(tiny_chat.read(REPORT), tiny_chat, first=False)
    assert explanation.decision is not None
    assert explanation.decision.code == "not_first"
    assert "after another handle" in explanation


def by_itself(handle: KVHandle, receiver: ModelSpec) -> Situation:
    """What is known of an edge without a workspace."""
    return Situation(handle.model, receiver, by_identity(handle.model, receiver), facts_of(handle, receiver))


def test_a_router_without_a_workspace_explains_what_can_be_known(tiny_chat: ChatLatent) -> None:
    doc = tiny_chat.read(REPORT)
    explanation = explain(EdgeRouter(), doc, by_itself(doc, tiny_chat.spec))
    assert isinstance(explanation, Explanation)
    assert explanation.decision is not None
    assert explanation.decision.route is Route.CACHE
    assert "not measured yet" in explanation
    stranger = KVHandle.root("f" * 32).extend("prompt", "a", doc.tokens, doc.messages, 1)
    other = dataclasses.replace(tiny_chat.spec, weights="f" * 64)
    assert "unknown model" in str(explain(EdgeRouter(), doc, by_itself(doc, other)))
    refused = explain(EdgeRouter(), stranger, by_itself(stranger, tiny_chat.spec)).decision
    assert refused is not None
    assert refused.code == "other_model"


def test_one_of_two_workspaces_asks_the_one_of_the_chat_model(tiny_folder: Callable[..., Path]) -> None:
    router = EdgeRouter()
    with LatentWorkspace(router=router) as first, LatentWorkspace(router=router) as second:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=first)
        doc = chat.read(REPORT)
        assert f"{doc.num_tokens} of them in the pool" in second.explain(doc, chat)


def test_what_is_refused_in_use_is_refused_in_an_explanation(tiny_chat: ChatLatent, ws: LatentWorkspace) -> None:
    stranger = KVHandle.root(tiny_chat.spec.identity, "somebody").extend("prompt", "", b"\0" * 8, [], 1)
    with pytest.raises(TenantError):
        ws.explain(stranger, tiny_chat)


# -- what a template leaves of a handle --------------------------------------------------------------------------


def get_weather(city: str) -> str:
    """The weather in a city."""
    return city


STRICT = (
    EdgePolicy(allow=frozenset({Level.EXACT}), on_failure="raise"),
    EdgePolicy(allow=frozenset({Level.EXACT})),
    EdgePolicy(route=Route.CACHE),
)


@pytest.mark.parametrize("policy", STRICT)
def test_an_edge_that_forbids_text_is_refused_where_tools_rewrite_the_prompt(
    tiny_folder: Callable[..., Path], policy: EdgePolicy
) -> None:
    """One token stays of what was read without tools: that is no cache edge, and text is not allowed."""
    with LatentWorkspace(router=EdgeRouter(default=policy)) as ws:
        chat = ChatLatent(model=str(tiny_folder("llama")), workspace=ws, max_tokens=4)
        doc = chat.read("the team that reads the report hands over what it knows")
        assert chat.invoke("and?", inherit=doc).response_metadata["kv_route"]["level"] == 0
        with pytest.raises(RouteError, match=r"1 of \d+ tokens stay.*re-read as text.*Allow Level.TEXT"):
            chat.bind_tools([get_weather]).invoke("and?", inherit=doc)
        ws.evict(doc)
        assert chat.invoke("and?", inherit=doc).response_metadata["kv_route"]["level"] == 0


def test_an_edge_is_a_cache_edge_from_half_of_its_handle_on(tiny_folder: Callable[..., Path]) -> None:
    """The template cuts the last message it has read once another follows: more stays, the longer the first one is."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last or loop.first else m['content'][:3] }}<|im_end|>\n{% endfor %}"
    )
    levels = set()
    with LatentWorkspace() as ws:
        chat = ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=4)
        for size in range(0, 200, 20):
            doc = chat.read([SystemMessage("x" * size), HumanMessage("x" * 100)])
            for is_gone in (False, True):
                if is_gone:
                    ws.pool.clear()
                reply = chat.invoke("and?", inherit=doc)
                route = reply.response_metadata["kv_route"]
                diverged = [each for each in ws.tracer.events if isinstance(each, Diverged)][-1]
                is_half = 2 * diverged.num_tokens >= doc.num_tokens and not is_gone
                assert (route["route"], route["level"]) == (("cache", 0) if is_half else ("text", 4))
                assert route["code"] == "diverged"
                levels.add(route["level"])
    assert levels == {0, 4}
