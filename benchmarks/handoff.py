"""`python -m benchmarks.handoff`: what handing over a KV cache saves, against text edges and stock transformers.

Sides of a comparison run in turn, in the same process and on the same weights; a number is the median of its rounds.
Only ratios have goals, but for the hand-over itself. A comparison whose sides must agree and do not fails the run.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks import cli
from benchmarks.harness import Settings
from benchmarks.rows import ROWS, peers

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    model: cli.Model = "",
    rounds: cli.Rounds = 5,
    threads: cli.Threads = 0,
    row: cli.RowNames = None,
    json_file: cli.JsonFile = None,
    markdown: cli.Markdown = False,
    quick: cli.Quick = False,
    with_peers: Annotated[bool, typer.Option("--peers", help="Add avp and latentmesh, if installed.")] = False,
) -> None:
    """Measure hand-overs of KV caches against text edges and stock transformers."""
    chosen = choose_rows(row, with_peers=with_peers)
    settings = Settings(1 if quick else rounds, quick)
    cli.measure("python -m benchmarks.handoff", chosen, model, settings, threads, cli.Output(markdown, json_file))


def choose_rows(names: list[str] | None, *, with_peers: bool) -> dict[str, cli.Row]:
    """The rows of these names, and that of the peers where one is installed; prints which are not."""
    chosen = cli.choose(names, ROWS)
    if not with_peers:
        return chosen
    missing = peers.missing()
    for name in missing:
        cli.missing(name, peers.VERSIONS[name])
    return chosen if len(missing) == len(peers.PEERS) else chosen | {"peers": peers.run}


if __name__ == "__main__":
    app()
