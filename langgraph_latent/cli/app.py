"""The command line: `langgraph-latent demo`, `trace`, `matrix`, `probe` and `measure`.

It knows options, exit codes and which stream gets what. The demo is in `demo`; typer and rich are imported only when a
command runs, because they are an extra.
"""

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from langgraph_latent import __version__
from langgraph_latent.errors import ConfigError, LatentError, ModelLoadError, PromptError, UnsupportedLayerError
from langgraph_latent.spec.compat import Level

if TYPE_CHECKING:
    import typer

    from langgraph_latent.spec.spec import ModelSpec

EXTRA = ("typer", "rich")
TRACE_COLUMNS = ("time s", "thread", "event", "edge", "tokens", "reused", "took ms", "detail")
WIDE = 160
"""Columns of what has long lines, on a terminal that has them."""
TRACE_FIELDS = ("time", "thread_id", "event", "source", "node", "num_tokens", "duration_s", "success")


class TraceError(LatentError):
    """A file is not a trace."""


class OutputError(LatentError):
    """A result can't be written where it was wanted."""


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

    @app.command()
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
        as_json: Annotated[
            bool, typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else, to stdout.")
        ] = False,
    ) -> None:
        """What caches can pass between models, by their files alone. Exit code 1 where a pair is below --require."""
        if len(models) < 2:
            raise typer.BadParameter("name two models or more", param_hint="MODEL")
        try:
            level = _level(require)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--require") from None
        raise typer.Exit(_matrix(models, level, html, as_json))

    @app.command()
    def probe(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder made by save_pretrained(), or a hub id.")],
        as_json: Annotated[
            bool, typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else, to stdout.")
        ] = False,
    ) -> None:
        """Load a model and say what can be done with its caches. Exit code 1 where they can't be continued."""
        raise typer.Exit(_probe(model, as_json))

    @app.command()
    def measure(
        model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder made by save_pretrained(), or a hub id.")],
        tasks: Annotated[
            Path, typer.Argument(metavar="TASKS.jsonl", help="An object a line: context, question and answer, as text.")
        ],
        system: Annotated[
            str | None,
            typer.Option(metavar="TEXT", help="The receiver's system prompt. Default: a line that asks for few words."),
        ] = None,
        repair: Annotated[
            float, typer.Option(metavar="RATIO", help="The part of what is moved that a repair computes anew.")
        ] = 0.15,
        strategy: Annotated[
            str,
            typer.Option(metavar="NAME", help="Which part: boundary (of blocks) or deviation (largest changes)."),
        ] = "boundary",
        think: Annotated[
            int,
            typer.Option(min=0, metavar="STEPS", help="Also measure latent steps, and whether edges may use them."),
        ] = 0,
        decode: Annotated[
            int,
            typer.Option(min=0, metavar="TOKENS", help="Also decode so many tokens and compare the words."),
        ] = 0,
        limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first tasks.")] = None,
        as_json: Annotated[
            bool, typer.Option("--json", metavar="", help="Print the result as JSON, and nothing else, to stdout.")
        ] = False,
    ) -> None:
        """How much of a text gets through as a cache: continued, moved or repaired. Exit code 2 for unusable input."""
        options = {"steps": think, "max_tokens": decode} | ({} if system is None else {"system": system})
        raise typer.Exit(_measure(model, tasks, repair, strategy, options, limit, as_json))

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
    terminal(width=WIDE).print(table if records else "the trace is empty")


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


def _level(text: str) -> Level:
    """Raises `ValueError`, naming the levels."""
    named = {name: level for level in Level for name in (level.name.lower(), str(int(level)))}
    if text.lower() not in named:
        raise ValueError(f"{text!r} is no level; known: {', '.join(level.name.lower() for level in Level)}, or 0 to 4")
    return named[text.lower()]


def _matrix(models: list[str], level: Level, html: Path | None, as_json: bool) -> int:
    from langgraph_latent.demo.view import terminal
    from langgraph_latent.spec.matrix import Matrix, shortfalls, to_dict, to_html, to_terminal

    try:
        matrix = Matrix.of(_read_specs(models))
    except ModelLoadError as error:
        return _refuse(error, 2)
    if html is not None:
        try:
            html.write_text(to_html(matrix), encoding="utf-8")
        except OSError as error:
            return _refuse(OutputError(f"the page can't be written: {error}"), 2)
    if as_json:
        print(json.dumps(to_dict(matrix, level), indent=2))
    else:
        terminal(width=WIDE).print(to_terminal(matrix))
    for line in shortfalls(matrix, level):
        print(line, file=sys.stderr)
    return 0 if matrix.reaches(level) else 1


