"""What an edge may do: `EdgePolicy`, and the routes it can force. It knows no handles, no models and no costs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

from langgraph_latent import public
from langgraph_latent.checks import is_whole_number
from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.repair import Repair
from langgraph_latent.spec.compat import Level


@public
class Route(str, Enum):
    """How a handle reaches its receiver."""

    CACHE = "cache"
    ADAPTER = "adapter"
    TEXT = "text"


@dataclass(frozen=True)
@public
class EdgePolicy:
    """What an edge may do.

    Attributes:
        allow: levels that may be used; EXACT and TEXT by default.
        route: force CACHE or TEXT; None lets the router choose.
        judge: the receiver compares candidates, where reuse below level 0 can change the pick: only EXACT or TEXT.
        on_failure: "fall_back" takes the next safer route, "raise" lets the error through.
        max_context_tokens: a handle with more tokens is refused, whatever the route: a chain's cache grows with every
            agent. None for no limit but the model's own.
        repair: how far moved blocks that have no repair yet are repaired, where level 1 is allowed (there, several
            inherited handles are merged). None for not at all.
        latent_steps: whether latent steps may be handed over, where a measured parity says that they lose nothing.
            Such an edge is at level 1, whether that is in `allow` or not.
    """

    allow: frozenset[Level] = frozenset({Level.EXACT, Level.TEXT})
    route: Route | None = None
    judge: bool = False
    on_failure: Literal["fall_back", "raise"] = "fall_back"
    max_context_tokens: int | None = None
    repair: Repair | None = None
    latent_steps: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "allow", frozenset(Level(level) for level in self.allow))
            object.__setattr__(self, "route", None if self.route is None else Route(self.route))
        except (ValueError, TypeError) as error:
            known = f"levels: {[level.name for level in Level]}; routes: {[route.value for route in Route]}"
            raise ConfigError(f"{error}; known {known}") from None
        if self.route is Route.ADAPTER:
            raise ConfigError("route=ADAPTER can't be forced: there is no adapter yet; force CACHE or TEXT")
        for name in ("judge", "latent_steps"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it is True or False")
        if self.repair is not None and not isinstance(self.repair, Repair):
            raise ConfigError(f"repair is {self.repair!r}; it is a Repair, or None")
        if self.on_failure not in ("fall_back", "raise"):
            raise ConfigError(f"on_failure is {self.on_failure!r}; known: 'fall_back', 'raise'")
        limit = self.max_context_tokens
        if limit is not None and not is_whole_number(limit, 1):
            raise ConfigError(
                f"max_context_tokens is {limit!r}; it is a number of tokens above 0, or None for no limit"
            )

    @property
    def levels(self) -> frozenset[Level]:
        """The levels that may be used, `judge` considered."""
        return self.allow & {Level.EXACT, Level.TEXT} if self.judge else self.allow

    @property
    def text_refusal(self) -> str:
        """Why messages may not be re-read as text; "" where they may."""
        if self.route is Route.CACHE:
            return "the edge's policy forces cache"
        return "" if Level.TEXT in self.levels else "the edge's policy does not allow level 4"

    @property
    def may_read(self) -> bool:
        """Whether messages may be re-read as text."""
        return not self.text_refusal

    @property
    def may_fall_back(self) -> bool:
        """Whether a failing cache may be replaced by re-reading."""
        return self.on_failure == "fall_back" and self.may_read

    def length_refusal(self, num_tokens: int) -> str:
        """Why a handle of so many tokens is refused on every route; "" where it is not."""
        limit = self.max_context_tokens
        if limit is None or num_tokens <= limit:
            return ""
        return (
            f"the handle has {num_tokens:,} tokens, the edge's policy takes at most {limit:,}: pass on a summary or "
            "fewer messages instead of the handle, or raise EdgePolicy(max_context_tokens=...)"
        )

    def __str__(self) -> str:
        parts = [f"allows {names_of(self.levels)}"]
        parts += [f"forces {self.route.value}"] if self.route else []
        parts += ["for a judge"] if self.judge else []
        parts += ["latent steps too"] if self.latent_steps else []
        parts += [f"repairs {self.repair.ratio:.0%} ({self.repair.strategy})"] if self.repair else []
        parts += [f"at most {self.max_context_tokens:,} tokens"] if self.max_context_tokens else []
        return ", ".join([*parts, f"on failure: {self.on_failure}"])


def names_of(levels: frozenset[Level]) -> str:
    """Levels by name, the best first."""
    return ", ".join(level.name for level in sorted(levels)) or "no level"
