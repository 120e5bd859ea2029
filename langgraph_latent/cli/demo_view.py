"""How the demo looks in a terminal: progress while it runs, then tables. It knows the run's figures, not graphs."""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from langgraph_latent.demo.stats import AgentStats, DemoStats, EdgeStats, RunStats, Watcher

EDGES = {"text": "text edges", "latent": "latent edges"}


class View(Watcher):
    """A context manager: on a terminal, the bottom line is alive as long as it lasts."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = Status("", console=console)
        self._run = ""
        self._answer = ""
        self._begin = 0.0

    def __enter__(self) -> View:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._status.stop()

    def stage(self, text: str) -> None:
        self._status.update(Text(f"{text} ..."))
        if not self._console.is_terminal:
            self._console.print(f"{text} ...")

    def agent_started(self, run: str, agent: str) -> None:
        if run != self._run:
            self._run = run
            self._console.print(Text(f"\n{EDGES[run]}", style="title"))
        self._answer, self._begin = "", time.perf_counter()
        self._status.update(Text(f"{agent} reads ..."))

    def agent_wrote(self, run: str, agent: str, piece: str) -> None:
        self._answer += piece
        self._status.update(Text.assemble(f"{agent}: ", (_one_line(self._answer), "written")))

    def agent_finished(self, run: str, stats: AgentStats) -> None:
        seconds = time.perf_counter() - self._begin
        if not (stats.tokens_read or stats.tokens_written):
            did = "passes the report on"
        else:
            parts = [f"reads {_count(stats.tokens_read)} tokens"]
            parts += [f"reuses {_count(stats.tokens_reused)}"] if stats.tokens_reused else []
            parts += [f"writes {_count(stats.tokens_written)}"] if stats.tokens_written else []
            did = f"{', '.join(parts)} ({_seconds(seconds)})"
        self._console.print(Text.assemble("  ", (f"{stats.name:<8}", "name"), f" {did}"))
        if self._answer:
            self._console.print(Padding(Text(_one_line(self._answer), style="written"), (0, 0, 0, 11)))


def print_result(console: Console, stats: DemoStats) -> None:
    """The run table, the comparison, both runs' answers and whether they are equal."""
    console.print()
    console.print(_cost_table(stats))
    console.print(_comparison_table(stats))
    console.print("hand-over: from the sender being done until the receiver's first token\n", style="note")
    console.print(_answer_table(stats))
    console.print(_verdict(stats))


def _cost_table(stats: DemoStats) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="what each agent did", title_justify="left", title_style="title")
    table.add_column("edges")
    table.add_column("agent", style="name")
    for name in ("tokens read", "reused", "written", "hand-over", "reading", "writing", "total"):
        table.add_column(name, justify="right")
    for run in stats.runs:
        handovers: dict[str, EdgeStats] = {edge.target: edge for edge in run.edges}
        for agent in run.agents:
            edge = handovers.get(agent.name)
            counts = (agent.tokens_read, agent.tokens_reused, agent.tokens_written)
            times = (edge.handover_s if edge else 0.0, agent.prefill_s, agent.decode_s)
            table.add_row(
                run.name if agent is run.agents[0] else "",
                agent.name,
                *(_count(count) for count in counts),
                *(_seconds(seconds) for seconds in times),
            )
        counts = (run.tokens_read, run.tokens_reused, run.tokens_written)
        total = (*(_count(count) for count in counts), "", "", "", _seconds(run.total_s))
        table.add_row("", "all", *total, style="title", end_section=True)
    return table


def _comparison_table(stats: DemoStats) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="what latent edges save", title_justify="left", title_style="title")
    table.add_column("")
    for name in ("text", "latent", "ratio"):
        table.add_column(name, justify="right")
    for text, latent in zip(stats.text.edges, stats.latent.edges, strict=True):
        times = text.handover_s, latent.handover_s
        name = f"hand-over {text.source} -> {text.target}"
        table.add_row(name, *(_seconds(seconds) for seconds in times), _ratio(*times))
    read = stats.text.tokens_read, stats.latent.tokens_read
    table.add_row("tokens read", *(_count(count) for count in read), _ratio(*read))
    total = stats.text.total_s, stats.latent.total_s
    table.add_row("total time", *(_seconds(seconds) for seconds in total), _ratio(*total))
    return table


def _answer_table(stats: DemoStats) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="answers", title_justify="left", title_style="title")
    table.add_column("agent", style="name")
    for run in stats.runs:
        table.add_column(EDGES[run.name], ratio=1)
    for agent in stats.text.answers:
        table.add_row(agent, *(Text(_answer_of(run, agent)) for run in stats.runs))
    return table


def _verdict(stats: DemoStats) -> Text:
    other_tokens = "the tokenizer makes other tokens of an answer than those that were sampled"
    if stats.same_answers:
        count = _count(len(stats.text.token_ids))
        why = f"both runs saw and wrote the same {count} tokens" if stats.same_tokens else f"even so, {other_tokens}"
        return Text.assemble(("The answers are equal", "verdict.good"), f": {why}.")
    if stats.dtype == "float32":
        why = f"In float32 that happens only where {other_tokens}."
    else:
        why = f"In {stats.dtype}, two ways to compute the same can differ in the last bits, and then in a word."
    return Text.assemble(("The answers differ", "verdict.bad"), f". {why}")


def headline(model: str, threads: int) -> Text:
    """What is about to happen."""
    return Text.assemble(
        ("langgraph-latent demo", "title"),
        f"   reader -> analyst -> router over one report\nmodel {Path(model).name or model}, CPU threads {threads}",
    )


def _answer_of(run: RunStats, agent: str) -> str:
    return _one_line(run.answers[agent]) or "(nothing)"


def _one_line(text: str) -> str:
    """What a model wrote, with nothing in it that could move a terminal's cursor."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text).split())


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"


def _seconds(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.{0 if seconds >= 0.01 else 2}f} ms"


def _ratio(text: float, latent: float) -> str:
    return f"{text / latent:.1f}x"
