"""Every way of handing a context over, measured over the tasks of a file: the runs, and what is shown of them.

It knows one receiver's predictions (`metrics.py`) and how a context becomes a handle; rich is imported where it draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.errors import ConfigError, PromptError, TemplateError, UnsupportedLayerError
from langgraph_latent.evaluation.metrics import (
    Estimate,
    Measured,
    Receiver,
    Start,
    Task,
    TextMatch,
    Watch,
    bootstrap,
    measure_parity,
)
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.provenance import Repair
from langgraph_latent.router.parity import Parity
from langgraph_latent.workspace.workspace import LatentWorkspace

if TYPE_CHECKING:
    from rich.console import Group

SYSTEM = "Answer the question from the text, in a few words."
"""The receiver's system prompt where no other is given."""
TOLD = ("none", "text")
HANDED_OVER = ("append", "compose", "compose+repair", "think")
"""append: the text's cache is continued; compose: the context's cache, read without the system prompt, is moved behind
it; compose+repair: the same, a part computed anew; think: append, with latent steps behind it."""
EXPLAINED = """\
none: the question alone; text: all read anew; append: its cache continued; compose: moved behind the system prompt,
and partly computed anew with +repair; think: latent steps behind append
log-likelihood: of the given answers, nats a token; KL: from the full text's predictions, nats a token
semantic entropy: of the first token, less that behind the full text, nats; intervals: 95 %, bootstrap over tasks"""


@dataclass(frozen=True)
class Setup:
    """How tasks are handed over.

    Attributes:
        system: the receiver's system prompt; it leads the context in every way of handing it over.
        repair: of "compose+repair".
        steps: latent steps of "think"; 0 leaves that way out.
        max_tokens: of a decoded answer, for its exact match and ROUGE-L; 0 decodes nothing.

    Raises `ConfigError` for impossible values.
    """

    system: str = SYSTEM
    repair: Repair = Repair(0.15)  # noqa: RUF009 - frozen
    steps: int = 0
    max_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.system.strip():
            raise ConfigError("system is empty; a context is moved behind a system prompt, so give one")
        for name in ("steps", "max_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name}={value!r} is impossible; it is a whole number, 0 or above")

    @property
    def ways(self) -> tuple[str, ...]:
        return (*TOLD, *(HANDED_OVER if self.steps else HANDED_OVER[:-1]))

    def num_runs(self, tasks: Sequence[Task]) -> int:
        """How often `measure_model` reports that something is done."""
        return len(tasks) * (len(self.ways) + bool(self.steps))


class Row(NamedTuple):
    """What was measured of one way: figures by name, or why it can't be gone with this model."""

    figures: dict[str, Estimate]
    refusal: str = ""


class Result(NamedTuple):
    """Rows by way, and the parity of latent steps; None where it was not measured."""

    rows: dict[str, Row]
    parity: Parity | None


def measure_model(model: str, tasks: Sequence[Task], setup: Setup, watch: Watch = lambda: None) -> Result:
    """`measure_tasks` and, where there are latent steps, `measure_parity`, of a hub id or folder.

    Raises what they raise, and `ModelLoadError`.
    """
    with LatentWorkspace() as workspace:
        chat = ChatLatent(model=model, workspace=workspace)
        rows = measure_tasks(chat, tasks, setup, watch)
        may_think = setup.steps and not rows["think"].refusal
        return Result(
            rows, measure_parity(chat, tasks, setup.steps, system=setup.system, watch=watch) if may_think else None
        )


def measure_tasks(
    chat: ChatLatent,
    tasks: Sequence[Task],
    setup: Setup = Setup(),
    watch: Watch = lambda: None,
) -> dict[str, Row]:
    """Every figure of every way of handing over, over tasks; `watch` is called after each way of each task.

    The figures' names are those of `Score` and `Fidelity`, and "decoded_match" and "rouge_l" where answers are decoded.
    "none" is compared with "text"; "append" and the composed ways have that text's tokens where the template allows.

    Raises `ConfigError` for no tasks, and `PromptError`, naming the task, for one that is too long for the model.
    """
    if not tasks:
        raise ConfigError("there is nothing to measure; pass at least one task")
    receiver, refusals = Receiver(chat), dict[str, str]()
    measured: dict[str, list[dict[str, float]]] = {way: [] for way in setup.ways}
    for task in tasks:
        trial = _Trial(chat, receiver, task, setup)
        with receiver.workspace.scope():
            for way in setup.ways:
                try:
                    if way not in refusals:
                        measured[way].append(trial.figures(way))
                except (UnsupportedLayerError, TemplateError) as error:
                    if way in TOLD:
                        raise
                    refusals[way] = str(error)
                except PromptError as error:
                    raise type(error)(f"{task.place}: {error}") from error
                watch()
    return {
        way: Row({}, refusals[way]) if way in refusals else Row(_estimates(figures))
        for way, figures in measured.items()
    }


