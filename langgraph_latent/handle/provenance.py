"""How a part of a cache came about that was not read in its place: blocks of other caches, or latent steps.

Plain values. It knows handles by name only; `handle.py` packs and reads them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from langgraph_latent.errors import ConfigError, HandleError

if TYPE_CHECKING:
    from langgraph_latent.handle.handle import KVHandle
else:
    KVHandle = Any  # handles are made of recipes; whoever reads annotations at run time, as Pydantic does, finds this

Strategy = Literal["boundary", "deviation"]
MAX_WEIGHT = 1e9


@dataclass(frozen=True)
class Repair:
    """Selective recompute of what was moved: these tokens are computed anew, seeing everything before them.

    Attributes:
        ratio: of the moved tokens, above 0; at 1 the cache is that of a full pass, within float tolerance.
        strategy: which ones. "boundary": the first ones of each block, as in EPIC (arXiv 2410.15332). "deviation":
            those whose values at an early layer change most, as in CacheBlend (arXiv 2405.16444).

    Raises `ConfigError` for impossible values.
    """

    ratio: float
    strategy: Strategy = "boundary"

    def __post_init__(self) -> None:
        if not _is_number(self.ratio) or not 0 < self.ratio <= 1:
            raise ConfigError(
                f"ratio={self.ratio!r} is impossible; it is a part of the moved tokens, above 0, at most 1"
            )
        if self.strategy not in get_args(Strategy):
            raise ConfigError(f"strategy={self.strategy!r} is unknown; known: {', '.join(get_args(Strategy))}")


@dataclass(frozen=True)
class Block:
    """Tokens `begin` to `end` of another handle's cache, as they are there, put at another position.

    Attributes:
        weight: what its tokens count in attention: its logarithm is added to their scores. 1 changes nothing. It holds
            in this place, and goes not along where a block is taken of this one.
        layers: those in which it is seen; None for all.

    Raises `ConfigError` for a span outside of the handle, a weight that is not above 0, and no layers.
    """

    handle: KVHandle
    begin: int
    end: int
    weight: float = 1.0
    layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not (
            type(self.begin) is int and type(self.end) is int and 0 <= self.begin < self.end <= self.handle.num_tokens
        ):
            raise ConfigError(f"tokens {self.begin!r} to {self.end!r} are not in a handle of {self.handle.num_tokens}")
        if not _is_number(self.weight) or not 0 < self.weight < MAX_WEIGHT:
            raise ConfigError(f"weight={self.weight!r} is impossible; it is a number above 0 (leave a part out for 0)")
        if self.layers is not None:
            if not self.layers or not all(type(layer) is int and layer >= 0 for layer in self.layers):
                raise ConfigError(f"layers={self.layers!r} is impossible; name one layer or more, from 0 on")
            object.__setattr__(self, "layers", tuple(sorted(set(self.layers))))

    @property
    def num_tokens(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True)
class Composition:
    """Blocks of other caches, one behind the other, and how far they are repaired there."""

    blocks: tuple[Block, ...]
    repair: Repair | None = None

    def __post_init__(self) -> None:
        if not self.blocks:
            raise ConfigError("a composition has at least one block")
        if self.repair is not None and not isinstance(self.repair, Repair):
            raise ConfigError(f"repair={self.repair!r} is no Repair; write Repair(0.15), or None")

    @property
    def is_exact(self) -> bool:
        """Whether it is whole messages, all computed anew in their place and seen like anything else."""
        is_whole = self.repair is not None and self.repair.ratio == 1
        return is_whole and not self.is_weighted and not self.has_latent_steps and all(map(_is_whole, self.blocks))

    @property
    def is_weighted(self) -> bool:
        """Whether some of it is seen otherwise than in full."""
        return any(each.weight != 1 or each.layers is not None for each in self.blocks)

    @property
    def has_latent_steps(self) -> bool:
        """Whether there are latent steps in it, which can't be computed anew in another place."""
        return any(
            span.kind == "latent" and span.begin < each.end and each.begin < span.end
            for each in self.blocks
            for span in each.handle.spans
        )

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the cache."""
        parts = [[each.handle.id, each.begin, each.end, float(each.weight), each.layers] for each in self.blocks]
        repair = self.repair and [float(self.repair.ratio), self.repair.strategy]
        return hashlib.sha256(json.dumps(["moved", parts, repair]).encode()).hexdigest()

    def to_plain(self, numbers: Mapping[str, int]) -> dict[str, Any]:
        """As plain values; `numbers` stand for the handles, by id."""
        return {
            "blocks": [
                [numbers[each.handle.id], each.begin, each.end, each.weight, each.layers] for each in self.blocks
            ],
            "repair": self.repair and [self.repair.ratio, self.repair.strategy],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], handles: Sequence[KVHandle]) -> Composition:
        """What `to_plain` wrote, the handles by their numbers. Raises `HandleError` for anything else."""
        try:
            blocks = tuple(
                Block(handles[number], begin, end, weight, None if layers is None else tuple(layers))
                for number, begin, end, weight, layers in plain["blocks"]
                if number >= 0
            )
            if len(blocks) < len(plain["blocks"]):
                raise HandleError("a handle's composition names a handle by a number below 0")
            return cls(blocks, None if plain["repair"] is None else Repair(*plain["repair"]))
        except (ConfigError, KeyError, TypeError, ValueError, IndexError) as error:
            raise HandleError(f"a handle's composition can't be read: {error}") from error


@dataclass(frozen=True)
class LatentSteps:
    """Latent steps behind the tokens before: the last hidden state fed back as the next input embedding.

    Nothing in it is random: the same prefix and number of steps give the same cache.
    """

    steps: int

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the cache."""
        return hashlib.sha256(json.dumps(["latent", self.steps]).encode()).hexdigest()


Provenance = Composition | LatentSteps


def _is_whole(block: Block) -> bool:
    """Whether a block begins and ends where spans of its handle do: text tells messages whole."""
    spans = block.handle.spans
    return block.begin in {span.begin for span in spans} and block.end in {span.end for span in spans}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
