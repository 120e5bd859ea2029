"""`python -m benchmarks.swap`: what ordinary LangGraph graphs gain when `ChatLatent` takes `ChatHuggingFace`'s place.

No graph here knows of handles: the model is the only thing that differs. Sides run in turn, in the same process, on the
same weights and with greedy decoding, and must write the same texts; a number is the median of its rounds.
"""

from __future__ import annotations

import typer

from benchmarks import cli
from benchmarks.harness import Settings
from benchmarks.swap_rows import NEEDS, ROWS

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
) -> None:
    """Measure LangGraph graphs with ChatLatent against the same graphs with ChatHuggingFace."""
    settings = Settings(1 if quick else rounds, quick)
    rows = choose_rows(row)
    cli.measure("python -m benchmarks.swap", rows, model, settings, threads, cli.Output(markdown, json_file))


def choose_rows(names: list[str] | None) -> dict[str, cli.Row]:
    """The rows of these names without those that need a package which is not installed; prints which."""
    chosen = cli.choose(names, ROWS)
    for need in NEEDS:
        lacking = [name for name in chosen if name in need.rows and not need.is_installed()]
        if lacking:
            cli.missing(
                f"{need.package}, which {', '.join(lacking)} need{'s' * (len(lacking) == 1)},", need.requirement
            )
        chosen = {name: run for name, run in chosen.items() if name not in lacking}
    return chosen


if __name__ == "__main__":
    app()
