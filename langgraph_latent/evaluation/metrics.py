"""How much of what a full text says gets through a hand-over: distances, likelihoods, matches, and parity of thoughts.

It knows handles, one receiver and task files; not terminals and not graphs.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from langgraph_latent.chat_model import THINK_STEPS, ChatLatent
from langgraph_latent.errors import ConfigError, ModelMismatchError, PromptError, TemplateError, UnsupportedLayerError
from langgraph_latent.handle.handle import KVHandle, Message
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens
from langgraph_latent.kv.state import KVState
from langgraph_latent.messages import BaseMessage, plain_message
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.parity import Parity, remember_parity
from langgraph_latent.router.router import facts_of
from langgraph_latent.workspace.delivery import transcript
from langgraph_latent.workspace.workspace import LatentWorkspace

ROUNDS = 2000
"""Samples of a bootstrap."""
INTERVAL = (0.025, 0.975)
FIELDS = ("context", "question", "answer")
Question = str | Sequence[BaseMessage | Message]
"""A text, or messages: LangChain's, or plain ones with `role` and `content`."""
Watch = Callable[[], None]
"""Called whenever one way of one task is done."""


# -- figures ---------------------------------------------------------------------------------------------------------


class Estimate(NamedTuple):
    """A mean over `num` tasks, and its 95 % bootstrap interval."""

    num: int
    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float], seed: int = 0) -> Estimate:
    """The mean and its percentile interval (Efron 1979), the same in every run. Raises `ConfigError` for no values.

    Of one value it is that value: nothing is known then of how it varies.
    """
    if not values:
        raise ConfigError("there is no mean of no values; measure at least one task")
    sample = torch.tensor(values, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    picks = (torch.randint(len(values), (len(values),), generator=random) for _ in range(ROUNDS))
    means = torch.stack([sample[pick].mean() for pick in picks])
    low, high = means.quantile(torch.tensor(INTERVAL, dtype=torch.float64)).tolist()
    return Estimate(len(values), float(sample.mean()), low, high)


def entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Shannon entropy of each row in nats, (rows,), of log-probabilities (rows, vocab)."""
    return kl(log_probs, torch.zeros_like(log_probs)).neg()


def kl(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """KL(reference || other) of each row in nats, (rows,), of log-probabilities (rows, vocab)."""
    probs = reference.exp()
    return torch.where(probs > 0, probs * (reference - other), 0.0).sum(dim=-1)


class Fidelity(NamedTuple):
    """How far predictions behind a hand-over are from those behind the full text.

    Attributes:
        num_positions: over which `kl` and `agreement` are means: those of a given answer, else its first.
        kl: KL(text || latent) in nats.
        agreement: part of the positions where both have the same likeliest token.
        semantic_entropy: H(latent) - H(text) of the answer's first token in nats; above 0 the hand-over left doubt.
            (Not Farquhar's, Nature 2024, which is of meanings of sampled answers.)
        first_kl: KL(text || latent) of that token in nats, which also sees a prediction that is sure of something else.
    """

    num_positions: int
    kl: float
    agreement: float
    semantic_entropy: float
    first_kl: float

    @classmethod
    def of(cls, text: torch.Tensor, latent: torch.Tensor) -> Fidelity:
        """Of log-probabilities at the same positions, (positions, vocab)."""
        far, doubt = kl(text, latent), entropy(latent[:1]) - entropy(text[:1])
        same = text.argmax(dim=-1) == latent.argmax(dim=-1)
        return cls(len(text), float(far.mean()), float(same.double().mean()), float(doubt), float(far[0]))


class Score(NamedTuple):
    """How likely a given answer is, by teacher forcing.

    Attributes:
        num_tokens: of the answer.
        likelihood: mean log-probability of a token in nats.
        total: the sum of them.
        exact_match: each token is the likeliest one: decoding by argmax begins with this answer.
    """

    num_tokens: int
    likelihood: float
    total: float
    exact_match: bool

    @classmethod
    def of(cls, log_probs: torch.Tensor, ids: Sequence[int]) -> Score:
        """Of the answer's token ids and the log-probabilities at their positions, (ids, vocab)."""
        wanted = torch.tensor(ids)
        each = log_probs.gather(-1, wanted[:, None])
        is_likeliest = bool((log_probs.argmax(dim=-1) == wanted).all())
        return cls(len(ids), float(each.mean()), float(each.sum()), is_likeliest)


class Measured(NamedTuple):
    """What a hand-over does to a prediction; `score` is None where no answer was given."""

    fidelity: Fidelity
    score: Score | None

    @classmethod
    def of(cls, text: torch.Tensor, latent: torch.Tensor, answer: Sequence[int]) -> Measured:
        """Of log-probabilities at the positions of an answer's token ids, or at the first one where there are none."""
        return cls(Fidelity.of(text, latent), Score.of(latent, answer) if answer else None)


class TextMatch(NamedTuple):
    """How a decoded answer compares with a given one, as text.

    Attributes:
        exact_match: they are equal but for case, punctuation, articles and spaces, as in SQuAD (arXiv 1606.05250).
        rouge_l: F1 of their longest common subsequence of words, 0 to 1 (Lin 2004, with beta = 1).
    """

    exact_match: bool
    rouge_l: float

    @classmethod
    def of(cls, said: str, answer: str) -> TextMatch:
        return cls(_normalised(said) == _normalised(answer), rouge_l(said, answer))


def rouge_l(said: str, answer: str) -> float:
    """ROUGE-L of two texts, words in lower case; texts without words are equal or not."""
    a, b = (re.findall(r"\w+", text.lower()) for text in (said, answer))
    if not a or not b:
        return float(a == b)
    return 2 * _num_common(a, b) / (len(a) + len(b))


def _num_common(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(b) + 1)
    for word in a:
        before = 0  # row[i] of the word before
        for index, other in enumerate(b, 1):
            before, row[index] = row[index], before + 1 if word == other else max(row[index], row[index - 1])
    return row[-1]


def _normalised(text: str) -> str:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


# -- one hand-over ---------------------------------------------------------------------------------------------------


def measure(chat: ChatLatent, handle: KVHandle, question: Question, answer: str | None = None) -> Measured:
    """What a receiver predicts behind a handle and a question, against the same behind the full text.

    The full text is the handle's very tokens read one after another, be they moved or not; of a handle with latent
    steps it is its messages without them. `answer` stands right behind the prompt, without an end token.

    Raises `UnsupportedLayerError` for a model that can't make the handle's cache or go on in it, `TemplateError` for a
    template that tells the handle otherwise with a question behind it, `ConfigError` for an empty answer, `HandleError`
    (`ModelMismatchError` for another model's), and `PromptError` for what is too long or no text.
    """
    receiver = Receiver(chat)
    ids, asked = receiver.answer_ids(answer), _messages(question)
    latent = receiver.predict(receiver.behind(handle, asked), ids)
    text = receiver.predict(receiver.afresh(receiver.full_text(handle, asked)), ids)
    return Measured.of(text, latent, ids)


def score(chat: ChatLatent, handle: KVHandle, question: Question, answer: str) -> Score:
    """How likely an answer is behind a handle and a question. Raises what `measure` raises."""
    receiver = Receiver(chat)
    ids = receiver.answer_ids(answer)
    return Score.of(receiver.predict(receiver.behind(handle, _messages(question)), ids), ids)


def decode(chat: ChatLatent, handle: KVHandle, question: Question, max_tokens: int = 64) -> str:
    """The answer by argmax behind a handle and a question, special tokens left out. Raises what `measure` raises."""
    receiver = Receiver(chat)
    return receiver.decode(receiver.behind(handle, _messages(question)), max_tokens)


def _messages(question: Question) -> list[Message]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    return [dict(each) if isinstance(each, Mapping) else plain_message(each) for each in question]


class Start(NamedTuple):
    """A state, and the prompt's token ids that come behind it, one at least."""

    state: KVState
    ids: list[int]


class Receiver:
    """A chat model's predictions, behind handles and behind text."""

    def __init__(self, chat: ChatLatent) -> None:
        self._model = chat.resident()
        self._template_inputs = TemplateInputs((), chat.template_options)
        self.workspace = chat.workspace or LatentWorkspace.default()

    def answer_ids(self, answer: str | None) -> list[int]:
        """The answer's token ids; none where no answer is given."""
        if answer is None:
            return []
        ids: list[int] = self._model.tokenizer.encode(answer, add_special_tokens=False)
        if not ids:
            raise ConfigError("the answer is empty; give one with some text, or None to compare the next token alone")
        return ids

    def write(self, messages: Sequence[Message]) -> bytes:
        """Messages as packed tokens, up to where an answer begins."""
        return self._model.prompts.write(messages, self._template_inputs, reply=True).tokens

    def full_text(self, handle: KVHandle, asked: Sequence[Message]) -> bytes:
        """The packed tokens that say in order what a handle and a question say."""
        if handle.has_latent_steps:
            return self.write([*transcript(handle), *asked])
        return self._model.prompts.extend(handle, asked, self._template_inputs, reply=True).tokens

    def afresh(self, tokens: bytes) -> Start:
        """All of a prompt but its last token, read from nothing."""
        *before, last = unpack_tokens(tokens)
        with self._model.empty_state().append(len(before) + 1) as tail:
            if before:
                self._model.prefill(before, tail)
            return Start(tail.seal(), [last])

    def behind(self, handle: KVHandle, asked: Sequence[Message]) -> Start:
        """A handle's cache, and the tokens of a question behind it."""
        self.workspace.check(handle)
        spec = self._model.spec
        if handle.model != spec.identity:
            raise ModelMismatchError(f"handle {handle.id} is of another model than {spec.name!r}; its text can be read")
        facts = facts_of(handle, spec)
        refusal = facts.append_refusal or facts.move_refusal or (facts.has_latent_steps and facts.latent_steps_refusal)
        if refusal:
            raise UnsupportedLayerError(f"{spec.name!r} can't go on in this cache: {refusal}; hand over text")
        prompt = self._model.prompts.extend(handle, asked, self._template_inputs, reply=True)
        num_kept, num_tokens = prompt.num_inherited, handle.num_tokens
        state, ids = (
            self.workspace.state_of(handle, self._model),
            unpack_tokens(prompt.tokens[num_kept * TOKEN_BYTES :]),
        )
        may_crop = spec.capabilities.can("crop") and state.can_crop(num_kept) and num_kept >= handle.num_composed
        if not ids or (num_kept < num_tokens and not may_crop):
            raise TemplateError(
                f"the template rewrites what is handed over: {num_kept} of {num_tokens} tokens stay, of a cache that "
                "can't be cropped to them; hand over text"
            )
        return Start(state.crop(num_kept), ids)

    def predict(self, start: Start, answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities where each of an answer's tokens is predicted, (answer, vocab), float64; one model call.

        Without an answer, of the token that comes first: (1, vocab).
        """
        with start.state.append(start.state.num_tokens + len(start.ids) + len(answer)) as tail:
            logits = self._model.logits([*start.ids, *answer[:-1]], tail)
        return logits[-max(1, len(answer)) :].cpu().double().log_softmax(dim=-1)

    def decode(self, start: Start, max_tokens: int) -> str:
        """Text of up to `max_tokens` likeliest tokens; an end token ends it, and so does the model's length."""
        said, ids = list[int](), start.ids
        if self._model.max_positions:
            max_tokens = min(max_tokens, self._model.max_positions - start.state.num_tokens - len(ids))
        with start.state.append(start.state.num_tokens + len(ids) + max_tokens) as tail:
            while len(said) < max_tokens:
                token = int(self._model.logits(ids, tail)[-1].argmax())
                if token in self._model.end_tokens:
                    break
                said, ids = [*said, token], [token]
        return str(self._model.tokenizer.decode(said, skip_special_tokens=True))


# -- many tasks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """A question about a context with its answer; `place` says where it is from."""

    context: str
    question: str
    answer: str
    place: str = "a task"

    @property
    def asked(self) -> list[Message]:
        return _messages(self.question)

    def read(self, system: str = "") -> list[Message]:
        """The context as messages, led by a system prompt if there is one."""
        head: list[Message] = [{"role": "system", "content": system}] if system else []
        return [*head, *_messages(self.context)]


def read_tasks(file: str | Path) -> list[Task]:
    """The tasks of a JSONL file: an object a line with text under "context", "question" and "answer".

    Raises `ConfigError`, naming file and line, for a file that can't be read or holds none, a line that is no such
    object, and a field that is missing or empty.
    """
    try:
        lines = Path(file).read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"the tasks can't be read: {error}") from error
    tasks = [_task(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise ConfigError(f"{file}, line 1: there is no task; write one JSON object a line, with {', '.join(FIELDS)}")
    return tasks


def _task(line: bytes, place: str) -> Task:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place} is no JSON object: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{place} is no JSON object, but {type(record).__name__}; write {', '.join(FIELDS)}")
    for name in FIELDS:
        if name not in record:
            raise ConfigError(f"{place} has no {name!r}; a task needs {', '.join(FIELDS)}")
        if not isinstance(record[name], str) or not record[name].strip() or not _is_unicode(record[name]):
            raise ConfigError(f"{place}: {name!r} is {record[name]!r}; it is text, and not empty")
    return Task(record["context"], record["question"], record["answer"], place)


def _is_unicode(text: str) -> bool:
    """Whether a text has no half of a surrogate pair, which JSON can write and no tokenizer reads."""
    return not any("\ud800" <= sign <= "\udfff" for sign in text)


# -- latent steps ----------------------------------------------------------------------------------------------------


def measure_parity(
    chat: ChatLatent,
    tasks: Sequence[Task],
    steps: int = THINK_STEPS,
    *,
    system: str = "",
    watch: Watch = lambda: None,
) -> Parity:
    """What latent steps behind contexts gain over reading them alone, in likelihood of the answers; remembered.

    From then on edges with `EdgePolicy(thoughts=True)` hand over this model's latent steps, in all processes, unless
    they lose. `system` leads each context; "" for nothing.

    Raises `ConfigError` for no tasks or steps, `UnsupportedLayerError` for a model that can't think, and `PromptError`,
    naming the task, for what is too long for the model.
    """
    if type(steps) is not int or steps < 1:
        raise ConfigError(f"steps={steps!r} is impossible; it is a whole number above 0")
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
