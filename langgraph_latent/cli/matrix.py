"""`langgraph-latent matrix`: what caches can pass between models, by their files alone. Nothing is loaded."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from langgraph_latent.cli.terminal import WIDE, AsJson, OutputError, refuse, terminal
from langgraph_latent.errors import ModelLoadError
from langgraph_latent.spec.compat import Level
from langgraph_latent.spec.spec import ModelSpec


def matrix(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", help="Folders, hub ids that are on disk, or config.json files; two or more."
        ),
    ],
    require: Annotated[
        str,
        typer.Option(
            metavar="LEVEL",
            help="The level that every pair must reach: exact, moved, sibling, adapted or text, or 0 to 4.",
        ),
    ] = Level.TEXT.name.lower(),
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", dir_okay=False, help="Also write a page with all reasons.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What caches can pass between models, by their files alone. Exit code 1 where a pair is below --require."""
    if len(models) < 2:
        raise typer.BadParameter("name two models or more", param_hint="MODEL")
    try:
        level = _level(require)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--require") from None
    raise typer.Exit(_matrix(models, level, html, as_json))


def _level(text: str) -> Level:
    """Raises `ValueError`, naming the levels."""
    named = {name: level for level in Level for name in (level.name.lower(), str(int(level)))}
    if text.lower() not in named:
        known = ", ".join(level.name.lower() for level in Level)
        raise ValueError(f"{text!r} is not a level; known: {known}, or 0 to 4")
    return named[text.lower()]


def _matrix(models: list[str], level: Level, html: Path | None, as_json: bool) -> int:
    from langgraph_latent.spec.matrix import Matrix, shortfalls, to_dict, to_html, to_terminal

    try:
        compared = Matrix.of(_read_specs(models))
    except ModelLoadError as error:
        return refuse(error, 2)
    if html is not None:
        try:
            html.write_text(to_html(compared), encoding="utf-8")
        except OSError as error:
            return refuse(OutputError(f"the page can't be written: {error}"), 2)
    if as_json:
        print(json.dumps(to_dict(compared, level), indent=2))
    else:
        terminal(width=WIDE).print(to_terminal(compared))
    for line in shortfalls(compared, level):
        print(line, file=sys.stderr)
    return 0 if compared.reaches(level) else 1


def _read_specs(models: list[str]) -> list[ModelSpec]:
    """Specs by files; a bar on stderr, if that is a terminal, shows weights being hashed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from langgraph_latent.spec.folder import folder_spec

    _hide_torch()
    specs = []
    columns = TextColumn("hashing {task.description}", markup=False), BarColumn(), DownloadColumn()
    console = terminal(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        for model in models:
            task = progress.add_task(Path(model).name, total=None, visible=False)

            def watch(done: int, total: int, task: Any = task) -> None:
                progress.update(task, completed=done, total=total, visible=done < total)

            specs.append(folder_spec(model, watch))
    return specs


def _hide_torch() -> None:
    """Keep transformers from importing torch in this process: it reads configs without it, in a third of the time."""
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # Python's way to say that there is none
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
