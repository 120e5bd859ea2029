"""Every pair of several models, compared, and the result as a terminal table, as JSON or as an HTML page.

Pure: specs in, values and text out. It knows neither files nor models; rich is imported where it draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from langgraph_latent.spec.compat import MAY_BE_UNKNOWN, Compatibility, Difference, Level, compare
from langgraph_latent.spec.spec import ModelSpec

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

JSON_VERSION = 2
NAMED_FIELDS = 3
"""How many differing fields a line names."""
WORDS_UP_TO = 6
"""How many models are shown with their levels as words; above it, as numbers."""
HINT = "Whether a model's caches can be continued at all: langgraph-latent probe MODEL"
MARKERS = "1 - 2: both ways; 1 > 2: from 1 to 2"
MEANINGS = {
    Level.EXACT: "the cache is continued as it is",
    Level.MOVED: "the cache is moved to another position",
    Level.SIBLING: "same architecture, other weights or numbers: only with a measured certificate",
    Level.ADAPTED: "other geometry: only through a fitted adapter",
    Level.TEXT: "the transcript is read again",
}
OPEN = "nothing that is known differs, but not all is known: exact if the rest is equal, else sibling or worse"
"""What the mark after a level means."""


class Pair(NamedTuple):
    """One cell: the indices of the two models, and what can pass between them."""

    sender: int
    receiver: int
    compatibility: Compatibility


@dataclass(frozen=True)
class Matrix:
    """`cells[i][j]`: what model i's caches are worth to model j. `names` are short where they stay distinct."""

    specs: tuple[ModelSpec, ...]
    cells: tuple[tuple[Compatibility, ...], ...]

    @classmethod
    def of(cls, specs: Sequence[ModelSpec]) -> Matrix:
        return cls(tuple(specs), tuple(tuple(_compared(sender, receiver) for receiver in specs) for sender in specs))

    @property
    def names(self) -> tuple[str, ...]:
        names = [spec.name for spec in self.specs]
        return tuple(_short_name(name, names) for name in names)

    def pairs(self) -> Iterator[Pair]:
        """Every pair of two different places, sender first."""
        for sender, row in enumerate(self.cells):
            yield from (Pair(sender, receiver, cell) for receiver, cell in enumerate(row) if receiver != sender)

    def below(self, level: Level) -> list[Pair]:
        """The pairs that do not reach this level."""
        return [pair for pair in self.pairs() if pair.compatibility.level > level]

    def reaches(self, level: Level) -> bool:
        """Whether every pair has this level or a better one."""
        return not self.below(level)


def _compared(sender: ModelSpec, receiver: ModelSpec) -> Compatibility:
    """What `compare` says; but a model is itself, also where its weights are not known."""
    compatibility = compare(sender, receiver)
    return Compatibility(Level.EXACT) if sender == receiver and compatibility.could_be_exact else compatibility


def _short_name(name: str, names: Sequence[str]) -> str:
    """As few of a path's last parts as no other name ends in."""
    parts = name.split("/")
    for count in range(2 if parts[-1] == "config.json" else 1, len(parts)):
        short = "/".join(parts[-count:])
        if short and not any(other != name and f"/{other}".endswith(f"/{short}") for other in names):
            return short
    return name


def reason(compatibility: Compatibility) -> str:
    """Why a pair has its level, in one line."""
    names = _names(difference for difference in compatibility.differences if difference.is_known)
    return ": ".join(part for part in (names, "; ".join(compatibility.notes)) if part) or "same model"


def _names(differences: Iterable[Difference]) -> str:
    fields = [difference.field for difference in differences]
    more = f" and {len(fields) - NAMED_FIELDS} more" if len(fields) > NAMED_FIELDS else ""
    return ", ".join(fields[:NAMED_FIELDS]) + more


def shortfalls(matrix: Matrix, required: Level) -> list[str]:
    """A line for every pair that does not reach a level: what it reaches, and the fields that stand in the way."""
    return [
        f"not {_word(required)}: {matrix.names[sender]} to {matrix.names[receiver]} is {_word(cell.level)}{_mark(cell)}"
        f", {_names(cell.differences)} {'may differ: not all is known' if cell.could_be_exact else 'differ'}"
        for sender, receiver, cell in matrix.below(required)
    ]