def _estimates(figures: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    return {name: bootstrap([each[name] for each in figures]) for name in figures[0]}


class _Trial:
    """One task, handed over in several ways."""

    def __init__(self, chat: ChatLatent, receiver: Receiver, task: Task, setup: Setup) -> None:
        self._chat, self._receiver, self._task, self._setup = chat, receiver, task, setup
        self._answer = receiver.answer_ids(task.answer)
        self._starts: dict[bytes, Start] = {}
        self._texts: dict[bytes, torch.Tensor] = {}

    def figures(self, way: str) -> dict[str, float]:
        """What is measured of one way, by name."""
        tokens, start = self._told(way) if way in TOLD else self._handed_over(way)
        text = self._predicted(tokens)
        latent = text if way == "text" else self._receiver.predict(start, self._answer)
        measured = Measured.of(text, latent, self._answer)
        assert measured.score is not None, "a task has an answer"
        figures = {**measured.score._asdict(), **measured.fidelity._asdict()}
        if self._setup.max_tokens:
            match = TextMatch.of(self._receiver.decode(start, self._setup.max_tokens), self._task.answer)
            figures |= {"decoded_match": match.exact_match, "rouge_l": match.rouge_l}
        return {name: float(value) for name, value in figures.items()}

    def _told(self, way: str) -> tuple[bytes, Start]:
        """The full text's tokens, and where an answer to it, or to the question alone, begins."""
        context, asked = self._task.read(self._setup.system), self._task.asked
        text = self._receiver.write([*context, *asked])
        return text, self._afresh(text if way == "text" else self._receiver.write([*context[:-1], *asked]))

    def _handed_over(self, way: str) -> tuple[bytes, Start]:
        """The tokens of what a handle and the question say, and where an answer behind its cache begins."""
        handle, asked = self._handle(way), self._task.asked
        return self._receiver.full_text(handle, asked), self._receiver.behind(handle, asked)

    def _handle(self, way: str) -> KVHandle:
        chat, setup, context = self._chat, self._setup, self._task.read(self._setup.system)
        if way == "append":
            return chat.read(context)
        if way == "think":
            return chat.think(context, steps=setup.steps)
        repair = setup.repair if way == "compose+repair" else None
        return chat.compose(chat.read(self._task.read()), system=setup.system, repair=repair)

    def _afresh(self, tokens: bytes) -> Start:
        if tokens not in self._starts:
            self._starts[tokens] = self._receiver.afresh(tokens)
        return self._starts[tokens]

    def _predicted(self, tokens: bytes) -> torch.Tensor:
        """Predictions of the answer behind a full text; most ways have the same text."""
        if tokens not in self._texts:
            self._texts[tokens] = self._receiver.predict(self._afresh(tokens), self._answer)
        return self._texts[tokens]


# -- what is shown ---------------------------------------------------------------------------------------------------


def to_dict(result: Result) -> dict[str, Any]:
    """A result as plain data."""
    rows, parity = result
    ways = {
        way: {"refusal": row.refusal} if row.refusal else {name: each._asdict() for name, each in row.figures.items()}
        for way, row in rows.items()
    }
    told = {"parity": {**vars(parity), "refusal": parity.refusal}} if parity else {}
    return {"ways": ways, **told}


def to_terminal(result: Result) -> Group:
    """A table of the ways, each figure with its interval below, then refusals and the verdict on latent steps."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows, parity = result
    is_decoded = any("rouge_l" in row.figures for row in rows.values())
    columns = COLUMNS if is_decoded else COLUMNS[:-2]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("way", style="cyan", no_wrap=True)
    for name in ("n", *(column.title for column in columns)):
        table.add_column(name, justify="right")
    for way, row in rows.items():
        num = str(row.figures["likelihood"].num) if row.figures else "-"
        table.add_row(way, num, *(column.cell(row.figures.get(column.figure)) for column in columns))
    lines = [Text(f"{way}: {row.refusal}", "red") for way, row in rows.items() if row.refusal]
    lines += [_verdict(parity)] if parity else []
    return Group(table, *lines, Text(EXPLAINED, "dim"))


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


def _verdict(parity: Parity) -> Any:
    from rich.text import Text

    if parity.refusal:
        return Text(f"{parity.refusal}: no edge hands them over", "red")
    gain = f"{parity.gain:+.3f} nats a token ({parity.low:+.3f} to {parity.high:+.3f})"
    return Text(f"edges with EdgePolicy(thoughts=True) may hand over this model's latent steps: {gain}", "green")
