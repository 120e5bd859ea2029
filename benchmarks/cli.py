"""What the entry points share: their options, the rows one after another under a progress bar, and how they are shown.

It knows no particular row.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.bench import Bench
from benchmarks.harness import Result, Settings, Ticker, default_threads
from langgraph_latent.demo.model import demo_model
from langgraph_latent.errors import LatentError

Row = Callable[[Bench], Result]
"""Measures one thing."""

Model = Annotated[str, typer.Option(help="Folder or hub id; the demo's model by default.")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each side runs; slow rows run 3 times at most.")]
Threads = Annotated[int, typer.Option(min=0, help="0: OMP_NUM_THREADS, else one per physical core.")]
RowNames = Annotated[list[str] | None, typer.Option(help="Only this row; repeatable. An unknown name lists them.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print the table as the README shows it.")]
Quick = Annotated[bool, typer.Option("--quick", help="Short contexts, one round: tests the benchmark itself.")]

messages = Console(stderr=True)


class Output(NamedTuple):
    """Where results go: a table for the terminal or the README, and a file of every sample."""

    markdown: bool
    json_file: Path | None


def choose(names: Sequence[str] | None, known: Mapping[str, Row]) -> dict[str, Row]:
    """The rows of these names; all where none are given. Raises `BadParameter` with the known ones."""
    names = names or list(known)
    if unknown := [name for name in names if name not in known]:
        raise typer.BadParameter(f"no row {unknown[0]!r}; known rows: {', '.join(known)}", param_hint="--row")
    return {name: known[name] for name in names}


def missing(name: str, requirement: str) -> None:
    """Say what is left out for want of a package, and how to get it."""
    messages.print(
        f"{name} is not installed, so it is left out. To add it, install it into this environment: "
        f"python -m pip install '{requirement}'",
        highlight=False,
        markup=False,  # an extra's brackets are not a style
    )


def measure(
    program: str, rows: Mapping[str, Row], model: str, settings: Settings, threads: int, output: Output
) -> None:
    """Run the rows and show what they gave. Exits with status 1 where one failed or its sides disagree."""
    json_file = output.json_file
    if json_file and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="--json")
    torch.set_num_threads(threads or default_threads())
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    with progress() as bars:
        bench = _open(model, settings, Ticker(bars))
        facts = report.machine(bench.name, bench.model.spec.dtype, str(bench.model.device))
        if warning := report.busy_warning(facts):
            messages.print(warning)
        try:
            outcomes = {name: _measure(bench, name, run) for name, run in rows.items()}
        finally:
            bench.close()
    _show(program, facts, outcomes, as_markdown=output.markdown)
    if json_file:
        data = report.to_json(facts, settings, outcomes)
        json_file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if any(isinstance(outcome, str) or not all(outcome.checks.values()) for outcome in outcomes.values()):
        raise typer.Exit(1)


def _open(model: str, settings: Settings, ticker: Ticker) -> Bench:
    try:
        return Bench.open(model or str(demo_model(messages.print)), settings, ticker)
    except LatentError as error:
        messages.print(f"error: {error}", highlight=False)
        raise typer.Exit(1) from error


def _measure(bench: Bench, name: str, run: Row) -> report.Outcome:
    """Run one row under its own progress bar; what makes it fail is shown in its place and does not end the others."""
    bench.ticker.begin(name)
    try:
        return run(bench)
    except (AssertionError, LatentError, RuntimeError) as error:  # a `Mismatch` is one of the first
        return f"{type(error).__name__}: {error}"


def _show(
    program: str, facts: Mapping[str, object], outcomes: Mapping[str, report.Outcome], *, as_markdown: bool
) -> None:
    if as_markdown:
        print(report.markdown(program, facts, outcomes))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(report.machine_line(facts), highlight=False)
    console.print(report.table(outcomes), highlight=False)


@contextmanager
def progress() -> Iterator[Progress]:
    """Progress bars on the standard error, for a `Ticker`."""
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=messages) as bars:
        yield bars