def _read_specs(models: list[str]) -> "list[ModelSpec]":
    """Specs by files; a bar on stderr, if that is a terminal, shows weights being hashed."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from langgraph_latent.demo.view import terminal
    from langgraph_latent.spec.folder import folder_spec

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


def _probe(model: str, as_json: bool) -> int:
    from langgraph_latent.demo.view import terminal

    console = terminal(stderr=as_json)
    try:
        with console.status("loading the model ..."):
            spec = _load_spec(model)
    except UnsupportedLayerError as error:
        return _refuse(error, 1)
    except ModelLoadError as error:
        return _refuse(error, 2)
    if as_json:
        print(json.dumps(_probe_to_dict(spec), indent=2))
    else:
        console.print(_probe_table(spec))
    return 0 if spec.capabilities.can("append") else 1


def _load_spec(model: str) -> "ModelSpec":
    """Raises `ModelLoadError` before torch is imported where there are no weights to load."""
    path = Path(model).expanduser()
    has_weights = any(any(path.glob(pattern)) for pattern in ("*.safetensors", "*.bin"))  # the loader refuses *.bin
    if path.is_file() or ((path / "config.json").is_file() and not has_weights):
        raise ModelLoadError(
            f"{model!r} is no folder with weights: probe needs the weights; for configs use `langgraph-latent matrix`"
        )
    from langgraph_latent.engine.loader import ModelKey, acquire, release

    _silence_loading()
    key = ModelKey(model).canonical()
    spec = acquire(key).spec
    release(key)
    return spec


def _probe_to_dict(spec: "ModelSpec") -> dict[str, Any]:
    from dataclasses import asdict

    from langgraph_latent.spec.spec import CAPABILITIES

    return {
        **asdict(spec),
        "identity": spec.identity,
        "capabilities": {
            name: {"can": spec.capabilities.can(name), "reason": spec.capabilities.refusal(name)}
            for name in CAPABILITIES
        },
        "positions": spec.capabilities.positions,
        "is_probed": spec.capabilities.is_probed,
    }


def _probe_table(spec: "ModelSpec") -> Any:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from langgraph_latent.spec.spec import CAPABILITIES

    layers: dict[str, int] = {}
    for layer in spec.layers:
        window = f", window {layer.window:,}" if layer.window else ""
        heads = f", {layer.kv_heads} heads of {layer.key_dim} and {layer.value_dim} channels" if layer.kv_heads else ""
        name = f"{layer.kind}{window}{heads}"
        layers[name] = layers.get(name, 0) + 1
    rows: list[tuple[str, str | Text]] = [
        (
            "model",
            f"{spec.name} ({spec.architecture}, {spec.dtype}{f', {spec.quantization}' * bool(spec.quantization)})",
        ),
        ("identity", spec.identity),
        ("layers", "\n".join(f"{count} x {name}" for name, count in layers.items())),
        ("positions", spec.capabilities.positions or "not known"),
        ("longest sequence", f"{spec.max_positions:,} tokens" if spec.max_positions else "not known"),
        ("bytes per token", f"{spec.bytes_per_token:,}"),
    ]
    for name in CAPABILITIES:
        refusal = spec.capabilities.refusal(name)
        rows.append((name, Text(f"no: {refusal}", "red") if refusal else Text("yes", "green")))
    if not spec.capabilities.is_probed:
        rows.append(("probed", "no: this is what the kinds of its layers prove"))
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in rows:
        table.add_row(label, Text(value) if isinstance(value, str) else value)
    return table


def _measure(
    model: str, file: Path, ratio: float, strategy: Any, options: dict[str, Any], limit: int | None, as_json: bool
) -> int:
    from rich.progress import Progress

    from langgraph_latent.demo.view import terminal
    from langgraph_latent.evaluation.measure import Setup, measure_model, to_dict, to_terminal
    from langgraph_latent.evaluation.metrics import read_tasks
    from langgraph_latent.handle.provenance import Repair

    console = terminal(stderr=True)
    try:
        setup = Setup(repair=Repair(ratio, strategy), **options)
        tasks = read_tasks(file)[:limit]
        _silence_loading()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("measuring", total=setup.num_runs(tasks))
            result = measure_model(model, tasks, setup, lambda: progress.advance(bar))
    except (ConfigError, ModelLoadError, PromptError, UnsupportedLayerError) as error:
        return _refuse(error, 2)
    if as_json:
        print(json.dumps({"model": model, "system": setup.system, **to_dict(result)}, indent=2))
    else:
        terminal(width=WIDE).print(to_terminal(result))
    return 0


def _refuse(error: LatentError, code: int) -> int:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
