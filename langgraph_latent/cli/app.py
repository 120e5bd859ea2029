"""The command line's entry point, `main`, and the typer app of all commands; each command is a file of this package.

typer and rich are an extra, so they are imported when `main` runs, and torch only where a command needs it.
"""

import sys
from typing import Annotated, Any

from langgraph_latent import __version__
from langgraph_latent.errors import LatentError

EXTRA = ("typer", "rich")


def main() -> None:
    """Run the command line. Errors raised on purpose are one line on stderr and exit code 1."""
    try:
        from langgraph_latent.cli.terminal import error_line

        app = _app()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"error: the command line needs the package {error.name!r}: pip install 'langgraph-latent[cli]'")
    try:
        app(prog_name="langgraph-latent")
    except LatentError as error:
        sys.exit(error_line(error))


def _app() -> Any:
    import typer

    from langgraph_latent.cli.demo import demo
    from langgraph_latent.cli.matrix import matrix
    from langgraph_latent.cli.measure import measure
    from langgraph_latent.cli.probe import probe
    from langgraph_latent.cli.trace import trace

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    version = typer.Option(
        "--version", metavar="", callback=_show_version, is_eager=True, help="Print the version and exit."
    )

    @app.callback()
    def root(version: Annotated[bool, version] = False) -> None:
        """LangGraph graphs of local models whose edges carry KV caches instead of text."""

    for command in (demo, trace, matrix, probe, measure):
        app.command()(command)
    return app


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        print(__version__)
        sys.exit()
