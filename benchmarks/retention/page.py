"""How results are shown: a table for a terminal, a page with goals, JSON with every sample. It measures nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from benchmarks.report import machine_line
from benchmarks.retention.samples import Interval, Tally, difference, estimate, estimates
from benchmarks.retention.trial import RECEIVER, SENDER, SUMMARISE, Size

HEADS = {
    "exact": "exact match",
    "log_prob": "log-prob",
    "kl": "KL",
    "kept": "kept",
    "entropy": "entropy",
    "seconds": "seconds",
    "num_bytes": "bytes",
}
KINDS = ("name", "number", "date", "negation", "place", "two-hop")


@dataclass(frozen=True)
class Outcome:
    """One model's results."""

    facts: Mapping[str, Any]
    size: Size
    titles: Mapping[str, str]
    tallies: Mapping[str, Tally]

    @property
    def rows(self) -> dict[str, Tally]:
        """The rows that were measured."""
        return {name: self.tallies[name] for name in self.titles if self.tallies[name].samples}


class Goal(NamedTuple):
    """What must hold: an estimate of at least `limit`, as shares of 1."""

    title: str
    measure: Callable[[Mapping[str, Tally]], Interval]
    limit: float


def _kept(row: str) -> Callable[[Mapping[str, Tally]], Interval]:
    return lambda tallies: estimate(tallies[row], "kept")


def _won(row: str) -> Callable[[Mapping[str, Tally]], Interval]:
    return lambda tallies: difference(tallies["append"], tallies[row], lambda sample: sample.exact)


GOALS = (
    Goal("append keeps", _kept("append"), 0.97),
    Goal("one block moved after another system prompt keeps, without repair", _kept("compose"), 0.97),
    Goal("a merge of three keeps, without repair", _kept("merge-3"), 0.9),
    Goal("a merge of three keeps, 15 % repaired (boundary)", _kept("merge-3-15%"), 0.94),
    Goal("a merge of three keeps, 15 % repaired (deviation)", _kept("merge-3-15%-deviation"), 0.94),
    Goal("append's exact match above that of a summary of 64 tokens", _won("summary-64"), 0.0),
    Goal("append's exact match above that of a summary of 256 tokens", _won("summary-256"), 0.0),
)


def goal_lines(outcome: Outcome) -> list[tuple[str, str, str, str]]:
    """Rows of four cells: what, measured, goal, verdict."""
    lines = []
    for goal in GOALS:
        measured = goal.measure(outcome.tallies)
        verdict = "met" if measured.value >= goal.limit else "not met"
        lines.append((goal.title, _cell("kept", measured), f"≥ {goal.limit * 100:.0f} %", verdict))
    return lines


def lost_to_summary(outcome: Outcome) -> str:
    """How many questions only a summary's reader answers."""
    append = {(each.unit, each.question): each.exact for each in outcome.tallies["append"].samples}
    parts = []
    for count in (64, 256):
        samples = outcome.tallies[f"summary-{count}"].samples
        lost = sum(each.exact > append[each.unit, each.question] for each in samples)
        parts.append(f"{lost} of {len(samples)} with {count} tokens")
    return f"Questions that the summary answers and append does not: {', '.join(parts)}."


def table_lines(outcome: Outcome) -> list[list[str]]:
    """One line of cells a row: title, n, columns."""
    lines = []
    for name, tally in outcome.rows.items():
        shown = estimates(tally)
        number = f"{len(tally.samples)} / {len(tally.costs)}"
        lines.append([outcome.titles[name], number, *(_cell(column, shown[column]) for column in HEADS)])
    return lines


def kind_lines(outcome: Outcome) -> list[list[str]]:
    """Per row, exact match and what is kept by kind of question."""
    lines = []
    for name, tally in outcome.rows.items():
        cells = []
        for kind in KINDS:
            part = Tally([each for each in tally.samples if each.kind == kind])
            values = (estimate(part, column).value * 100 for column in ("exact", "kept")) if part.samples else ()
            cells.append(" / ".join(f"{value:.0f}" for value in values))
        lines.append([outcome.titles[name], *cells])
    return lines


def _cell(column: str, shown: Interval) -> str:
    value, low, high = (_number(column, each) for each in shown)
    return f"{value} ({low} to {high})" if low != value or high != value else value


