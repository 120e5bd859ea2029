"""`python -m benchmarks.handoff`: what handing over a KV cache saves, against text edges and stock transformers.

Sides of a comparison run in turn, in the same process and on the same weights; a number is the median of its rounds.
Only ratios have goals, but for the hand-over itself. A comparison whose sides must agree and do not fails the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks import report
from benchmarks.bench import Bench
from benchmarks.harness import Settings, Ticker, default_threads
from benchmarks.rows import ROWS, Row, peers
from langgraph_latent.demo.model import demo_model
from langgraph_latent.errors import LatentError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_messages = Console(stderr=True)


@app.command()
def main(
    model: Annotated[str, typer.Option(help="Folder or hub id; the demo's model by default.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="How often each side runs; slow rows run 3 times at most.")] = 5,
    threads: Annotated[int, typer.Option(min=0, help="0: OMP_NUM_THREADS, else one per physical core.")] = 0,
    row: Annotated[list[str] | None, typer.Option(help=f"Only this row; repeatable. Known: {', '.join(ROWS)}.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write every sample to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as the README shows it.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short contexts, one round: tests the benchmark itself.")
    ] = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="Add avp and latentmesh, if installed.")] = False,
) -> None:
    """Measure hand-overs of KV caches against text edges and stock transformers."""
    if json_file and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no folder {json_file.parent}", param_hint="--json")
    chosen = choose_rows(row or list(ROWS), with_peers=with_peers)
    torch.set_num_threads(threads or default_threads())
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    settings = Settings(1 if quick else rounds, quick)
    with _progress() as progress:
        bench = _open(model, settings, Ticker(progress))
        spec = bench.model.spec
        facts = report.machine(bench.name, spec.dtype, str(bench.model.device))
        if warning := report.busy_warning(facts):
            _messages.print(warning)
        try:
            outcomes = {name: _measure(bench, name, run) for name, run in chosen.items()}
        finally:
            bench.close()
    _show(facts, outcomes, as_markdown=markdown)
    if json_file:
        data = report.to_json(facts, settings, outcomes)
        json_file.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if any(isinstance(outcome, str) or not all(outcome.checks.values()) for outcome in outcomes.values()):
        raise typer.Exit(1)


def choose_rows(names: list[str], *, with_peers: bool) -> dict[str, Row]:
    """The rows of these names, and that of the peers where one is installed; says which are not."""
    if unknown := [name for name in names if name not in ROWS]:
        raise typer.BadParameter(f"no row {unknown[0]!r}; known rows: {', '.join(ROWS)}", param_hint="--row")
    chosen = {name: ROWS[name] for name in names}
    if not with_peers:
        return chosen
    missing = peers.missing()
    for name in missing:
        _messages.print(
            f"{name} is not installed, so it is left out. To add it, install it into this environment: "
            f"python -m pip install '{peers.VERSIONS[name]}'",
            highlight=False,
        )
    return chosen if len(missing) == len(peers.PEERS) else chosen | {"peers": peers.run}


def _open(model: str, settings: Settings, ticker: Ticker) -> Bench:
    try:
        return Bench.open(model or str(demo_model(_messages.print)), settings, ticker)
    except LatentError as error:
        _messages.print(f"error: {error}", highlight=False)
        raise typer.Exit(1) from error


def _measure(bench: Bench, name: str, run: Row) -> report.Outcome:
    """Run one row under its own progress bar; what makes it fail is shown in its place and does not end the others."""
    bench.ticker.begin(name)
    try:
        return run(bench)
    except (AssertionError, LatentError, RuntimeError) as error:  # a `Mismatch` is one of the first
        return f"{type(error).__name__}: {error}"


def _show(facts: Mapping[str, object], outcomes: Mapping[str, report.Outcome], *, as_markdown: bool) -> None:
    if as_markdown:
        print(report.markdown(facts, outcomes))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(report.machine_line(facts), highlight=False)
    console.print(report.table(outcomes), highlight=False)


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = (TextColumn("{task.description:<14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_messages) as progress:
        yield progress


if __name__ == "__main__":
    app()
