"""Runs the rows on one model: makes each state once, asks its questions by teacher forcing, and notes what it cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from benchmarks.bench import user
from benchmarks.harness import Mismatch, Ticker
from benchmarks.retention.facts import NUM_DOCUMENTS, Case, Document, Question, cases, rotated
from benchmarks.retention.rows import (
    MERGED,
    SUMMARY_TOKENS,
    CacheRow,
    Scope,
    Sent,
    answer_only,
    rows_of_one,
    rows_of_several,
    titles,
)
from benchmarks.retention.samples import Cost, Tally, answered
from langgraph_latent import ChatLatent, EdgePolicy, EdgeRouter, KVHandle, LatentWorkspace, Level
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.scheduler import MAX_BATCH
from langgraph_latent.evaluation.importance import layer_importance
from langgraph_latent.evaluation.receiver import Start, predict, prefilled
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.segment import Block, Composition
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens
from langgraph_latent.kv.state import KVState

RECEIVER = "You answer questions about what you were told. Answer in one short sentence."
SENDER = "You work in an archive. Read what comes in and keep its facts for your colleagues."
SUMMARISE = "Summarise the report. Keep every name, number, date and place."


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        docs: documents for the rows of one document.
        summaries: of them, how many are summarised; as many are enough for rows that are exact.
        questions: per document and row.
        groups: cases of five for the rows of several documents, as far as the documents give them.
    """

    docs: int
    summaries: int
    questions: int = 2
    groups: int = 30


class Summary(NamedTuple):
    """A summary: its text, the handle of the sender's reply, and its share of the batch's seconds."""

    text: str
    reply: KVHandle
    seconds: float


class Asked(NamedTuple):
    """A question, and the log-probabilities with full text and without context, (answer tokens, vocab)."""

    question: Question
    full: torch.Tensor
    none: torch.Tensor