def _number(column: str, value: float) -> str:
    if column in ("exact", "kept"):
        return f"{value * 100:.1f} %"
    if column == "num_bytes":
        return (
            f"{value / 1e6:.2f} MB" if value >= 1e5 else f"{value / 1e3:.1f} kB" if value >= 1e4 else f"{value:.0f} B"
        )
    if column == "seconds":
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
    return f"{value:.1e}" if column == "kl" and 0 < value < 1e-3 else f"{value:.3f}"


def terminal(outcome: Outcome) -> list[Table]:
    """For a terminal: values without their intervals, and the goals."""
    rows = Table("", "n", *HEADS.values())
    for line in table_lines(outcome):
        rows.add_row(*(cell.partition(" (")[0] if at > 1 else cell for at, cell in enumerate(line)))
    goals = Table("", "measured (95 %)", "goal", "")
    for cells in goal_lines(outcome):
        goals.add_row(*cells)
    return [rows, goals]


def markdown(command: str, plot: Path, outcomes: Sequence[Outcome]) -> str:
    """The page."""
    models = "\n\n".join(_section(outcome) for outcome in outcomes)
    return f"""{_INTRODUCTION}
Measured by `{command}`.

![share kept against seconds and bytes, one point a row]({plot.name})

{_READING}
{models}
"""


def _section(outcome: Outcome) -> str:
    facts, size = outcome.facts, outcome.size
    wide = ["", "n", *HEADS.values()]
    return "\n".join(
        [
            f"## {facts['model']}",
            "",
            f"{machine_line(facts)}; load at the start {facts['load_at_start']}. {size.docs} documents, "
            f"{size.summaries} of them summarised. Layers: the most important ones "
            "(`langgraph_latent.evaluation.importance`).",
            "",
            *_markdown_table(["", "measured", "goal", ""], goal_lines(outcome)),
            "",
            lost_to_summary(outcome),
            "",
            *_markdown_table(wide, table_lines(outcome)),
            "",
            "By kind of question, exact match / kept, in %:",
            "",
            *_markdown_table(["", *KINDS], kind_lines(outcome)),
        ]
    )


def _markdown_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines)]


def to_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Everything, every sample too."""
    return {"models": [_model(outcome) for outcome in outcomes]}


def _model(outcome: Outcome) -> dict[str, Any]:
    goals = [dict(zip(("title", "measured", "goal", "verdict"), line, strict=True)) for line in goal_lines(outcome)]
    rows = [
        {
            "name": name,
            "title": outcome.titles[name],
            "figures": {column: each._asdict() for column, each in estimates(tally).items()},
            "samples": [each._asdict() for each in tally.samples],
            "costs": [each._asdict() for each in tally.costs],
        }
        for name, tally in outcome.rows.items()
    ]
    size = asdict(outcome.size)
    return {"machine": dict(outcome.facts), "size": size, "goals": goals, "rows": rows}


_INTRODUCTION = """# What a hand-over keeps

What it costs in answers when agents exchange caches instead of text. A sender reads a generated document of facts; a
receiver is asked about it. Each row is another way for the receiver to come to know it. This page is written by the
benchmark.
"""

_READING = f"""How to read the tables:

* The answer's beginning ("It was sold on") is given, the answer itself (1 to 6 tokens) fed token by token. *Exact
  match*: every token is the likeliest one, which is what greedy decoding would write. *Log-prob*: of the answer, per
  token.
* *KL*: from the distributions with the full text to this row's, per token of the answer. Full text is the very same
  tokens read in one go, from the first one.
* *Kept*: 1 - KL / KL without context, both sums over the same questions. 100 % answers as with the full text, 0 % as
  one who read nothing. Rows of other tokens (no context, summaries) are compared at the answer's tokens. It is
  lenient: one who knows a document well, but not which of three a question is about, keeps most of it. Look at exact
  match too.
* *Entropy*: of this row's distributions minus of those with the full text: above 0 is less sure.
* *Seconds*: until the receiver can run. Text: a summary's share of its batch's time plus reading it, or re-reading all
  of the prompt. Caches: looking up, moving, repairing. *Bytes*: of the text, or of the keys and values taken over.
* *n*: questions / hand-overs. Rows that are exact by construction, and summaries, which are slow, are asked about fewer
  documents; so are variants. In brackets: 95 %, by bootstrap over whole documents (over cases, for several documents).
* Merges are asked about each of their documents, and two-hop questions: one document names who keeps a key, another
  where that person stays.

Prompts:

* the receiver's system prompt: "{RECEIVER}"
* the sender's, where it is another: "{SENDER}"
* asking for a summary: "{SUMMARISE}"
"""
