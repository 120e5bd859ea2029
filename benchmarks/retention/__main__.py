"""`python -m benchmarks.retention`: what it costs in answers when agents exchange caches instead of text.

Rows are asked the same questions about the same generated documents, by teacher forcing; nothing is sampled but the
summaries, greedily.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import transformers
import typer
from rich.console import Console

from benchmarks import cli, report
from benchmarks.harness import Ticker, default_threads
from benchmarks.retention import page, plot
from benchmarks.retention.page import Outcome
from benchmarks.retention.trial import Size, Trial, open_workspace
from langgraph_latent import ChatLatent
from langgraph_latent.demo.model import demo_model
from langgraph_latent.disk_cache import cache_dir
from langgraph_latent.errors import LatentError

LARGER = "qwen2.5-coder-0.5b-instruct"
"""The second model, measured where its folder is among the user's models."""
LARGE_PARAMETERS = 250_000_000
"""A model of more takes `--docs-large` documents."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    models: Annotated[list[str] | None, typer.Option(help="Folder or hub id; repeatable.")] = None,
    docs: Annotated[int, typer.Option(min=1, help="Documents.")] = 200,
    summaries: Annotated[int, typer.Option(min=1, help="Of them, those that are summarised: slow.")] = 32,
    docs_large: Annotated[int, typer.Option(min=1, help="Documents for a model of 250M parameters or more.")] = 24,
    summaries_large: Annotated[int, typer.Option(min=1, help="Of them, those that are summarised.")] = 4,
    threads: cli.Threads = 0,
    json_file: cli.JsonFile = None,
    page_file: Annotated[
        Path | None, typer.Option("--page", help="Write the page to this file, and its plot beside it as PNG.")
    ] = None,
) -> None:
    """Measure what hand-overs keep of the answers, and what they cost."""
    _check(json_file, page_file)
    torch.set_num_threads(threads or default_threads())
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    small, large = Size(docs, min(summaries, docs)), Size(docs_large, min(summaries_large, docs_large))
    outcomes = []
    for name in models or _default_models():
        outcomes.append(_measure(name, small, large))
        _show(outcomes[-1])
    if json_file:
        json_file.write_text(json.dumps(page.to_json(outcomes), allow_nan=False) + "\n", encoding="utf-8")
    if page_file:
        picture = page_file.with_suffix(".png")
        plot.draw(outcomes, picture)
        page_file.write_text(page.markdown(_command(), picture, outcomes), encoding="utf-8")


def _check(json_file: Path | None, page_file: Path | None) -> None:
    """Refuse before hours of work what can't be written after them."""
    for option, file in (("--json", json_file), ("--page", page_file)):
        if file and not file.parent.is_dir():
            raise typer.BadParameter(f"there is no folder {file.parent}", param_hint=option)
    if page_file and not plot.is_installed():
        raise typer.BadParameter(
            "the plot needs matplotlib, which is not installed. Leave --page out, or install it into this environment: "
            "python -m pip install 'langgraph-latent[bench]'",
            param_hint="--page",
        )


def _default_models() -> list[str]:
    larger = cache_dir() / "models" / LARGER
    return [str(demo_model(cli.messages.print)), *([str(larger)] if (larger / "config.json").is_file() else [])]


def _measure(name: str, small: Size, large: Size) -> Outcome:
    try:
        with open_workspace() as workspace, cli.progress() as progress:
            ticker = Ticker(progress)
            chat = ChatLatent(model=name, workspace=workspace).load()
            model = chat.resident()
            facts = report.machine(name, model.spec.dtype, str(model.device))
            if warning := report.busy_warning(facts):
                cli.messages.print(warning)
            is_large = sum(each.numel() for each in model.model.parameters()) > LARGE_PARAMETERS
            ticker.begin(str(facts["model"])[:14])
            trial = Trial(chat, workspace, large if is_large else small, ticker)
            trial.run()
            return Outcome(facts, trial.size, trial.titles, trial.tallies)
    except LatentError as error:
        cli.messages.print(f"error: {error}", highlight=False)
        raise typer.Exit(1) from error


def _show(outcome: Outcome) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(report.machine_line(outcome.facts), highlight=False)
    for table in page.terminal(outcome):
        console.print(table, highlight=False)


def _command(arguments: Sequence[str] | None = None) -> str:
    """What was called, without folders."""
    given = sys.argv[1:] if arguments is None else arguments
    return " ".join(["python -m benchmarks.retention", *(Path(each).name if "/" in each else each for each in given)])


if __name__ == "__main__":
    app()
