"""Which way a handle is served. `choose` is pure: a compatibility, a policy and facts in, a decision out.

It knows no tensors, no pool and no graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from langgraph_latent import public
from langgraph_latent.errors import RouteError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.router.codes import DecisionCode
from langgraph_latent.router.composed import needs_packed_attention
from langgraph_latent.router.policy import EdgePolicy, Route, names_of
from langgraph_latent.router.rates import Cost, Rates
from langgraph_latent.spec.compat import Compatibility, Difference, Level
from langgraph_latent.spec.spec import ModelSpec

UNPROVEN = "its cache came from outside and is not proven: it may differ from what its tokens give"
MARGIN = 0.1
"""By what part of its time an option must be cheaper to be taken instead of a better one."""


class Facts(NamedTuple):
    """What is known of one hand-over before it is decided.

    Attributes:
        num_tokens: of the handle.
        cached_tokens: of those, the ones whose tensors are in the pool now.
        move_bytes: bytes of these tensors that are on another device than the receiver; 0 where all are in place.
        text_tokens: of the handle's messages, rendered again; None where not counted: about as many as the handle has.
        rates: measured where the receiver runs.
        first: False for a handle that comes after another one, so that its cache can't be continued.
        append_refusal: why nothing can be appended to a cache of the receiver, "" where it can.
        level: EXACT, or MOVED for a handle whose cache is composed of moved blocks.
        move_refusal: why the receiver can't make a composed cache, "" where it can or need not.
        has_latent_steps: whether there are latent steps in the handle.
        latent_steps_refusal: why they are not to be used, "" where they may be.
        unproven_tokens: of the handle, those whose tensors came from outside and are not proven.
    """

    num_tokens: int = 0
    cached_tokens: int = 0
    move_bytes: int = 0
    text_tokens: int | None = None
    rates: Rates = Rates()
    first: bool = True
    append_refusal: str = ""
    level: Level = Level.EXACT
    move_refusal: str = ""
    has_latent_steps: bool = False
    latent_steps_refusal: str = ""
    unproven_tokens: int = 0

    def under(self, policy: EdgePolicy) -> Facts:
        """The facts on an edge: what is not proven counts as there where level 1 is allowed, and stands in the way of
        a cache where the messages can be read instead."""
        if self.unproven_tokens <= self.cached_tokens:
            return self._replace(unproven_tokens=0)
        if Level.MOVED in policy.levels:
            return self._replace(cached_tokens=self.unproven_tokens, level=max(self.level, Level.MOVED))
        return self if policy.may_read and not self.has_latent_steps else self._replace(unproven_tokens=0)


class Situation(NamedTuple):
    """What an edge is decided from. `sender` is its model's spec, or the digest where no more is known."""

    sender: ModelSpec | str
    receiver: ModelSpec
    compatibility: Compatibility
    facts: Facts


@dataclass(frozen=True)
@public
class RouteDecision:
    """How an edge is served and why. `code` is for programs (`router/codes.py`), `reason` for people."""

    route: Route
    level: Level
    code: DecisionCode
    reason: str
    compatibility: Compatibility | None = None
    estimated: Cost | None = None
    actual: Cost | None = None

    def to_dict(self) -> dict[str, Any]:
        """Route, level, code and reason as plain data, for `response_metadata`."""
        return {"route": self.route.value, "level": int(self.level), "code": self.code, "reason": self.reason}

    def failed(self, error: BaseException) -> RouteDecision:
        """The decision to re-read after a delivered cache failed in use."""
        reason = f"the cache could not be used: {type(error).__name__}: {error}"
        return RouteDecision(Route.TEXT, Level.TEXT, "failed", reason, self.compatibility)

    def unproven(self) -> RouteDecision:
        """The decision where what is continued came from outside and is not proven."""
        return replace(self, level=max(self.level, Level.MOVED), code="unproven", reason=UNPROVEN)

    def diverged(self, num_kept: int, num_reused: int, num_inherited: int, crop_refusal: str = "") -> RouteDecision:
        """The decision where the rendered prompt keeps only the first tokens of what is inherited.

        Fewer are reused than stay where no state ends there and none can be cropped to it; `crop_refusal` says why. An
        edge on which less than half is reused is a text edge.
        """
        reason = f"the template rewrites what is inherited: {num_kept} of {num_inherited} tokens stay"
        if num_reused < num_kept:
            reason += f", {num_reused} are reused" + (f": {crop_refusal}" if crop_refusal else "")
        if 2 * num_reused < num_inherited:
            return RouteDecision(Route.TEXT, Level.TEXT, "diverged", reason, self.compatibility)
        return replace(self, code="diverged", reason=reason)