# -- plain data ------------------------------------------------------------------------------------------------------


def to_dict(matrix: Matrix, required: Level = Level.TEXT) -> dict[str, Any]:
    """The matrix as plain data, and whether every pair reaches a level; TEXT is reached by all.

    Models are referred to by their place; names of fields are a contract.
    """
    return {
        "version": JSON_VERSION,
        "require": _word(required),
        "ok": matrix.reaches(required),
        "models": [_model(spec, name) for spec, name in zip(matrix.specs, matrix.names, strict=True)],
        "levels": [[_word(cell.level) for cell in row] for row in matrix.cells],
        "pairs": [_pair(pair) for pair in matrix.pairs()],
    }


def _model(spec: ModelSpec, name: str) -> dict[str, Any]:
    """With the identity where everything that it is made of is known, which files alone never tell."""
    plain = ("architecture", "hidden_size", "vocab_size", "dtype", "quantization", "max_positions", "bytes_per_token")
    digests = ("config", "weights", "sketch", "tokenizer", "template")
    is_known = all(getattr(spec, field) for field in MAY_BE_UNKNOWN)
    return {
        "name": spec.name,
        "short_name": name,
        "num_layers": len(spec.layers),
        **{field: getattr(spec, field) for field in (*plain, *digests)},
        **({"identity": spec.identity} if is_known else {}),
        "refusals": dict(spec.capabilities.refusals),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    level = pair.compatibility.level
    return {
        "sender": pair.sender,
        "receiver": pair.receiver,
        "level": int(level),
        "level_name": _word(level),
        "could_be_exact": pair.compatibility.could_be_exact,
        "differences": [
            {"field": difference.field, "sender": difference.a, "receiver": difference.b, "known": difference.is_known}
            for difference in pair.compatibility.differences
        ],
        "notes": list(pair.compatibility.notes),
    }


# -- a terminal ------------------------------------------------------------------------------------------------------


def to_terminal(matrix: Matrix) -> Group:
    """The table of levels by number, and below it why each pair has its level, where there is something to say."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    has_words = len(matrix.specs) <= WORDS_UP_TO
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", justify="right", style="dim", no_wrap=True)
    table.add_column("sender \\ receiver", overflow="fold")
    for index in range(len(matrix.specs)):
        table.add_column(str(index + 1), no_wrap=True)
    for index, (name, row) in enumerate(zip(matrix.names, matrix.cells, strict=True)):
        cells = [
            Text(
                f"{_word(cell.level) if has_words else int(cell.level)}{_mark(cell)}",
                "dim" if place == index else _style(cell.level),
            )
            for place, cell in enumerate(row)
        ]
        table.add_row(str(index + 1), Text(name), *cells)
    legend = [
        Text.assemble(f"{int(level)}{mark} ", (f"{_word(level)}{mark}", _style(level)), f": {meaning}")
        for level, mark, meaning in _meanings(pair.compatibility for pair in matrix.pairs())
    ]
    reasons = Table.grid(padding=(0, 2, 0, 0))
    reasons.add_column(justify="right", style="dim", no_wrap=True, min_width=7)
    reasons.add_column(no_wrap=True)
    reasons.add_column(overflow="fold")
    for places, cell in _lines(matrix):
        reasons.add_row(places, Text(f"{_word(cell.level)}{_mark(cell)}", _style(cell.level)), Text(reason(cell)))
    why: list[RenderableType] = [Text(MARKERS, "dim"), Text(""), reasons] if reasons.row_count else []
    return Group(table, *legend, *why, Text(HINT, "dim"))


def _word(level: Level) -> str:
    return level.name.lower()


def _style(level: Level) -> str:
    """The name of a level's style; a console's theme says what it looks like."""
    return f"level.{_word(level)}"


def _mark(compatibility: Compatibility) -> str:
    """Behind a level that is only what is proven."""
    return "?" if compatibility.could_be_exact else ""


def _meanings(cells: Iterable[Compatibility]) -> list[tuple[Level, str, str]]:
    """Every level among the cells with its mark and what that means, best first."""
    used = sorted({(cell.level, _mark(cell)) for cell in cells})
    return [(level, mark, OPEN if mark else MEANINGS[level]) for level, mark in used]


def _lines(matrix: Matrix) -> Iterator[tuple[str, Compatibility]]:
    """Places and compatibility of every pair about which there is something to say; once where both ways are alike."""
    for sender, receiver, there in matrix.pairs():
        back = matrix.cells[receiver][sender]
        is_alike = (there.level, reason(there)) == (back.level, reason(back))
        if (is_alike and sender > receiver) or not (there.differences or there.notes):
            continue
        yield f"{sender + 1} {'-' if is_alike else '>'} {receiver + 1}", there


# -- a page ----------------------------------------------------------------------------------------------------------

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Compatibility of {count} models</title>
<style>
:root {{ color-scheme: light dark; --ink: #1a1a1a; --paper: #fff; --line: #bbb;
  --level-0: #b7e4c7; --level-1: #d8f3dc; --level-2: #ffe8a3; --level-3: #e6ccf5; --level-4: #f8c9c4; }}
@media (prefers-color-scheme: dark) {{ :root {{ --ink: #eee; --paper: #161616; --line: #555;
  --level-0: #1b5e36; --level-1: #2d5a3d; --level-2: #665200; --level-3: #54306b; --level-4: #7a2a22; }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem; }}
table {{ border-collapse: collapse; }}
th, td {{ border: 1px solid var(--line); padding: .4rem .6rem; text-align: left; vertical-align: top; }}
th {{ font-weight: 600; overflow-wrap: anywhere; max-width: 16rem; }}
td {{ max-width: 24rem; }}
td.same {{ opacity: .55; }}
.level-0 {{ background: var(--level-0); }} .level-1 {{ background: var(--level-1); }}
.level-2 {{ background: var(--level-2); }} .level-3 {{ background: var(--level-3); }}
.level-4 {{ background: var(--level-4); }}
summary {{ cursor: pointer; font-weight: 600; }}
ul {{ margin: .4rem 0 0; padding-left: 1.1rem; overflow-wrap: anywhere; }}
dt {{ display: inline-block; padding: 0 .4rem; font-weight: 600; }} dd {{ display: inline; margin: 0 1rem 0 .3rem; }}
</style>
</head>
<body>
<h1>Compatibility of {count} models</h1>
<p>Rows send, columns receive. Open a cell for its reasons.</p>
<table>
<thead><tr><th scope="col">sender \\ receiver</th>{heads}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
<dl>{legend}</dl>
<p>{hint}</p>
</body>
</html>
"""


def to_html(matrix: Matrix) -> str:
    """One page that needs nothing else: levels as colours and words, reasons on hover and behind each cell."""
    names = [escape(name) for name in matrix.names]
    titles = [escape(f"{spec.name} ({spec.architecture}, {spec.dtype})") for spec in matrix.specs]
    heads = [f'<th scope="col" title="{title}">{name}</th>' for name, title in zip(names, titles, strict=True)]
    rows = [
        f'<tr><th scope="row" title="{title}">{name}</th>'
        + "".join(_cell(cell, is_same=place == index) for place, cell in enumerate(row))
        + "</tr>"
        for index, (name, title, row) in enumerate(zip(names, titles, matrix.cells, strict=True))
    ]
    legend = [
        f'<dt class="level-{level:d}">{_word(level)}{mark}</dt><dd>{meaning}</dd>'
        for level, mark, meaning in _meanings(cell for row in matrix.cells for cell in row)
    ]
    return PAGE.format(count=len(names), heads="".join(heads), rows="\n".join(rows), legend="".join(legend), hint=HINT)


def _cell(compatibility: Compatibility, *, is_same: bool) -> str:
    level, word = compatibility.level, f"{_word(compatibility.level)}{_mark(compatibility)}"
    css = f"level-{level:d}{' same' if is_same else ''}"
    says = (*compatibility.reasons, *compatibility.notes)
    if not says:
        return f'<td class="{css}" title="same model">{word}</td>'
    title = escape("\n".join(says))
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in says)
    details = f"<details><summary>{word}</summary><ul>{items}</ul></details>"
    return f'<td class="{css}" title="{title}">{details}</td>'
