"""A conformance run as a page for people and as data. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers

from langgraph_latent.testing.conformance import PROPERTIES, Outcome

HEAD = """# Models

What is promised of each model type's caches, tested on a tiny random model of every causal language model type that
transformers {transformers} ships (torch {torch}, float32, CPU). Each "works" is a comparison with one stock forward
over all tokens without a cache, to 1e-4 of the largest logit; each "no" is a refusal that is known when the model is
loaded, with its reason below the table. Sliding windows of these models are 20 tokens. Made by

    python -m langgraph_latent.testing --markdown docs/models.md

* **append**: tokens after an inherited cache, past sliding windows too.
* **crop**: continue a prefix of a cache.
* **move**: put a block at another position, against the same block read in place under a block mask.
* **export and ingest**: continue a cache that was written to bytes and read again.
* **fan-out**: several continuations of one cache at a time, each as alone; the cache stays as it was.
* **batch**: several requests in one model call; where not, they run one after another.

A type that is not here gets its answers from the same probe when it is loaded: `langgraph-latent probe MODEL`.
"""


NUMBERS = re.compile(r" \(relative difference [^)]*\)")
"""They depend on the machine."""


def as_markdown(outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> str:
    """The page `docs/models.md`: a line per model type, a column per property; reasons as numbered notes."""
    notes: dict[str, int] = {}
    lines = [
        f"| model type | cache layers | positions | {' | '.join(PROPERTIES)} |",
        f"|---|---|---|{'---|' * len(PROPERTIES)}",
    ]
    for outcome in outcomes:
        cells = []
        for prop in PROPERTIES:
            cell = outcome.cells[prop]
            number = (
                ""
                if cell.verdict == "exact"
                else f" [{notes.setdefault(NUMBERS.sub('', cell.detail), len(notes) + 1)}]"
            )
            cells.append({"exact": "works", "refused": "no", "wrong": "**wrong**"}[cell.verdict] + number)
        lines.append(f"| {outcome.name} | {outcome.layers} | {outcome.positions} | {' | '.join(cells)} |")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.partition("+")[0]}
    works = sum(outcome.cells["append"].verdict == "exact" for outcome in outcomes)
    parts = [
        HEAD.format(**versions),
        f"{works} of {len(outcomes)} model types can be handed over as caches.\n",
        "\n".join(lines) + "\n",
        "Why not:\n",
        "\n".join(f"{number}. {_one_line(reason)}" for reason, number in notes.items()) + "\n",
        "Not in the table:\n",
        "\n".join(f"* {name}: {_one_line(reason)}" for name, reason in sorted(left_out.items())) + "\n",
    ]
    return "\n".join(parts)


def as_json(outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> str:
    """Every cell, and the versions that were tested."""
    content: dict[str, Any] = {
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "models": [
            {**each._asdict(), "cells": {prop: cell._asdict() for prop, cell in each.cells.items()}}
            for each in outcomes
        ],
        "left_out": dict(left_out),
    }
    return json.dumps(content, indent=1)


def _one_line(text: str) -> str:
    return " ".join(text.split())
