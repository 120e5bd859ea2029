"""The swap benchmark's rows by name, in the order in which they are shown, and the packages that some of them need."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from benchmarks.cli import Row
from benchmarks.swap_rows import branches, first_token, swapped, tools
from benchmarks.swap_rows.graphs import GRAPHS

SWAPPED: dict[str, Row] = {name: partial(swapped.run, graph) for name, graph in GRAPHS.items()}
ROWS: dict[str, Row] = {
    **SWAPPED,
    "tools": tools.run,
    "branches": branches.run,
    "first-token": first_token.run,
}


class Need(NamedTuple):
    """A package without which some rows can't run."""

    package: str
    module: str
    requirement: str
    rows: Sequence[str]

    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


HUGGING_FACE = Need("langchain-huggingface", "langchain_huggingface", "langchain-huggingface==1.2.3", [*SWAPPED])
GRAMMAR = Need("llguidance", "llguidance", "langgraph-latent[grammar]", ["tools"])
NEEDS = (HUGGING_FACE, GRAMMAR)
