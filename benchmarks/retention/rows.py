"""The rows: how a receiver comes to know what senders have read. Each is a handle; nothing is computed here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

from langgraph_latent import ChatLatent, KVHandle, Repair, Selection
from langgraph_latent.evaluation.importance import best_layers

RATIOS = (0.05, 0.15, 0.3, 1.0)
LAYER_SHARES = (0.75, 0.5, 0.25)
SUMMARY_TOKENS = (64, 256)
MERGED = (2, 3, 5)
REPAIRED = 3
"""Of so many documents, the merge that is also repaired."""


class Sent(NamedTuple):
    """One document as senders hold it: after the receiver's own system prompt, and after another one."""

    alike: KVHandle
    other: KVHandle


class Scope(Enum):
    """How many of the documents a row is measured on."""

    ALL = "all"
    HALF = "half"
    FEW = "few"


class CacheRow(NamedTuple):
    """A row whose cache holds the tokens of the full text."""

    title: str
    make: Callable[[ChatLatent, Sequence[Sent], str], KVHandle]
    scope: Scope = Scope.ALL


def _composed(repair: Repair | None = None, layers: tuple[int, ...] | None = None) -> Callable[..., KVHandle]:
    """A document read after another system prompt, moved to after the receiver's."""
    select = None if layers is None else Selection(layers=layers)

    def make(chat: ChatLatent, sent: Sequence[Sent], system: str) -> KVHandle:
        return chat.compose([each.other for each in sent], system=system, select=select, repair=repair)

    return make


def _merged(repair: Repair | None = None) -> Callable[..., KVHandle]:
    """Documents that were read after the same system prompt."""
    return lambda chat, sent, system: chat.compose([each.alike for each in sent], repair=repair)


def _repairs() -> dict[str, tuple[str, Repair]]:
    """Name, title and repair of what is repaired."""
    boundary = {f"{ratio:.0%}": Repair(ratio) for ratio in RATIOS}
    deviation = {"15%-deviation": Repair(0.15, "deviation")}
    return {
        name: (f"{repair.ratio * 100:.0f} % repaired ({repair.strategy})", repair)
        for name, repair in {**boundary, **deviation}.items()
    }


def _scope(repair: Repair) -> Scope:
    """Repaired in full it is exact by construction, and 15 % is what goals are about."""
    return Scope.FEW if repair.ratio == 1 else Scope.ALL if repair == Repair(0.15) else Scope.HALF


def rows_of_one(scores: Sequence[float]) -> dict[str, CacheRow]:
    """Rows of one document."""
    rows = {
        "append": CacheRow("append: after the same system prompt", lambda chat, sent, system: sent[0].alike),
        "compose": CacheRow("compose: after another system prompt", _composed()),
    }
    for name, (title, repair) in _repairs().items():
        rows[f"compose-{name}"] = CacheRow(f"compose, {title}", _composed(repair), _scope(repair))
    for share in LAYER_SHARES:
        layers = best_layers(scores, share)
        title = f"compose, {share * 100:.0f} % of the layers ({len(layers)} of {len(scores)})"
        rows[f"layers-{share:.0%}"] = CacheRow(title, _composed(layers=layers), Scope.HALF)
    return rows


def rows_of_several(num_documents: int) -> dict[str, CacheRow]:
    """Rows of so many documents."""
    name = f"merge-{num_documents}"
    rows = {name: CacheRow(f"merge of {num_documents}", _merged())}
    if num_documents == REPAIRED:
        for suffix, (title, repair) in _repairs().items():
            rows[f"{name}-{suffix}"] = CacheRow(
                f"merge of {num_documents}, {title}", _merged(repair), Scope.FEW if repair.ratio == 1 else Scope.ALL
            )
    return rows


def answer_only(chat: ChatLatent, reply: KVHandle, system: str) -> KVHandle:
    """Only what a sender answered, moved to after the receiver's system prompt."""
    return chat.compose([reply], system=system, select=Selection(answer_only=True))


def titles(scores: Sequence[float]) -> dict[str, str]:
    """All rows in the order in which they are shown."""
    shown = {"none": "no context"}
    shown |= {f"summary-{count}": f"text: the sender's summary, {count} tokens" for count in SUMMARY_TOKENS}
    shown |= {f"tail-{count}": f"cache: only that summary, {count} tokens" for count in SUMMARY_TOKENS}
    shown["full"] = "text: all of it"
    shown |= {name: row.title for name, row in rows_of_one(scores).items()}
    for count in MERGED:
        shown[f"full-{count}"] = f"text: all of {count} documents"
        shown |= {name: row.title for name, row in rows_of_several(count).items()}
    return shown
