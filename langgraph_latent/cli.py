"""The command line: `langgraph-latent demo` and `langgraph-latent trace`.

It knows options, exit codes and which stream gets what. The demo is in `demo`; typer and rich are imported only when a
command runs, because they are an extra.
"""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from langgraph_latent import __version__
from langgraph_latent.errors import LatentError

if TYPE_CHECKING:
    import typer

EXTRA = ("typer", "rich")
TRACE_COLUMNS = ("time s", "thread", "event", "edge", "tokens", "reused", "took ms", "detail")
TRACE_WIDTH = 160
TRACE_FIELDS = ("time", "thread_id", "event", "source", "node", "num_tokens", "duration_s", "success")


class TraceError(LatentError):
    """A file is not a trace."""


def main() -> None:
    """Run the command line. Errors raised on purpose are one line on stderr and exit code 1."""
    try:
        app = _app()
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in EXTRA:
            raise
        sys.exit(f"error: the command line needs the package {error.name!r}: pip install 'langgraph-latent[cli]'")
    try:
        app(prog_name="langgraph-latent")
    except LatentError as error:
        sys.exit(f"error: {' '.join(str(error).split())}")


def _app() -> "typer.Typer":
    import rich  # noqa: F401 - so that its absence is known before a command runs
    import typer

    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    def show_version(wanted: bool) -> None:
        if wanted:
            print(__version__)
            raise typer.Exit

    @app.callback()
    def root(
        version: Annotated[
            bool,
            typer.Option(
                "--version", metavar="", callback=show_version, is_eager=True, help="Print the version and exit."
            ),
        ] = False,
    ) -> None:
        """LangGraph graphs of local models whose edges carry KV caches instead of text."""

    @app.command()
    def demo(
        model: Annotated[
            str | None,
            typer.Option(
                metavar="FOLDER_OR_ID",
                help="A folder made by save_pretrained(), or a hub id. Default: SmolLM2-135M, made ready once.",
            ),
        ] = None,
        max_tokens: Annotated[int, typer.Option(min=1, help="How much each agent may write.")] = 48,
        threads: Annotated[
            int | None,
            typer.Option(
                min=1, help="CPU threads. Default: OMP_NUM_THREADS, else what a short measurement finds best."
            ),
        ] = None,
        trace: Annotated[
            Path | None,
            typer.Option(metavar="FILE.jsonl", dir_okay=False, help="Append every event of both runs to this file."),
        ] = None,
        as_json: Annotated[
            bool, typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else, to stdout.")
        ] = False,
    ) -> None:
        """Three agents over one report, with text edges and with latent edges: what each costs, and both answers."""
        _demo(model, max_tokens, threads, trace, as_json)

    @app.command("trace")
    def show_trace(
        file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, readable=True)],
    ) -> None:
        """Print a trace file, one line per event."""
        _trace(file)

    return app


def _demo(model: str | None, max_tokens: int, threads: int | None, trace: Path | None, as_json: bool) -> None:
    from langgraph_latent.demo.view import View, headline, print_result, terminal

    _check_writable(trace)
    console = terminal(stderr=as_json)
    with View(console) as view:
        if model is None:
            from langgraph_latent.demo.model import demo_model

            model = str(demo_model(view.stage))
        view.stage("importing torch")
        import torch

        from langgraph_latent.demo.run import run_demo
        from langgraph_latent.demo.threads import fastest_num_threads

        _silence_loading()
        num_threads = threads or fastest_num_threads()
        torch.set_num_threads(num_threads)
        console.print(headline(model, num_threads))
        stats = run_demo(model, max_tokens=max_tokens, trace=trace, watcher=view)
    if as_json:
        print(json.dumps({"threads": num_threads, **stats.to_dict()}, indent=2))
    else:
        print_result(console, stats)
        if trace:
            console.print(f"\nEvery event is in {trace}: langgraph-latent trace {trace}", soft_wrap=True)


def _check_writable(trace: Path | None) -> None:
    """Find out before the model loads."""
    if trace is not None:
        try:
            trace.open("a").close()
        except OSError as error:
            raise TraceError(f"the trace can't be written: {error}") from error


def _silence_loading() -> None:
    """The demo reports its own progress; transformers' bar would tear it."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _trace(file: Path) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from langgraph_latent.demo.view import terminal

    records = _read_trace(file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in TRACE_COLUMNS:
        is_number = name in ("time s", "tokens", "reused", "took ms")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name not in ("edge", "detail"))
    for record in records:
        cells = _trace_row(record, begin=records[0]["time"])
        table.add_row(*(Text(cell) for cell in cells), style="" if record["success"] else "red")
    terminal(width=TRACE_WIDTH).print(table if records else "the trace is empty")


def _read_trace(file: Path) -> list[dict[str, Any]]:
    """The events of a file that a `LatentTracer` wrote. Raises `TraceError`, naming the line."""
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            missing = [name for name in TRACE_FIELDS if name not in record]
        except (ValueError, TypeError) as error:
            raise TraceError(f"{file}, line {number} is no JSON record: {error}") from error
        if missing:
            raise TraceError(f"{file}, line {number} is no event of a LatentTracer: it has no {missing[0]!r}")
        records.append(record)
    return records


def _trace_row(record: dict[str, Any], begin: float) -> tuple[str, ...]:
    """The cells of `TRACE_COLUMNS`."""
    source, node = Path(record["source"]).name, record["node"]
    edge = f"{source} -> {node}" if source and node and source != node else source or node
    says = [str(record[name]) for name in ("route", "finish_reason", "to_route", "reason") if record.get(name)]
    return (
        f"{record['time'] - begin:.3f}",
        record["thread_id"],
        record["event"],
        edge,
        f"{record['num_tokens']:,}" if record["num_tokens"] else "",
        f"{record['cache_read']:,}" if record.get("cache_read") else "",
        f"{record['duration_s'] * 1000:,.1f}" if record["duration_s"] else "",
        ": ".join(says),
    )


if __name__ == "__main__":
    main()