class ServingOption(ABC):
    """One way to serve a handle: a stateless value. A new one is a class here and a row in `OPTIONS`.

    Attributes:
        name: heads its line in an explanation.
        route, level: what a decision for it says; the handle may lower the level, see `level_of`.
        doing: names it in a comparison of costs.
    """

    name: ClassVar[str]
    route: ClassVar[Route]
    level: ClassVar[Level]
    doing: ClassVar[str]

    def level_of(self, facts: Facts) -> Level:
        """What it promises of a handle."""
        return max(self.level, facts.level, Level.MOVED if facts.has_latent_steps else Level.EXACT)

    @abstractmethod
    def cost(self, facts: Facts) -> Cost:
        """What it would take, without seconds where a rate is not known."""

    @abstractmethod
    def refusal(self, compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> str:
        """Why it can't be taken; "" where it can. A handle that is too long for the policy is refused by all."""


class Rebuild(ServingOption):
    """The handle's cache is computed again from its provenance."""

    name, route, level, doing = "rebuild", Route.CACHE, Level.EXACT, "computing its cache again"

    def cost(self, facts: Facts) -> Cost:
        return facts.rates.cost(facts.num_tokens)

    def refusal(self, compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> str:
        if too_long := policy.length_refusal(facts.num_tokens):
            return too_long
        obstacle = cache_obstacle(compatibility, policy, facts)
        return obstacle.reason if obstacle else ""


class Deliver(Rebuild):
    """What the pool has of the handle's cache is moved to the receiver where need be; the rest is computed again."""

    name, doing = "deliver", "taking its cache"

    def cost(self, facts: Facts) -> Cost:
        return facts.rates.cost(facts.num_tokens - facts.cached_tokens, facts.move_bytes)

    def refusal(self, compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> str:
        is_gone = "" if facts.cached_tokens else "its tensors are not in the pool"
        return super().refusal(compatibility, policy, facts) or is_gone


class Reread(ServingOption):
    """The handle's messages are rendered and read as text. Its cost is an estimate: the prompt is not written yet."""

    name, route, level, doing = "re-read", Route.TEXT, Level.TEXT, "re-reading its messages"

    def cost(self, facts: Facts) -> Cost:
        return facts.rates.cost(facts.num_tokens if facts.text_tokens is None else facts.text_tokens)

    def refusal(self, compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> str:
        return policy.length_refusal(facts.num_tokens) or policy.text_refusal


OPTIONS: tuple[ServingOption, ...] = (Deliver(), Rebuild(), Reread())
"""The best first: a later one is taken where those before it are refused or clearly dearer."""


class Obstacle(NamedTuple):
    """Why a receiver can't continue a handle's cache."""

    code: DecisionCode
    reason: str


class Choice(NamedTuple):
    """The option that is taken, None where there is none, with a code for programs and a reason for people."""

    option: ServingOption | None
    code: DecisionCode
    reason: str


def choose(compatibility: Compatibility, policy: EdgePolicy, facts: Facts = Facts()) -> RouteDecision:  # noqa: B008
    """The best route that works and that the policy allows. Raises `RouteError` where there is none."""
    facts = facts.under(policy)
    option, code, reason = choose_option(compatibility, policy, facts)
    if option is None:
        raise RouteError(reason)
    return RouteDecision(option.route, option.level_of(facts), code, reason, compatibility, option.cost(facts))


def choose_option(compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> Choice:
    """The option that `choose` takes: the best possible one, unless another is known to be clearly cheaper."""
    if too_long := policy.length_refusal(facts.num_tokens):
        return Choice(None, "too_long", too_long)
    possible = (option for option in OPTIONS if not option.refusal(compatibility, policy, facts))
    best = next(possible, None)
    if best is None or best.route is Route.TEXT:
        obstacle = cache_obstacle(compatibility, policy, facts)
        assert obstacle is not None
        reason = obstacle.reason if best else _no_route(compatibility, policy, facts, obstacle.reason)
        return Choice(best, obstacle.code, reason)
    options = [best, *possible] if best.cost(facts).seconds else [best]  # nothing is cheaper than no time
    taken = _cheapest(options, facts)
    if taken.route is Route.CACHE and facts.unproven_tokens:
        return Choice(taken, "unproven", f"same model, but {UNPROVEN}")
    if taken.route is Route.CACHE and facts.level is Level.MOVED:
        return Choice(taken, "composed", "same model: its cache is composed of moved blocks and continued")
    if taken is not best:
        other = _cheapest(options[: options.index(taken)], facts)
        return Choice(taken, "cheaper", _cheaper(taken, other, facts))
    how = "continued" if facts.cached_tokens else "gone and is computed again"
    return Choice(taken, "same_model", f"same model: its cache is {how}")


def is_cheaper(option: ServingOption, other: ServingOption, facts: Facts) -> bool:
    """Whether an option is known to take less time than another, by more than the margin."""
    seconds, others = option.cost(facts).seconds, other.cost(facts).seconds
    return seconds is not None and others is not None and seconds < (1 - MARGIN) * others


def cache_obstacle(compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> Obstacle | None:
    """Why the receiver can't continue the handle's cache; None where it can."""
    if policy.route is Route.TEXT:
        return Obstacle("forced", "the edge's policy forces text")
    if compatibility.level is not Level.EXACT:
        names = ", ".join(difference.field for difference in compatibility.differences)
        return Obstacle("other_model", f"another model: {names} differ")
    if not facts.first:
        return Obstacle("not_first", "it comes after another handle, so its cache would have to be moved")
    if facts.append_refusal:
        return Obstacle("not_appendable", f"the model's caches can't be appended to: {facts.append_refusal}")
    if facts.unproven_tokens and Level.MOVED not in policy.levels:
        return Obstacle("unproven", f"{UNPROVEN}, and the edge's policy does not allow level 1")
    if facts.level not in policy.levels:
        what = "the handle's cache is composed of moved blocks, and " if facts.level is Level.MOVED else ""
        return Obstacle("not_allowed", f"{what}the edge's policy does not allow level {int(facts.level)}")
    if facts.move_refusal:
        return Obstacle("not_movable", f"the model's caches can't be composed: {facts.move_refusal}")
    if facts.has_latent_steps and (refusal := _latent_steps_refusal(policy, facts)):
        return Obstacle("no_latent_steps", refusal)
    return None


def _latent_steps_refusal(policy: EdgePolicy, facts: Facts) -> str:
    if policy.judge:
        return "a judge takes no latent steps: they can change which candidate it picks"
    if not policy.latent_steps:
        return "the edge's policy takes no latent steps; allow them with EdgePolicy(latent_steps=True)"
    return facts.latent_steps_refusal


def _cheapest(options: Sequence[ServingOption], facts: Facts) -> ServingOption:
    """The last option that is clearly cheaper than all before it."""
    return next(
        option
        for index, option in reversed(list(enumerate(options)))
        if all(is_cheaper(option, better, facts) for better in options[:index])
    )


def _cheaper(option: ServingOption, other: ServingOption, facts: Facts) -> str:
    return f"{option.doing} ({option.cost(facts)}) is clearly cheaper than {other.doing} ({other.cost(facts)})"


def _no_route(compatibility: Compatibility, policy: EdgePolicy, facts: Facts, obstacle: str) -> str:
    level = max(compatibility.level, facts.level if facts.first else Level.MOVED)
    works = Level.TEXT if facts.append_refusal or facts.move_refusal else level
    differing = f" ({'; '.join(compatibility.reasons)})" if compatibility.differences else ""
    return (
        f"no route: {obstacle}; the best level that works is {works.name}{differing}, the policy allows "
        f"{names_of(policy.levels)} and forces {policy.route.value if policy.route else 'nothing'}. Allow Level.TEXT, "
        "or change the route."
    )


def facts_of(handle: KVHandle, receiver: ModelSpec) -> Facts:
    """What is known from a handle and a receiver's spec alone."""
    capabilities = receiver.capabilities
    move_refusal = capabilities.refusal("move") if handle.source_handles else ""
    if needs_packed_attention(handle) and not move_refusal:
        move_refusal = capabilities.refusal("batch")
    return Facts(
        handle.num_tokens,
        append_refusal=capabilities.refusal("append"),
        level=Level.EXACT if handle.is_exact else Level.MOVED,
        move_refusal=move_refusal,
        has_latent_steps=handle.has_latent_steps,
        latent_steps_refusal=capabilities.refusal("think"),
    )


def by_identity(sender: str, receiver: ModelSpec) -> Compatibility:
    """The compatibility where only the digest of the sender is known, as it came with a handle."""
    if sender == receiver.identity:
        return Compatibility(Level.EXACT)
    return Compatibility(Level.TEXT, (Difference("identity", sender, receiver.identity),))
