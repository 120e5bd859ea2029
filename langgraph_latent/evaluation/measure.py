"""Every way of handing a context over, measured over the tasks of a file; and what latent steps gain over reading.

It knows how a context becomes a handle, and asks one receiver (`receiver.py`). It knows nothing of terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from langgraph_latent.chat_model import THINK_STEPS, ChatLatent
from langgraph_latent.checks import check_whole_number
from langgraph_latent.errors import ConfigError, PromptError, TemplateError, UnsupportedLayerError
from langgraph_latent.evaluation.metrics import Estimate, Measured, TextMatch, bootstrap
from langgraph_latent.evaluation.receiver import Receiver, Start, score
from langgraph_latent.evaluation.tasks import Task
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.repair import Repair
from langgraph_latent.router.parity import Parity, remember_parity
from langgraph_latent.workspace.workspace import LatentWorkspace

SYSTEM = "Answer the question from the text, in a few words."
"""The receiver's system prompt where no other is given."""
BY_TEXT = ("none", "text")
BY_CACHE = ("append", "compose", "compose+repair", "think")
"""append: the text's cache is continued; compose: the context's cache, read without the system prompt, is moved to
after it; compose+repair: the same, and a part is recomputed; think: append, then latent steps."""
Watch = Callable[[], None]
"""Called whenever one way of one task is done."""


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
            raise ConfigError("system is empty; a context is moved to after a system prompt, so give one")
        for name in ("steps", "max_tokens"):
            check_whole_number(name, getattr(self, name))

    @property
    def ways(self) -> tuple[str, ...]:
        return (*BY_TEXT, *(BY_CACHE if self.steps else BY_CACHE[:-1]))

    def num_runs(self, tasks: Sequence[Task]) -> int:
        """How often `measure_model` reports that something is done."""
        return len(tasks) * (len(self.ways) + bool(self.steps))


class WayResult(NamedTuple):
    """What was measured of one way: figures by name, or why this model can't do it."""

    figures: dict[str, Estimate]
    refusal: str = ""


class Result(NamedTuple):
    """What was measured, by way, and the parity of latent steps; None where it was not measured."""

    ways: dict[str, WayResult]
    parity: Parity | None


def measure_model(model: str, tasks: Sequence[Task], setup: Setup, watch: Watch = lambda: None) -> Result:
    """`measure_tasks` and, where there are latent steps, `measure_parity`, of a hub id or folder.

    Raises what they raise, and `ModelLoadError`.
    """
    with LatentWorkspace() as workspace:
        chat = ChatLatent(model=model, workspace=workspace)
        ways = measure_tasks(chat, tasks, setup, watch)
        if not setup.steps or ways["think"].refusal:
            return Result(ways, None)
        return Result(ways, measure_parity(chat, tasks, setup.steps, system=setup.system, watch=watch))


def measure_tasks(
    chat: ChatLatent,
    tasks: Sequence[Task],
    setup: Setup = Setup(),
    watch: Watch = lambda: None,
) -> dict[str, WayResult]:
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
        run = _TaskRun(chat, receiver, task, setup)
        with receiver.workspace.scope():
            for way in setup.ways:
                try:
                    if way not in refusals:
                        measured[way].append(run.figures(way))
                except (UnsupportedLayerError, TemplateError) as error:
                    if way in BY_TEXT:
                        raise
                    refusals[way] = str(error)
                except PromptError as error:
                    raise type(error)(f"{task.place}: {error}") from error
                watch()
    return {
        way: WayResult({}, refusals[way]) if way in refusals else WayResult(_estimates(figures))
        for way, figures in measured.items()
    }


def _estimates(figures: Sequence[Mapping[str, float]]) -> dict[str, Estimate]:
    return {name: bootstrap([each[name] for each in figures]) for name in figures[0]}


