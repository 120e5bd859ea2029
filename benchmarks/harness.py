"""What every benchmark row shares: settings, interleaved rounds, figures with goals. It knows no particular row."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.progress import Progress


class Mismatch(AssertionError):
    """Two sides of a comparison differ where equal results are promised: the row's numbers mean nothing."""


@dataclass(frozen=True)
class Settings:
    """How much is measured.

    Attributes:
        rounds: how often every side of a row runs.
        slow_rounds: the same for rows whose text side takes half a minute or more.
        quick: short contexts and few tokens, to test the benchmark itself; its figures mean nothing.
    """

    rounds: int = 5
    quick: bool = False

    @property
    def slow_rounds(self) -> int:
        return min(self.rounds, 3)

    def context(self, num_tokens: int) -> int:
        """The context length to use where a row asks for `num_tokens`."""
        return 192 + num_tokens // 32 if self.quick else num_tokens

    def written(self, num_tokens: int) -> int:
        """The number of tokens to decode where a row asks for `num_tokens`."""
        return max(2, num_tokens // 16) if self.quick else num_tokens


@dataclass(frozen=True)
class Goal:
    """A limit for the median: the least where `at_least`, else the most. `aim` is a further one that we would like."""

    limit: float
    at_least: bool
    aim: float | None = None

    def is_met(self, value: float) -> bool:
        return self._holds(value, self.limit)

    def is_aim_met(self, value: float) -> bool:
        return self.aim is not None and self._holds(value, self.aim)

    def _holds(self, value: float, limit: float) -> bool:
        return value >= limit if self.at_least else value <= limit


def at_least(limit: float, aim: float | None = None) -> Goal:
    return Goal(limit, True, aim)


def at_most(limit: float, aim: float | None = None) -> Goal:
    return Goal(limit, False, aim)


@dataclass(frozen=True)
class Figure:
    """One measured number: one sample per round. `unit` is "s", "x" (times faster), "of" (a share) or "count"."""

    name: str
    unit: str
    samples: tuple[float, ...]
    goal: Goal | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def to_dict(self) -> dict[str, Any]:
        goal = self.goal
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "goal": None if goal is None else {"at_least" if goal.at_least else "at_most": goal.limit, "aim": goal.aim},
            "met": None if goal is None else goal.is_met(self.median),
            "samples": list(self.samples),
        }


def ratio(
    name: str, over: Sequence[float], under: Sequence[float], goal: Goal | None = None, unit: str = "x"
) -> Figure:
    """`over / under`, round by round."""
    return Figure(name, unit, tuple(a / b for a, b in zip(over, under, strict=True)), goal)


@dataclass
class Result:
    """A row's outcome. `samples` are raw numbers, in seconds unless their name says otherwise; `checks` must hold.

    `remarks` are what belongs into the table and is not a number.
    """

    title: str
    figures: list[Figure] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)

    def check_equal(self, name: str, *sides: Sequence[int]) -> None:
        """Note that all sides gave the same tokens. Raises `Mismatch` where they did not."""
        self.checks[name] = all(list(side) == list(sides[0]) for side in sides)
        if not self.checks[name]:
            raise Mismatch(f"{self.title}: {name} does not hold: {' against '.join(str(list(side)) for side in sides)}")


class Ticker:
    """The progress bar of the row under way."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("loading", total=1)
        self._expected = 0

    def begin(self, name: str) -> None:
        """Show a new bar."""
        self._progress.update(self._task, total=max(1, self._expected), completed=max(1, self._expected))
        self._task = self._progress.add_task(name, total=None)
        self._expected = 0

    def expect(self, num_steps: int) -> None:
        """Add steps to come."""
        self._expected += num_steps
        self._progress.update(self._task, total=self._expected)

    def step(self) -> None:
        self._progress.advance(self._task)


Side = Callable[[int], float]
"""Runs one side for one round, given the round's number, and returns what it measured."""


def interleave(rounds: int, sides: Mapping[str, Side], ticker: Ticker) -> dict[str, list[float]]:
    """Run every side once per round, in turn (A B A B ...), so that what the machine does meanwhile hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    ticker.expect(rounds * len(sides))
    for number in range(rounds):
        for name, side in sides.items():
            samples[name].append(side(number))
            ticker.step()
    return samples


class Stopwatch:
    """A transformers streamer that notes when each sampled token came; seconds since it was made."""

    def __init__(self) -> None:
        self.marks: list[float] = []
        self._has_prompt = False
        self._begin = time.perf_counter()

    def put(self, value: Any) -> None:
        if self._has_prompt:
            self.marks.append(self.now())
        self._has_prompt = True

    def end(self) -> None:
        """Nothing to close."""

    def now(self) -> float:
        return time.perf_counter() - self._begin


@contextmanager
def measured(into: list[float]) -> Iterator[None]:
    """Append the block's wall time in seconds."""
    begin = time.perf_counter()
    yield
    into.append(time.perf_counter() - begin)


def default_threads() -> int:
    """`OMP_NUM_THREADS` where it is set, else one thread per core that this process may use.

    Prefill uses every core, decoding is bound by memory and loses nothing. Hyper-threads are not counted.
    """
    if chosen := os.environ.get("OMP_NUM_THREADS", "").split(",")[0]:
        return int(chosen)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(usable, _physical_cores() or usable))


def _physical_cores() -> int:
    """Physical cores by /proc/cpuinfo, 0 where that does not tell."""
    cores: set[tuple[str, str]] = set()
    package = ""
    for key, value in cpu_facts():
        if key == "physical id":
            package = value
        elif key == "core id":
            cores.add((package, value))
    return len(cores)


def cpu_facts() -> list[tuple[str, str]]:
    """The lines of /proc/cpuinfo as pairs; none on other systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            pairs = [line.partition(":") for line in file]
    except OSError:
        return []
    return [(key.strip(), value.strip()) for key, _, value in pairs]
