"""Which way an edge goes. `choose` is pure: a compatibility, a policy and facts in, a decision out. No tensors here."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

from langgraph_latent.errors import ConfigError, RouteError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.provenance import Repair
from langgraph_latent.router.rates import Cost, Rates
from langgraph_latent.spec.compat import Compatibility, Difference, Level
from langgraph_latent.spec.spec import ModelSpec

MARGIN = 0.1
"""By what part of its time a way must be cheaper to be taken instead of a better one."""


class Route(str, Enum):
    """How a handle reaches its receiver."""

    CACHE = "cache"
    ADAPTER = "adapter"
    TEXT = "text"


@dataclass(frozen=True)
class EdgePolicy:
    """What an edge may do.

    Attributes:
        allow: levels that may be used; EXACT and TEXT by default.
        route: force CACHE or TEXT; None lets the router choose.
        judge: the receiver compares candidates, where reuse below level 0 can change the pick: only EXACT or TEXT.
        max_context_tokens: a handle with more tokens is refused, whatever the route: a chain's cache grows with every
            agent. None for no limit but the model's own.
        on_failure: "fall_back" takes the next safer route, "raise" lets the error through.
        repair: how far a merged handle is repaired that was not when it was made, where level 1 is allowed. Several
            handles are merged then. None for not at all.
        thoughts: whether latent steps may be handed over, where a measured parity says that they lose nothing. Such an
            edge is at level 1, be it in `allow` or not.
    """

    allow: frozenset[Level] = frozenset({Level.EXACT, Level.TEXT})
    route: Route | None = None
    judge: bool = False
    on_failure: Literal["fall_back", "raise"] = "fall_back"
    max_context_tokens: int | None = None
    repair: Repair | None = None
    thoughts: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "allow", frozenset(Level(level) for level in self.allow))
            object.__setattr__(self, "route", None if self.route is None else Route(self.route))
        except (ValueError, TypeError) as error:
            known = f"levels: {[level.name for level in Level]}; routes: {[route.value for route in Route]}"
            raise ConfigError(f"{error}; known {known}") from None
        if self.route is Route.ADAPTER:
            raise ConfigError("route=ADAPTER can't be forced: there is no adapter yet; force CACHE or TEXT")
        for name in ("judge", "thoughts"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is True or False")
        if self.repair is not None and not isinstance(self.repair, Repair):
            raise ConfigError(f"repair is {self.repair!r}; it is a Repair, or None")
        if self.on_failure not in ("fall_back", "raise"):
            raise ConfigError(f"on_failure is {self.on_failure!r}; known: 'fall_back', 'raise'")
        limit = self.max_context_tokens
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise ConfigError(
                f"max_context_tokens is {limit!r}; it is a number of tokens above 0, or None for no limit"
            )

    @property
    def levels(self) -> frozenset[Level]:
        """The levels that may be used, `judge` considered."""
        return self.allow & {Level.EXACT, Level.TEXT} if self.judge else self.allow

    @property
    def may_read(self) -> bool:
        """Whether messages may be read anew."""
        return Level.TEXT in self.levels and self.route is not Route.CACHE

    @property
    def may_fall_back(self) -> bool:
        """Whether a failing cache may be replaced by re-reading."""
        return self.on_failure == "fall_back" and self.may_read

    def __str__(self) -> str:
        parts = [f"allows {_names(self.levels)}"]
        parts += [f"forces {self.route.value}"] if self.route else []
        parts += ["for a judge"] if self.judge else []
        parts += ["thoughts too"] if self.thoughts else []
        parts += [f"repairs {self.repair.ratio:.0%} ({self.repair.strategy})"] if self.repair else []
        parts += [f"at most {self.max_context_tokens:,} tokens"] if self.max_context_tokens else []
        return ", ".join([*parts, f"on failure: {self.on_failure}"])


@dataclass(frozen=True)
class RouteDecision:
    """How an edge is served and why. `code` is for programs, `reason` for people."""

    route: Route
    level: Level
    code: str
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

    def diverged(self, num_kept: int, num_reused: int, num_inherited: int, crop_refusal: str = "") -> RouteDecision:
        """The decision where the rendered prompt keeps only the first tokens of what is inherited.

        Fewer are reused than stay where no state ends there and none can be cropped to it; `crop_refusal` says why.
        """
        reason = f"the template rewrites what is inherited: {num_kept} of {num_inherited} tokens stay"
        if num_reused < num_kept:
            reason += f", {num_reused} are reused" + (f": {crop_refusal}" if crop_refusal else "")
        if not num_reused:
            return RouteDecision(Route.TEXT, Level.TEXT, "diverged", reason, self.compatibility)
        return replace(self, code="diverged", reason=reason)


class Facts(NamedTuple):
    """What is known of one hand-over before it is decided.

    Attributes:
        num_tokens: of the handle.
        cached_tokens: of those, the ones whose tensors are in the pool now.
        move_bytes: bytes of these tensors that are on another device than the receiver; 0 where all are in place.
        text_tokens: of the handle's messages, told anew; None where not counted: about as many as the handle has.
        rates: measured where the receiver runs.
        first: False for a handle that comes behind another one: appending to its cache is then impossible.
        append_refusal: why nothing can be appended to a cache of the receiver, "" where it can.
        level: EXACT, or MOVED for a handle whose cache is composed of moved blocks.
        move_refusal: why the receiver can't make a composed cache, "" where it can or need not.
        has_latent_steps: whether there are latent steps in the handle.
        latent_steps_refusal: why they are not to be used, "" where they may be.
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


