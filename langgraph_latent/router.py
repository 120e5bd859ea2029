"""Which way an edge goes. `choose` is pure: a compatibility and a policy in, a decision out. No tensors, no models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal, NamedTuple

from langgraph_latent.compat import Compatibility, Level
from langgraph_latent.errors import ConfigError, RouteError


class Route(str, Enum):
    """How a handle reaches its receiver."""

    CACHE = "cache"
    ADAPTER = "adapter"
    TEXT = "text"


class Cost(NamedTuple):
    """Tokens the receiver's model computes, and seconds (0 where not yet known)."""

    prefill_tokens: int
    seconds: float = 0.0


@dataclass(frozen=True)
class EdgePolicy:
    """What an edge may do.

    Attributes:
        allow: levels that may be used; EXACT and TEXT by default.
        route: force CACHE or TEXT; None lets the router choose.
        judge: the receiver compares candidates, where reuse below level 0 can change the pick: only EXACT or TEXT.
        on_failure: "fall_back" takes the next safer route, "raise" lets the error through.
    """

    allow: frozenset[Level] = frozenset({Level.EXACT, Level.TEXT})
    route: Route | None = None
    judge: bool = False
    on_failure: Literal["fall_back", "raise"] = "fall_back"

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "allow", frozenset(Level(level) for level in self.allow))
            object.__setattr__(self, "route", None if self.route is None else Route(self.route))
        except ValueError as error:
            known = f"levels: {[level.name for level in Level]}; routes: {[route.value for route in Route]}"
            raise ConfigError(f"{error}; known {known}") from None
        if self.route is Route.ADAPTER:
            raise ConfigError("route=ADAPTER can't be forced: there is no adapter yet; force CACHE or TEXT")
        if self.on_failure not in ("fall_back", "raise"):
            raise ConfigError(f"on_failure is {self.on_failure!r}; known: 'fall_back', 'raise'")

    @property
    def levels(self) -> frozenset[Level]:
        """The levels that may be used, `judge` considered."""
        return self.allow & {Level.EXACT, Level.TEXT} if self.judge else self.allow

    @property
    def may_fall_back(self) -> bool:
        """Whether a failing cache may be replaced by re-reading."""
        return self.on_failure == "fall_back" and Level.TEXT in self.levels and self.route is not Route.CACHE


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

    def diverged(self, num_reused: int, num_inherited: int) -> RouteDecision:
        """The decision where the rendered prompt keeps only the first tokens of what is inherited."""
        reason = f"the template rewrites what is inherited: {num_reused} of {num_inherited} tokens stay"
        if not num_reused:
            return RouteDecision(Route.TEXT, Level.TEXT, "diverged", reason, self.compatibility)
        return replace(self, code="diverged", reason=reason)


def choose(compatibility: Compatibility, policy: EdgePolicy, *, first: bool = True) -> RouteDecision:
    """The best route that works and that the policy allows. Raises `RouteError` where there is none.

    `first` is False for a handle that comes behind another one: appending to its cache is then impossible.
    """
    level = compatibility.level if first else max(compatibility.level, Level.MOVED)
    differing = "; ".join(compatibility.reasons)
    if level is Level.EXACT and level in policy.levels and policy.route is not Route.TEXT:
        return RouteDecision(Route.CACHE, level, "same_model", "same model: its cache is continued", compatibility)
    if Level.TEXT not in policy.levels or policy.route is Route.CACHE:
        raise RouteError(
            f"no route: the best level that works is {level.name}{f' ({differing})' if differing else ''}, the policy "
            f"allows {sorted(allowed.name for allowed in policy.levels)} and forces "
            f"{policy.route.value if policy.route else 'nothing'}. Allow Level.TEXT, or change the route."
        )
    if policy.route is Route.TEXT:
        code, reason = "forced", "the edge's policy forces text"
    elif compatibility.level is not Level.EXACT:
        names = ", ".join(difference.field for difference in compatibility.differences)
        code, reason = "other_model", f"another model: {names} differ"
    elif not first:
        code, reason = "not_first", "it comes behind another handle, so its cache would have to be moved"
    else:
        code, reason = "not_allowed", "the edge's policy does not allow level 0"
    return RouteDecision(Route.TEXT, Level.TEXT, code, reason, compatibility)


class EdgeRouter:
    """Policies by edge, an edge being (handle's source node, receiving node).

    `EdgeRouter({("reader", "router"): EdgePolicy(...)}, default=EdgePolicy())`; "*" on one side matches any node.
    """

    def __init__(
        self, policies: Mapping[tuple[str, str], EdgePolicy] | None = None, default: EdgePolicy | None = None
    ) -> None:
        self.policies = dict(policies or {})
        self.default = default or EdgePolicy()
        for edge, policy in self.policies.items():
            if not (isinstance(edge, tuple) and len(edge) == 2 and isinstance(policy, EdgePolicy)):
                raise ConfigError(
                    f"a policy maps (source node, receiving node) to an EdgePolicy, not {edge!r} to {policy!r}"
                )

    def policy(self, source: str, node: str) -> EdgePolicy:
        """The policy of an edge: its own, else that of ("*", node), (source, "*") or ("*", "*"), else the default."""
        for edge in ((source, node), ("*", node), (source, "*"), ("*", "*")):
            if edge in self.policies:
                return self.policies[edge]
        return self.default
