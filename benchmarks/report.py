"""How results are shown: a table for people, a table for the README, JSON with every sample. It measures nothing."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from rich.table import Table

from benchmarks.harness import Figure, Goal, Result, Settings, cpu_facts, default_threads

Outcome = Result | str
"""A row's result, or the message of what made it fail."""


def machine(model: str, dtype: str, device: str) -> dict[str, Any]:
    """What the numbers came from, without paths."""
    facts = dict(cpu_facts())
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    accelerator = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_at_start": load,
        "accelerator": accelerator,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "langgraph")},
        "model": os.path.basename(os.path.normpath(model)) if os.path.isdir(model) else model,
        "dtype": dtype,
        "device": device,
    }


def machine_line(facts: Mapping[str, Any]) -> str:
    """The machine in one sentence."""
    where = facts["accelerator"] or f"{facts['cpu']}, {facts['cores']} cores"
    return (
        f"{facts['model']} ({facts['dtype']}) on {where}, {facts['threads']} threads; Python {facts['python']}, "
        f"torch {facts['torch']}, transformers {facts['transformers']}, langgraph {facts['langgraph']}; {facts['date']}"
    )


def busy_warning(facts: Mapping[str, Any]) -> str:
    """A warning where the machine had other work when the measurement began; the empty string else."""
    load = facts["load_at_start"]
    if load is None or load < 0.5 * default_threads():
        return ""
    return f"warning: the load average was {load:.1f} at the start; on a busy machine these numbers mean little"


def to_json(facts: Mapping[str, Any], settings: Settings, outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """Everything, raw samples too. A row that failed has `error` and no figures."""
    return {"machine": dict(facts), "settings": asdict(settings), "rows": [_row(*item) for item in outcomes.items()]}


def _row(name: str, outcome: Outcome) -> dict[str, Any]:
    if isinstance(outcome, str):
        return {"name": name, "error": outcome}
    return {
        "name": name,
        "title": outcome.title,
        "figures": [figure.to_dict() for figure in outcome.figures],
        "checks": outcome.checks,
        "remarks": outcome.remarks,
        "notes": outcome.notes,
        "samples": outcome.samples,
    }


def lines(outcomes: Mapping[str, Outcome]) -> list[tuple[str, str, str, str]]:
    """Rows of four cells: what, measured, goal, verdict. A title line has only the first."""
    cells = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            cells.append((name, outcome, "", "FAILED"))
            continue
        cells.append((outcome.title, "", "", ""))
        cells += [(figure.name, _measured(figure), _goal(figure), _verdict(figure)) for figure in outcome.figures]
        cells += [(name, text, "", "") for name, text in outcome.remarks.items()]
        cells += [(check, "", "", "FAILED") for check, holds in outcome.checks.items() if not holds]
    return cells


def table(outcomes: Mapping[str, Outcome]) -> Table:
    """For a terminal."""
    shown = Table("", "median (min to max)", "goal", "")
    colours = {"met": "green", "aim met": "green", "not met": "yellow", "FAILED": "red"}
    for index, (what, measured, goal, verdict) in enumerate(lines(outcomes)):
        if not (measured or goal or verdict) and index:
            shown.add_section()
        indent = "  " if measured else ""
        shown.add_row(indent + what, measured, goal, f"[{colours.get(verdict, 'default')}]{verdict}[/]")
    return shown


def markdown(program: str, facts: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str:
    """For the README."""
    rows = [f"Measured by `{program}`: {machine_line(facts)}.", ""]
    rows += ["| | median (min to max) | goal | |", "|---|---|---|---|"]
    for what, measured, goal, verdict in lines(outcomes):
        title = f"**{what}**" if not (measured or verdict) else what
        rows.append(f"| {title} | {measured} | {goal} | {verdict} |")
    return "\n".join(rows)


def _measured(figure: Figure) -> str:
    median = _number(figure.median, figure.unit)
    if len(figure.samples) == 1:
        return median
    return f"{median} ({_number(min(figure.samples), figure.unit)} to {_number(max(figure.samples), figure.unit)})"


def _goal(figure: Figure) -> str:
    goal = figure.goal
    if goal is None:
        return ""
    aim = f" (aim {_number(goal.aim, figure.unit)})" if goal.aim is not None else ""
    return f"{_sign(goal)} {_number(goal.limit, figure.unit)}{aim}"


def _sign(goal: Goal) -> str:
    return "≥" if goal.at_least else "≤"


def _verdict(figure: Figure) -> str:
    if figure.goal is None:
        return ""
    if figure.goal.is_aim_met(figure.median):
        return "aim met"
    return "met" if figure.goal.is_met(figure.median) else "not met"


def _number(value: float, unit: str) -> str:
    if unit == "count":
        return f"{value:.0f}"
    if unit == "of":
        return f"{value:.2f}"
    if unit == "x":
        return f"{value:.2f}x" if value < 10 else f"{value:.0f}x" if value >= 100 else f"{value:.1f}x"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
