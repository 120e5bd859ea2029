"""`python -m langgraph_latent.testing`: the conformance suite over the catalogue, as a table per model type."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from langgraph_latent.testing.catalogue import LEFT_OUT, catalogue
from langgraph_latent.testing.conformance import Outcome, conform_toy
from langgraph_latent.testing.pages import as_json, as_markdown

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[TYPE]...", help="Model types. Default: all.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE.md", help="Write the table as a page.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE.json", help="Write every cell.")] = None,
) -> None:
    """Test what the library promises of each model type's caches. Exit code 1 where a promise does not hold."""
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    known = catalogue()
    if unknown := sorted(set(names or ()) - known.keys()):
        raise typer.BadParameter(f"unknown model types: {', '.join(unknown)}")
    console = Console(stderr=True)
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as empty, _progress(console) as progress:
        os.environ["LANGGRAPH_LATENT_CACHE"] = empty  # nothing that a probe found earlier is believed
        for name in progress.track(names or sorted(known), description="conformance"):
            outcomes.append(conform_toy(known[name]))
            for prop, detail in outcomes[-1].wrong.items():
                console.print(f"[red]{name}: {prop}: {detail}", highlight=False)
    if markdown:
        markdown.write_text(as_markdown(outcomes, LEFT_OUT))
    if json_file:
        json_file.write_text(as_json(outcomes, LEFT_OUT))
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    console.print(f"{len(outcomes)} model types, {wrong} with a promise that does not hold", highlight=False)
    raise typer.Exit(bool(wrong))


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


if __name__ == "__main__":
    app()