@dataclass
class Trial:
    """One model's run.

    Attributes:
        tallies: what the rows gave, by name.
        titles: of the rows, in the order in which they are shown.
        scores: how important each layer is.
    """

    chat: ChatLatent
    workspace: LatentWorkspace
    size: Size
    ticker: Ticker
    tallies: dict[str, Tally] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model: ResidentModel = self.chat.resident()
        self.scores = layer_importance(self.chat)
        self.titles = titles(self.scores)
        self.tallies |= {name: Tally() for name in self.titles}
        self._rows_of_one = rows_of_one(self.scores)
        self._none = self.chat.read([_system(RECEIVER)])
        self._none_state = self.workspace.state_of(self._none, self.model)

    def run(self) -> dict[str, Tally]:
        """All rows. One case is in memory at a time."""
        drawn = list(cases(self.size.docs))
        documents = [document for case in drawn for document in case.documents][: self.size.docs]
        groups = min(len(drawn), self.size.groups)
        num_batches = -(-min(self.size.summaries, len(documents)) // MAX_BATCH)
        self.ticker.expect(len(documents) + groups + num_batches * len(SUMMARY_TOKENS))
        summaries = self._summaries(documents[: self.size.summaries])
        self._warm_up(drawn[0].documents[0])
        for number, case in enumerate(drawn):
            with self.workspace.scope():
                begin = number * NUM_DOCUMENTS
                sent = [self._sent(document) for document in case.documents]
                for index in range(begin, min(begin + NUM_DOCUMENTS, len(documents))):
                    self._one(index, documents[index], sent[index - begin], summaries.get(index, {}))
                    self.ticker.step()
                if number < groups:
                    self._several(number, case, sent)
                    self.ticker.step()
        return self.tallies

    def _sent(self, document: Document) -> Sent:
        alike, other = (self.chat.read([_system(words), user(document.text)]) for words in (RECEIVER, SENDER))
        return Sent(alike, other)

    def _warm_up(self, document: Document) -> None:
        """Do once what is slower the first time."""
        with self.workspace.scope():
            sent = [self._sent(document)]
            self._reread(sent[0].alike)
            for row in self._rows_of_one.values():
                self.workspace.state_of(row.make(self.chat, sent, RECEIVER), self.model)

    # -- rows -----------------------------------------------------------------------------------------------------

    def _one(self, index: int, document: Document, sent: Sent, summaries: Mapping[int, Summary]) -> None:
        """The rows of one document."""
        unit = f"document {index}"
        questions = rotated(document.questions, self.size.questions, index)
        asked = self._full("full", unit, sent.alike, document.text, questions)
        for each in asked:
            self._note("none", unit, each, each.none)
        self.tallies["none"].costs.append(Cost(unit, 0.0, 0.0))
        for num_tokens, summary in summaries.items():
            self._summary(num_tokens, unit, summary, asked)
        for name, row in self._rows_of_one.items():
            if self._is_within(row.scope, index):
                self._cache_row(name, row, unit, [sent], asked)

    def _several(self, number: int, case: Case, sent: Sequence[Sent]) -> None:
        """The rows of the first two, three and five documents of a case."""
        unit = f"case {number}"
        for count in MERGED:
            questions = [hop.question for hop in case.hops_within(count)[:2]]
            for index, document in enumerate(case.documents[:count]):
                questions += rotated(document.questions, 1, number + index)
            merged = self.chat.compose([each.alike for each in sent[:count]])
            texts = "\n".join(document.text for document in case.documents[:count])
            asked = self._full(f"full-{count}", unit, merged, texts, questions)
            for name, row in rows_of_several(count).items():
                if self._is_within(row.scope, number * NUM_DOCUMENTS):
                    self._cache_row(name, row, unit, sent[:count], asked)

    def _is_within(self, scope: Scope, index: int) -> bool:
        """Whether a row of this scope is measured on a document."""
        return scope is Scope.ALL or (index % 2 == 0 if scope is Scope.HALF else index < self.size.summaries)

    def _full(self, name: str, unit: str, handle: KVHandle, text: str, questions: Sequence[Question]) -> list[Asked]:
        """The row of full text: a handle's own tokens, re-read in one go. What every other row is compared with."""
        state, seconds = self._reread(handle)
        asked = []
        for question in questions:
            without = self._ask(self._none_state, self._none, question)
            asked.append(Asked(question, self._ask(state, handle, question), without))
            self._note(name, unit, asked[-1], asked[-1].full)
        self.tallies[name].costs.append(Cost(unit, seconds, len(text.encode())))
        return asked

    def _cache_row(self, name: str, row: CacheRow, unit: str, sent: Sequence[Sent], asked: Sequence[Asked]) -> None:
        """A row whose cache holds the tokens of the full text."""
        handle = row.make(self.chat, sent, RECEIVER)
        self._hand_over(name, unit, handle, handle, asked)

    def _hand_over(
        self, name: str, unit: str, handle: KVHandle, end: KVHandle, asked: Sequence[Asked], before_s: float = 0.0
    ) -> None:
        """A row of a handle, which ends as `end` does; `before_s` is what its sender took to write it."""
        begin = time.perf_counter()
        state = self.workspace.state_of(handle, self.model)
        seconds = time.perf_counter() - begin
        self._ask_all(name, unit, state, end, asked)
        self.tallies[name].costs.append(Cost(unit, before_s + seconds, self._handed_bytes(handle)))
        if handle.num_composed:
            self.workspace.evict(handle)

    def _summary(self, num_tokens: int, unit: str, summary: Summary, asked: Sequence[Asked]) -> None:
        """The sender's summary, as text and as its cache alone."""
        name, text = f"summary-{num_tokens}", f"Report of a colleague: {summary.text}"
        handle = self.chat.read([_system(RECEIVER), user(text)])
        state, seconds = self._reread(handle)
        self._ask_all(name, unit, state, handle, asked)
        self.tallies[name].costs.append(Cost(unit, summary.seconds + seconds, len(summary.text.encode())))
        self.workspace.state_of(summary.reply, self.model)  # the sender has it
        tail = answer_only(self.chat, summary.reply, RECEIVER)
        self._hand_over(f"tail-{num_tokens}", unit, tail, summary.reply, asked, summary.seconds)

    def _summaries(self, documents: Sequence[Document]) -> dict[int, dict[int, Summary]]:
        """Summaries of documents by index and number of tokens; as many as share a model call are decoded together."""
        found: dict[int, dict[int, Summary]] = {index: {} for index in range(len(documents))}
        for begin in range(0, len(documents), MAX_BATCH):
            with self.workspace.scope():
                self._summarise(begin, documents[begin : begin + MAX_BATCH], found)
        return found

    def _summarise(self, first: int, documents: Sequence[Document], found: dict[int, dict[int, Summary]]) -> None:
        read = [[_system(SENDER), user(document.text)] for document in documents]
        for messages in read:
            self.chat.read(messages)
        for num_tokens in SUMMARY_TOKENS:
            begin = time.perf_counter()
            replies = self.chat.batch([[*messages, user(SUMMARISE)] for messages in read], max_tokens=num_tokens)
            seconds = (time.perf_counter() - begin) / len(documents)
            for index, reply in enumerate(replies, first):
                found[index][num_tokens] = Summary(reply.text, self.workspace.handle(reply), seconds)
            self.ticker.step()

    # -- states and answers ---------------------------------------------------------------------------------------

    def _reread(self, handle: KVHandle) -> tuple[KVState, float]:
        """A handle's tokens, re-read from the first one, and the seconds it took."""
        begin = time.perf_counter()
        state = prefilled(self.model, unpack_tokens(handle.tokens))
        return state, time.perf_counter() - begin

    def _ask_all(self, name: str, unit: str, state: KVState, handle: KVHandle, asked: Sequence[Asked]) -> None:
        for each in asked:
            self._note(name, unit, each, self._ask(state, handle, each.question))

    def _note(self, name: str, unit: str, asked: Asked, logs: torch.Tensor) -> None:
        question = asked.question
        answer = self._answer(question)[1]
        sample = answered(unit, question.kind, question.text, answer, logs, asked.full, asked.none)
        self.tallies[name].samples.append(sample)

    def _ask(self, state: KVState, handle: KVHandle, question: Question) -> torch.Tensor:
        """Log-probabilities at each token of the answer, given those before it, (answer tokens, vocab).

        The question is put as it is after `handle`, which ends as the state does.
        """
        prompt = self.model.prompts.extend(handle, [user(question.text)], reply=True)
        if prompt.num_inherited != handle.num_tokens:
            raise Mismatch(f"the template rewrites what is handed over: {handle!r}, {question.text!r}")
        lead, answer = self._answer(question)
        asked = unpack_tokens(prompt.tokens[handle.num_tokens * TOKEN_BYTES :])
        return predict(self.model, Start(state, [*asked, *lead]), answer)

    def _answer(self, question: Question) -> tuple[list[int], list[int]]:
        """The tokens of the answer's beginning, which is given, and of the rest, which is asked."""
        lead, whole = (self.chat.get_token_ids(text) for text in (question.lead, f"{question.lead} {question.answer}"))
        assert whole[: len(lead)] == lead, "a tokenizer parts words at spaces"
        return lead, whole[len(lead) :]

    def _handed_bytes(self, handle: KVHandle) -> float:
        """Bytes of what a receiver takes over: every token in the layers in which it is seen, but its own prompt's."""
        per_token, num_layers = self.model.spec.bytes_per_token, len(self.model.spec.layers)
        own = self._none.num_tokens
        plain = handle.num_plain if handle.num_composed else handle.num_tokens
        total = float(max(0, plain - own) * per_token)
        for block in _blocks(handle):
            seen = num_layers if block.layers is None else len(block.layers)
            total += block.num_tokens * per_token * seen / num_layers
        return total


def _blocks(handle: KVHandle) -> Iterator[Block]:
    for segment in handle.segments:
        if isinstance(segment.provenance, Composition):
            yield from segment.provenance.blocks


def _system(text: str) -> Message:
    return {"role": "system", "content": text}


def open_workspace() -> LatentWorkspace:
    """A workspace on whose edges everything is allowed that is measured here."""
    allowed = frozenset({Level.EXACT, Level.MOVED, Level.TEXT})
    return LatentWorkspace(router=EdgeRouter(default=EdgePolicy(allow=allowed)))