class Way(NamedTuple):
    """How a handle can be served: `doing` is said of its cost."""

    name: str
    route: Route
    level: Level
    doing: str

    def level_of(self, facts: Facts) -> Level:
        """What it promises of a handle."""
        return max(self.level, facts.level, Level.MOVED if facts.has_latent_steps else Level.EXACT)

    def cost(self, facts: Facts) -> Cost:
        """What it would take; of text, about: the prompt is not written yet."""
        if self is DELIVER:
            return facts.rates.cost(facts.num_tokens - facts.cached_tokens, facts.move_bytes)
        if self is REREAD and facts.text_tokens is not None:
            return facts.rates.cost(facts.text_tokens)
        return facts.rates.cost(facts.num_tokens)

    def refusal(self, compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> str:
        """Why it can't be taken; "" where it can."""
        if too_long := _too_long(policy, facts):
            return too_long
        if self is ADAPT:
            return "there is no adapter yet"
        if self is REREAD:
            return _text_obstacle(policy)
        _, obstacle = _obstacle(compatibility, policy, facts)
        return obstacle or ("its tensors are not in the pool" if self is DELIVER and not facts.cached_tokens else "")


DELIVER = Way("deliver", Route.CACHE, Level.EXACT, "taking its cache")
REBUILD = Way("rebuild", Route.CACHE, Level.EXACT, "computing its cache again")
ADAPT = Way("adapt", Route.ADAPTER, Level.ADAPTED, "translating its cache")
REREAD = Way("re-read", Route.TEXT, Level.TEXT, "reading its messages anew")
WAYS = (DELIVER, REBUILD, ADAPT, REREAD)


class Choice(NamedTuple):
    """The way that is taken, None where there is none, with a code for programs and a reason for people."""

    way: Way | None
    code: str
    reason: str


def choose(compatibility: Compatibility, policy: EdgePolicy, facts: Facts = Facts()) -> RouteDecision:  # noqa: B008
    """The best route that works and that the policy allows. Raises `RouteError` where there is none."""
    way, code, reason = choose_way(compatibility, policy, facts)
    if way is None:
        raise RouteError(reason)
    return RouteDecision(way.route, way.level_of(facts), code, reason, compatibility, way.cost(facts))


def choose_way(compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> Choice:
    """The way behind `choose`: level 0 where it works, unless text is allowed and known to be clearly cheaper."""
    if too_long := _too_long(policy, facts):
        return Choice(None, "too_long", too_long)
    code, obstacle = _obstacle(compatibility, policy, facts)
    may_read = not _text_obstacle(policy)
    if obstacle:
        if may_read:
            return Choice(REREAD, code, obstacle)
        return Choice(None, code, _no_route(compatibility, policy, facts, obstacle))
    is_gone = not facts.cached_tokens
    best = REBUILD if is_gone or _is_cheaper(REBUILD, DELIVER, facts) else DELIVER
    if may_read and _is_cheaper(REREAD, REBUILD, facts) and (is_gone or _is_cheaper(REREAD, DELIVER, facts)):
        return Choice(REREAD, "cheaper", _cheaper(REREAD, best, facts))
    if facts.level is Level.MOVED:
        return Choice(best, "composed", "same model: its cache is composed of moved blocks and continued")
    if best is DELIVER:
        return Choice(DELIVER, "same_model", "same model: its cache is continued")
    if is_gone:
        return Choice(REBUILD, "same_model", "same model: its cache is gone and is computed again")
    return Choice(REBUILD, "cheaper", _cheaper(REBUILD, DELIVER, facts))


def _too_long(policy: EdgePolicy, facts: Facts) -> str:
    limit = policy.max_context_tokens
    if limit is None or facts.num_tokens <= limit:
        return ""
    return (
        f"the handle has {facts.num_tokens:,} tokens, the edge's policy takes at most {limit:,}: pass on a summary or "
        "fewer messages instead of the handle, or raise EdgePolicy(max_context_tokens=...)"
    )


def _obstacle(compatibility: Compatibility, policy: EdgePolicy, facts: Facts) -> tuple[str, str]:
    """Code and reason why the receiver can't go on in the handle's cache; empty where it can."""
    if policy.route is Route.TEXT:
        return "forced", "the edge's policy forces text"
    if compatibility.level is not Level.EXACT:
        names = ", ".join(difference.field for difference in compatibility.differences)
        return "other_model", f"another model: {names} differ"
    if not facts.first:
        return "not_first", "it comes behind another handle, so its cache would have to be moved"
    if facts.append_refusal:
        return "not_appendable", f"the model's caches can't be appended to: {facts.append_refusal}"
    if facts.level not in policy.levels:
        what = "the handle's cache is composed of moved blocks, and " if facts.level is Level.MOVED else ""
        return "not_allowed", f"{what}the edge's policy does not allow level {int(facts.level)}"
    if facts.move_refusal:
        return "not_movable", f"the model's caches can't be composed: {facts.move_refusal}"
    if facts.has_latent_steps and policy.judge:
        return "no_latent_steps", "a judge takes no latent steps: they can change which candidate it picks"
    if facts.has_latent_steps and not policy.thoughts:
        return "no_latent_steps", "the edge's policy takes no latent steps; allow them with EdgePolicy(thoughts=True)"
    if facts.has_latent_steps and facts.latent_steps_refusal:
        return "no_latent_steps", facts.latent_steps_refusal
    return "", ""


def _text_obstacle(policy: EdgePolicy) -> str:
    if policy.route is Route.CACHE:
        return "the edge's policy forces cache"
    return "" if Level.TEXT in policy.levels else "the edge's policy does not allow level 4"


def _no_route(compatibility: Compatibility, policy: EdgePolicy, facts: Facts, obstacle: str) -> str:
    level = max(compatibility.level, facts.level if facts.first else Level.MOVED)
    works = Level.TEXT if facts.append_refusal or facts.move_refusal else level
    differing = f" ({'; '.join(compatibility.reasons)})" if compatibility.differences else ""
    return (
        f"no route: {obstacle}; the best level that works is {works.name}{differing}, the policy allows "
        f"{_names(policy.levels)} and forces {policy.route.value if policy.route else 'nothing'}. Allow Level.TEXT, or "
        "change the route."
    )


def _is_cheaper(way: Way, other: Way, facts: Facts) -> bool:
    """Whether a way is known to take less time than another, by more than the margin."""
    seconds, others = way.cost(facts).seconds, other.cost(facts).seconds
    return seconds is not None and others is not None and seconds < (1 - MARGIN) * others


def _cheaper(way: Way, other: Way, facts: Facts) -> str:
    return f"{way.doing} ({way.cost(facts)}) is clearly cheaper than {other.doing} ({other.cost(facts)})"


def _names(levels: frozenset[Level]) -> str:
    return ", ".join(level.name for level in sorted(levels)) or "no level"


class Situation(NamedTuple):
    """What an edge is decided from. `sender` is its model's spec, or the digest where no more is known."""

    sender: ModelSpec | str
    receiver: ModelSpec
    compatibility: Compatibility
    facts: Facts


class Observer(Protocol):
    """Whoever knows the situation of a handle: a workspace."""

    def situation(self, handle: KVHandle, receiver: Any, *, first: bool = True) -> Situation: ...


class Explanation(str):
    """A text that a notebook shows as it is, and the decision it explains (None where there is no route)."""

    decision: RouteDecision | None = None

    def __repr__(self) -> str:
        return str(self)


class EdgeRouter:
    """Policies by edge, an edge being (handle's source node, receiving node).

    `EdgeRouter({("reader", "router"): EdgePolicy(...)}, default=EdgePolicy())`; "*" on one side matches any node.
    """

    def __init__(
        self, policies: Mapping[tuple[str, str], EdgePolicy] | None = None, default: EdgePolicy | None = None
    ) -> None:
        self.policies = dict(policies or {})
        self.default = default or EdgePolicy()
        self._observer: weakref.ref[Observer] | None = None
        for edge, policy in self.policies.items():
            if not (isinstance(edge, tuple) and len(edge) == 2 and isinstance(policy, EdgePolicy)):
                raise ConfigError(
                    f"a policy maps (source node, receiving node) to an EdgePolicy, not {edge!r} to {policy!r}"
                )

    def policy(self, source: str, node: str) -> EdgePolicy:
        """The policy of an edge: its own, else that of ("*", node), (source, "*") or ("*", "*"), else the default."""
        edge = self.match(source, node)
        return self.default if edge is None else self.policies[edge]

    def policy_for(self, handle: KVHandle, node: str) -> EdgePolicy:
        """The policy of a handle's edge; it allows nothing that the edge of one of its parts forbids."""
        policy = self.policy(handle.source, node)
        for part in handle.parts:
            other = self.policy(part.source, node)
            policy = replace(
                policy,
                allow=policy.allow & other.levels,
                route=Route.TEXT if other.route is Route.TEXT else policy.route,
                judge=policy.judge or other.judge,
                on_failure="raise" if "raise" in (policy.on_failure, other.on_failure) else "fall_back",
                max_context_tokens=min(
                    filter(None, (policy.max_context_tokens, other.max_context_tokens)), default=None
                ),
                thoughts=policy.thoughts and (other.thoughts or not part.has_latent_steps),
            )
        return policy

    def match(self, source: str, node: str) -> tuple[str, str] | None:
        """The key of `policies` that counts for an edge; None where it is the default."""
        for edge in ((source, node), ("*", node), (source, "*"), ("*", "*")):
            if edge in self.policies:
                return edge
        return None

    def attach(self, observer: Observer) -> None:
        """Let `explain` ask a workspace; the last one that took this router, as long as it lives."""
        self._observer = weakref.ref(observer)

    def explain(self, handle: KVHandle, receiver: Any, *, node: str = "", first: bool = True) -> Explanation:
        """How the edge from a handle to a receiver (a `ChatLatent` or a `ModelSpec`) in a node would be decided now.

        Takes its facts from the workspace that has this router; without one, only handle and receiver are known.
        Nothing is computed, moved or emitted.
        """
        observer = self._observer() if self._observer else None
        if observer is not None:
            situation = observer.situation(handle, receiver, first=first)
        else:
            spec = receiver if isinstance(receiver, ModelSpec) else receiver.spec
            facts = facts_of(handle, spec)._replace(first=first)
            situation = Situation(handle.model, spec, by_identity(handle.model, spec), facts)
        return self.explain_situation(handle, situation, node)

    def explain_situation(self, handle: KVHandle, situation: Situation, node: str = "") -> Explanation:
        """The same for facts that are known already."""
        sender, receiver, compatibility, facts = situation
        policy, pattern = self.policy_for(handle, node), self.match(handle.source, node)
        chosen, code, reason = choose_way(compatibility, policy, facts)
        level = f"level {int(compatibility.level)} {compatibility.level.name}"
        taken = f"{chosen.route.value}, {_level(chosen, facts)}" if chosen else "refused"
        lines = [
            ("edge", f"{handle.source!r} to {node!r}"),
            ("sender", _model(sender)),
            ("receiver", _model(receiver)),
            ("models", f"{level}: {'the same model' if not compatibility.differences else 'they differ'}"),
            *(("", told) for told in (*compatibility.reasons, *compatibility.notes)),
            ("policy", f"of {pattern}" if pattern else "the router's default"),
            ("", str(policy)),
            ("handle", f"{handle.id}, {facts.num_tokens:,} tokens, {facts.cached_tokens:,} of them in the pool"),
            ("", f"{facts.move_bytes:,} bytes to move, {'first' if facts.first else 'behind another handle'}"),
            ("rates", str(facts.rates)),
            *((way.name, _told(way, chosen, situation, policy)) for way in WAYS),
            ("decision", taken),
            ("", f"{code}: {reason}"),
        ]
        explanation = Explanation("\n".join(f"{name:<10}{text}" for name, text in lines))
        if chosen is not None:
            explanation.decision = choose(compatibility, policy, facts)
        return explanation


def facts_of(handle: KVHandle, receiver: ModelSpec) -> Facts:
    """What a handle and a receiver's spec tell by themselves."""
    capabilities = receiver.capabilities
    move_refusal = capabilities.refusal("move") if handle.provenance_digest and handle.source_handles else ""
    if handle.needs_rows and not move_refusal:
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


def _model(spec: ModelSpec | str) -> str:
    if isinstance(spec, str):
        return f"an unknown model, {spec}"
    return f"{spec.name} ({spec.architecture}), {spec.identity}"


def _told(way: Way, chosen: Way | None, situation: Situation, policy: EdgePolicy) -> str:
    facts = situation.facts
    verdict = "taken"
    if refusal := way.refusal(situation.compatibility, policy, facts):
        verdict = f"can't be taken: {refusal}"
    elif chosen is not None and way is not chosen:
        is_dearer = _is_cheaper(chosen, way, facts)
        verdict = f"possible, but {'dearer' if is_dearer else 'not clearly cheaper'} than {chosen.name}"
    cost = "" if way is ADAPT else f"{way.cost(facts)}; "
    return f"{way.route.value}, {_level(way, facts)}; {cost}{verdict}"


def _level(way: Way, facts: Facts) -> str:
    level = way.level_of(facts)
    return f"level {int(level)} {level.name}"
