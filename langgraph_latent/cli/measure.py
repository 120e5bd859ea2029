"""`langgraph-latent measure`: how much of a text gets through as a cache, over the tasks of a file, as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from langgraph_latent.cli.terminal import WIDE, AsJson, Model, refuse, silence_loading, terminal
from langgraph_latent.errors import ConfigError, ModelLoadError, PromptError, UnsupportedLayerError

if TYPE_CHECKING:  # they import torch
    from langgraph_latent.evaluation.measure import Result
    from langgraph_latent.evaluation.metrics import Estimate
    from langgraph_latent.router.parity import Parity

EXPLAINED = """\
none: the question alone; text: all of it re-read; append: its cache continued; compose: moved to after the system
prompt, and partly recomputed with +repair; think: append, then latent steps
log-likelihood: of the given answers, nats a token; KL: from the full text's predictions, nats a token
semantic entropy: of the first token, less that after the full text, nats; intervals: 95 %, bootstrap over tasks"""


def measure(
    model: Model,
    tasks: Annotated[
        Path, typer.Argument(metavar="TASKS.jsonl", help="An object a line: context, question and answer, as text.")
    ],
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="The receiver's system prompt. Default: a line that asks for few words."),
    ] = None,
    repair: Annotated[
        float, typer.Option(metavar="RATIO", help="The part of what is moved that a repair recomputes.")
    ] = 0.15,
    strategy: Annotated[
        str, typer.Option(metavar="NAME", help="Which part: boundary (of blocks) or deviation (largest changes).")
    ] = "boundary",
    think: Annotated[
        int, typer.Option(min=0, metavar="STEPS", help="Also measure latent steps, and whether edges may use them.")
    ] = 0,
    decode: Annotated[
        int, typer.Option(min=0, metavar="TOKENS", help="Also decode so many tokens and compare the words.")
    ] = 0,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first tasks.")] = None,
    as_json: AsJson = False,
) -> None:
    """How much of a text gets through as a cache: continued, moved or repaired. Exit code 2 for unusable input."""
    options = {"steps": think, "max_tokens": decode} | ({} if system is None else {"system": system})
    raise typer.Exit(_measure(model, tasks, repair, strategy, options, limit, as_json))


def _measure(
    model: str, file: Path, ratio: float, strategy: Any, options: dict[str, Any], limit: int | None, as_json: bool
) -> int:
    from rich.progress import Progress

    from langgraph_latent.evaluation.measure import Setup, measure_model
    from langgraph_latent.evaluation.tasks import read_tasks
    from langgraph_latent.handle.repair import Repair

    console = terminal(stderr=True)
    try:
        setup = Setup(repair=Repair(ratio, strategy), **options)
        tasks = read_tasks(file)[:limit]
        silence_loading()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
            bar = progress.add_task("measuring", total=setup.num_runs(tasks))
            result = measure_model(model, tasks, setup, lambda: progress.advance(bar))
    except (ConfigError, ModelLoadError, PromptError, UnsupportedLayerError) as error:
        return refuse(error, 2)
    if as_json:
        print(json.dumps({"model": model, "system": setup.system, **_to_dict(result)}, indent=2))
    else:
        terminal(width=WIDE).print(_table(result))
    return 0


def _to_dict(result: Result) -> dict[str, Any]:
    ways = {
        way: {"refusal": each.refusal} if each.refusal else _figures(each.figures) for way, each in result.ways.items()
    }
    parity = result.parity
    return {"ways": ways, **({"parity": {**vars(parity), "refusal": parity.refusal}} if parity else {})}


def _figures(figures: Mapping[str, Estimate]) -> dict[str, Any]:
    return {name: estimate._asdict() for name, estimate in figures.items()}


def _table(result: Result) -> Group:
    """A table of the ways, each figure with its interval below, then refusals and the verdict on latent steps."""
    is_decoded = any("rouge_l" in each.figures for each in result.ways.values())
    columns = COLUMNS if is_decoded else COLUMNS[:-2]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", style="name", no_wrap=True)
    for name in ("n", *(column.title for column in columns)):
        table.add_column(name, justify="right")
    for way, each in result.ways.items():
        num = str(each.figures["likelihood"].num) if each.figures else "-"
        table.add_row(way, num, *(column.cell(each.figures.get(column.figure)) for column in columns))
    lines = [Text(f"{way}: {each.refusal}", "bad") for way, each in result.ways.items() if each.refusal]
    lines += [_verdict(result.parity)] if result.parity else []
    return Group(table, *lines, Text(EXPLAINED, "note"))


class Column(NamedTuple):
    """A figure's title, and how it is written."""

    title: str
    figure: str
    form: str = ".3f"
    unit: str = ""

    def cell(self, estimate: Estimate | None) -> str:
        """A mean and, below it, its interval."""
        if estimate is None:
            return "-"
        mean, low, high = (self._written(value) for value in estimate[1:])
        return f"{mean}{self.unit}\n{low} to {high}{self.unit}"

    def _written(self, value: float) -> str:
        return format(round(100 * value if self.unit else value, 3) + 0.0, self.form)  # + 0.0: no minus before a zero


COLUMNS = (
    Column("exact\nmatch", "exact_match", ".0f", " %"),
    Column("log-\nlikelihood", "likelihood", ".2f"),
    Column("KL", "kl"),
    Column("top-1\nagreement", "agreement", ".0f", " %"),
    Column("semantic\nentropy", "semantic_entropy", "+.3f"),
    Column("decoded\nmatch", "decoded_match", ".0f", " %"),
    Column("ROUGE-L", "rouge_l", ".2f"),
)


def _verdict(parity: Parity) -> Text:
    if parity.refusal:
        return Text(f"{parity.refusal}: no edge hands them over", "bad")
    gain = f"{parity.gain:+.3f} nats a token ({parity.low:+.3f} to {parity.high:+.3f})"
    return Text(f"edges with EdgePolicy(latent_steps=True) may hand over this model's latent steps: {gain}", "good")