class _TaskRun:
    """One task, handed over in several ways."""

    def __init__(self, chat: ChatLatent, receiver: Receiver, task: Task, setup: Setup) -> None:
        self._chat, self._receiver, self._task, self._setup = chat, receiver, task, setup
        self._answer = receiver.answer_ids(task.answer)
        self._starts: dict[bytes, Start] = {}
        self._predictions: dict[bytes, torch.Tensor] = {}

    def figures(self, way: str) -> dict[str, float]:
        """What is measured of one way, by name."""
        tokens, start = self._by_text(way) if way in BY_TEXT else self._by_cache(way)
        text = self._predicted(tokens)
        latent = text if way == "text" else self._receiver.predict(start, self._answer)
        measured = Measured.of(text, latent, self._answer)
        assert measured.score is not None, "a task has an answer"
        figures = {**measured.score._asdict(), **measured.fidelity._asdict()}
        if self._setup.max_tokens:
            match = TextMatch.of(self._receiver.decode(start, self._setup.max_tokens), self._task.answer)
            figures |= {"decoded_match": match.exact_match, "rouge_l": match.rouge_l}
        return {name: float(value) for name, value in figures.items()}

    def _by_text(self, way: str) -> tuple[bytes, Start]:
        """The full text's tokens, and where an answer to it, or to the question alone, begins."""
        context, asked = self._task.read(self._setup.system), self._task.asked
        text = self._receiver.write([*context, *asked])
        return text, self._after_text(text if way == "text" else self._receiver.write([*context[:-1], *asked]))

    def _by_cache(self, way: str) -> tuple[bytes, Start]:
        """The tokens of a handle and the question as text, and where an answer after its cache begins."""
        handle, asked = self._handle(way), self._task.asked
        return self._receiver.full_text(handle, asked), self._receiver.after(handle, asked)

    def _handle(self, way: str) -> KVHandle:
        chat, setup, context = self._chat, self._setup, self._task.read(self._setup.system)
        if way == "append":
            return chat.read(context)
        if way == "think":
            return chat.think(context, steps=setup.steps)
        repair = setup.repair if way == "compose+repair" else None
        return chat.compose(chat.read(self._task.read()), system=setup.system, repair=repair)

    def _after_text(self, tokens: bytes) -> Start:
        if tokens not in self._starts:
            self._starts[tokens] = self._receiver.after_text(tokens)
        return self._starts[tokens]

    def _predicted(self, tokens: bytes) -> torch.Tensor:
        """Predictions of the answer after a full text; most ways have the same text."""
        if tokens not in self._predictions:
            self._predictions[tokens] = self._receiver.predict(self._after_text(tokens), self._answer)
        return self._predictions[tokens]


def measure_parity(
    chat: ChatLatent,
    tasks: Sequence[Task],
    steps: int = THINK_STEPS,
    *,
    system: str = "",
    watch: Watch = lambda: None,
) -> Parity:
    """What latent steps after contexts gain over reading them alone, in likelihood of the answers; remembered.

    From then on edges with `EdgePolicy(latent_steps=True)` hand over this model's latent steps, in all processes,
    unless they lose. `system` leads each context; "" for nothing.

    Raises `ConfigError` for no tasks or steps, `UnsupportedLayerError` for a model that can't think, and `PromptError`,
    naming the task, for what is too long for the model.
    """
    check_whole_number("steps", steps, 1)
    gain = bootstrap(list(_gains(chat, tasks, steps, system, watch)))
    parity = Parity(gain.num, steps, gain.mean, gain.low, gain.high)
    remember_parity(chat.spec.identity, parity)
    return parity


def _gains(chat: ChatLatent, tasks: Sequence[Task], steps: int, system: str, watch: Watch) -> Iterator[float]:
    """Per task, what latent steps add to the answer's likelihood, nats a token."""
    workspace = Receiver(chat).workspace
    for task in tasks:
        context = task.read(system)
        try:
            with workspace.scope():
                read = score(chat, chat.read(context), task.question, task.answer)
                thought = score(chat, chat.think(context, steps=steps), task.question, task.answer)
        except PromptError as error:
            raise type(error)(f"{task.place}: {error}") from error
        watch()
        yield thought.likelihood - read.likelihood
