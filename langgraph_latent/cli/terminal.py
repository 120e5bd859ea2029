"""Where the command line writes and in which colours: consoles, styles, an error's one line, and the shared options.

It knows rich and typer; nothing of what a command shows.
"""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.theme import Theme

from langgraph_latent.errors import LatentError

WIDTH = 100
WIDE = 160
"""Columns of what has long lines, on a terminal that has them."""
STYLES = {
    "name": "cyan",
    "good": "green",
    "bad": "red",
    "title": "bold",
    "note": "dim",
    "written": "italic",  # by a model
    "verdict.good": "bold green",
    "verdict.bad": "bold red",
    "level.exact": "bold green",
    "level.moved": "green",
    "level.sibling": "yellow",
    "level.adapted": "magenta",
    "level.text": "red",
}
"""What is shown is styled by these names alone: this is the place to change a colour."""

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder made by save_pretrained(), or a hub id.")]
AsJson = Annotated[
    bool, typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else, to stdout.")
]


class OutputError(LatentError):
    """A result can't be written where it was wanted."""


def terminal(*, stderr: bool = False, width: int = WIDTH) -> Console:
    """A console at most `width` columns wide; a pipe or a file is as wide as that."""
    console = Console(stderr=stderr, highlight=False, theme=Theme(STYLES))
    console.width = min(console.width, width) if console.is_terminal else width
    return console


def error_line(error: LatentError) -> str:
    """An error in one line."""
    return f"error: {' '.join(str(error).split())}"


def refuse(error: LatentError, code: int) -> int:
    """Print an error's line to stderr; the exit code."""
    print(error_line(error), file=sys.stderr)
    return code


def silence_loading() -> None:
    """The commands report their own progress; transformers' bar would tear it."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
