"""Draws what is kept against what it costs, one labelled point a row. It knows outcomes only."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.retention.page import Outcome
from benchmarks.retention.samples import estimate

COLOURS = {
    "none": "black",
    "summary": "tab:orange",
    "tail": "tab:red",
    "full": "tab:brown",
    "append": "tab:green",
    "compose": "tab:blue",
    "layers": "tab:cyan",
    "merge": "tab:purple",
}
AXES = {"seconds": "seconds until the receiver can run", "num_bytes": "bytes handed over"}
FLOOR = -0.2
"""What is kept below this is drawn here; the label says how much it is."""


def is_installed() -> bool:
    """Whether it can draw."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(outcomes: Sequence[Outcome], file: Path) -> None:
    """Write the picture: a line of panels per model, one panel per cost."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 7 * len(outcomes)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(outcomes), len(AXES), squeeze=False)
    for line, outcome in zip(panels, outcomes, strict=True):
        for panel, (cost, label) in zip(line, AXES.items(), strict=True):
            _panel(panel, outcome, cost)
            panel.set(xlabel=label, ylabel="share of the KL gap kept", title=outcome.facts["model"])
    figure.savefig(file, dpi=110, metadata={"Software": None})


def _panel(panel: Any, outcome: Outcome, cost: str) -> None:
    points = {
        name: (estimate(tally, cost).value, estimate(tally, "kept").value) for name, tally in outcome.rows.items()
    }
    least = min((x for x, _ in points.values() if x > 0), default=1.0) / 3
    most = max(x for x, _ in points.values()) * 2
    panel.set_xscale("log")
    panel.set(xlim=(least / 2, most * 150), ylim=(FLOOR - 0.05, 1.08))
    panel.grid(alpha=0.3)
    places = _spread([max(FLOOR, kept) for _, kept in points.values()], 1.25 / len(points))
    for (name, (x, kept)), y in zip(points.items(), places, strict=True):
        colour = COLOURS[name.partition("-")[0]]
        at = (max(x, least), max(FLOOR, kept))
        panel.plot(*at, "o", color=colour, markersize=5)
        panel.annotate(
            f"{name} {kept * 100:.1f} %",
            at,
            (most * 1.5, y),
            color=colour,
            fontsize=8,
            verticalalignment="center",
            arrowprops={"arrowstyle": "-", "color": colour, "alpha": 0.3, "linewidth": 0.6, "relpos": (0, 0.5)},
        )


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Heights at least `gap` apart, in the same order, the highest at most a little above 1."""
    order = sorted(range(len(heights)), key=lambda index: -heights[index])
    top, placed = 1.05 + gap, [0.0] * len(heights)
    for rank, index in enumerate(order):
        lowest = FLOOR + gap * (len(order) - 1 - rank)  # room for those below
        top = placed[index] = max(min(heights[index] + gap, top - gap), lowest - 0.02)
    return placed
