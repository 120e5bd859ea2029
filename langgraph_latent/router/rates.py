"""How fast a model prefills and caches move, as measured, and what tokens and bytes cost at these rates.

It knows numbers only: no models, no tensors, no routes.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

HALF_LIFE_TOKENS, HALF_LIFE_BYTES = 8_192, 1 << 28
"""After so many more tokens or bytes, an old measurement weighs half."""
MIN_TOKENS = 16
"""A shorter prefill measures the overhead of a call more than a rate."""


class Cost(NamedTuple):
    """Tokens the receiver's model computes, seconds (None where not known), and bytes that are moved to its device."""

    prefill_tokens: int
    seconds: float | None = None
    move_bytes: int = 0

    def __str__(self) -> str:
        moved = f", {_size(self.move_bytes)} to move" if self.move_bytes else ""
        return f"{self.prefill_tokens:,} tokens to prefill{moved}, {_duration(self.seconds)}"


class Rates(NamedTuple):
    """Rates of one model where it runs; 0 where nothing was measured yet."""

    prefill_tokens_per_s: float = 0.0
    move_bytes_per_s: float = 0.0

    def cost(self, num_tokens: int, num_bytes: int = 0) -> Cost:
        """What prefilling tokens and moving bytes costs; without seconds where a rate for it is not known."""
        prefill_rate, move_rate = self
        if (num_tokens and not prefill_rate) or (num_bytes and not move_rate):
            return Cost(num_tokens, None, num_bytes)
        seconds = (num_tokens / prefill_rate if num_tokens else 0.0) + (num_bytes / move_rate if num_bytes else 0.0)
        return Cost(num_tokens, seconds, num_bytes)

    def __str__(self) -> str:
        prefill = f"{self.prefill_tokens_per_s:,.0f} tokens/s" if self.prefill_tokens_per_s else "not measured yet"
        move = f"{_size(self.move_bytes_per_s)}/s" if self.move_bytes_per_s else "not measured yet"
        return f"prefill {prefill}, moving {move}"


class RateMeter:
    """Measures one model's rates as averages that forget. Safe in threads.

    An average is the quotient of two decayed sums, so a long prefill weighs more than a short one.
    """

    def __init__(self) -> None:
        self.rates = Rates()
        self._prefill, self._move = _Average(HALF_LIFE_TOKENS), _Average(HALF_LIFE_BYTES)
        self._lock = threading.Lock()

    def add_prefill(self, num_tokens: int, seconds: float) -> None:
        """Take note of a prefill that was done; one of a few tokens is left out."""
        if num_tokens >= MIN_TOKENS:
            with self._lock:
                self.rates = self.rates._replace(prefill_tokens_per_s=self._prefill.add(num_tokens, seconds))

    def add_move(self, num_bytes: int, seconds: float) -> None:
        """Take note of a cache that was moved to another device."""
        with self._lock:
            self.rates = self.rates._replace(move_bytes_per_s=self._move.add(num_bytes, seconds))


class _Average:
    """Amount per second over what was measured, the last `half_life` of it above all."""

    def __init__(self, half_life: int) -> None:
        self._half_life = half_life
        self._amount = self._seconds = 0.0

    def add(self, amount: int, seconds: float) -> float:
        """The rate with one more measurement."""
        kept = 0.5 ** (amount / self._half_life)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds
        return self._amount / self._seconds if self._seconds else 0.0


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes >= 1e5 else f"{num_bytes:,.0f} bytes"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "time not known"
    if not seconds:
        return "at once"
    return f"about {seconds:,.2f} s" if seconds >= 1 else f"about {seconds * 1e3:.3g} ms"
