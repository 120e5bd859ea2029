"""`langgraph-latent trace`: the events of a trace file, one line each. It knows the file's records, not events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from langgraph_latent.cli.terminal import WIDE, terminal
from langgraph_latent.errors import LatentError

COLUMNS = ("time s", "thread", "event", "edge", "tokens", "reused", "took ms", "detail")
FIELDS = ("time", "thread_id", "event", "source", "node", "num_tokens", "duration_s", "success")


class TraceError(LatentError):
    """A file is not a trace."""


def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE.jsonl", exists=True, dir_okay=False, readable=True)],
) -> None:
    """Print a trace file, one line per event."""
    records = _read(file)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in COLUMNS:
        is_number = name in ("time s", "tokens", "reused", "took ms")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=name not in ("edge", "detail"))
    for record in records:
        cells = _cells(record, begin=records[0]["time"])
        table.add_row(*(Text(cell) for cell in cells), style="" if record["success"] else "bad")
    terminal(width=WIDE).print(table if records else "the trace is empty")


def _read(file: Path) -> list[dict[str, Any]]:
    """The events of a file that a `LatentTracer` wrote, without lines that were cut off when their writer ended.

    Raises `TraceError`, naming the line, for anything else.
    """
    records = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            record = json.loads(line)
            missing = [name for name in FIELDS if name not in record]
        except (ValueError, TypeError, RecursionError) as error:
            if line.startswith(b"{") and not line.endswith(b"}"):
                typer.echo(f"line {number} of {file} was cut off and is left out", err=True)
                continue
            raise TraceError(f"{file}, line {number} is not a JSON record: {error}") from error
        if missing:
            raise TraceError(f"{file}, line {number} is not an event of a LatentTracer: it has no {missing[0]!r}")
        records.append(record)
    return records


def _cells(record: dict[str, Any], begin: float) -> tuple[str, ...]:
    """One line's cells, in the order of `COLUMNS`."""
    source, node = Path(record["source"]).name, record["node"]
    edge = f"{source} -> {node}" if source and node and source != node else source or node
    detail = [str(record[name]) for name in ("route", "finish_reason", "to_route", "reason") if record.get(name)]
    return (
        f"{record['time'] - begin:.3f}",
        record["thread_id"],
        record["event"],
        edge,
        f"{record['num_tokens']:,}" if record["num_tokens"] else "",
        f"{record['cache_read']:,}" if record.get("cache_read") else "",
        f"{record['duration_s'] * 1000:,.1f}" if record["duration_s"] else "",
        ": ".join(detail),
    )
