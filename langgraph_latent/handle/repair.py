"""`Repair`: how far moved tokens are recomputed. It does not know which tokens these are, nor how a model does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from langgraph_latent import public
from langgraph_latent.checks import is_number
from langgraph_latent.errors import ConfigError

Strategy = Literal["boundary", "deviation"]


@dataclass(frozen=True)
@public
class Repair:
    """Selective recompute: some of the moved tokens are computed again in their place, seeing all tokens before.

    Attributes:
        ratio: the part of the moved tokens, above 0; at 1 the cache is that of a full pass, within float tolerance.
        strategy: which ones. "boundary": the first ones of each block, as in EPIC (arXiv 2410.15332). "deviation":
            those whose values at an early layer change most, as in CacheBlend (arXiv 2405.16444).

    Raises `ConfigError` for impossible values.
    """

    ratio: float
    strategy: Strategy = "boundary"

    def __post_init__(self) -> None:
        if not is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ConfigError(
                f"ratio={self.ratio!r} is impossible; it is a part of the moved tokens, above 0, at most 1"
            )
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy={self.strategy!r} is unknown; known: {', '.join(get_args(Strategy))}")
