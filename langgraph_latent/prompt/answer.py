"""An answer's parts, read while it is written: text, reasoning and tool calls. It knows plain text and JSON only.

Reasoning goes by the marks in `REASONING`, calls by those in `TOOL_CALL_FORMATS`. Where a tokenizer ships a response
template of its own, that is used instead.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from langgraph_latent.handle.message import Message
from langgraph_latent.prompt.detokenizer import split_certain
from langgraph_latent.prompt.template import ID_LETTERS, TemplateInputs
from langgraph_latent.prompt.tool_calls import BARE, CALL_MARKS, JSON, MARKED, ToolCallFormat

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|inner_prefix|>", "<|inner_suffix|>"))
THINKING_FIELDS = ("thinking", "reasoning", "reasoning_content")
WHITE_SPACE = " \t\r\n"


class Text(NamedTuple):
    """A piece of the answer proper."""

    text: str


class Reasoning(NamedTuple):
    """A piece of thinking aloud."""

    text: str


class Call(NamedTuple):
    """A complete tool call."""

    name: str
    arguments: dict[str, Any]
    id: str


class InvalidCall(NamedTuple):
    """All of something that is marked as a tool call and can't be read as one."""

    raw: str
    error: str
    id: str


AnswerPart = Text | Reasoning | Call | InvalidCall
REASONING_MARKS = frozenset(mark for pair in REASONING for mark in pair)


class Reader(Protocol):
    """Takes an answer's text piece by piece, and gives its parts as soon as they are certain."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is thinking aloud now."""

    @property
    def closing(self) -> str:
        """What will end the thinking aloud; "" where there is none, and where its end is not known."""

    def push(self, text: str) -> list[AnswerPart]: ...

    def flush(self) -> list[AnswerPart]: ...


class Answer:
    """An answer so far.

    Attributes:
        text: the answer proper, without reasoning and tool calls.
        reasoning: what was thought aloud.
        calls, invalid_calls: tool calls.
    """

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self.invalid_calls: list[InvalidCall] = []

    def add(self, part: AnswerPart) -> None:
        if isinstance(part, Text):
            self.text += part.text
        elif isinstance(part, Reasoning):
            self.reasoning += part.text
        elif isinstance(part, Call):
            self.calls.append(part)
        else:
            self.invalid_calls.append(part)

    @property
    def message(self) -> Message:
        """The answer as a plain chat message; calls that can't be read stay in its text."""
        text = "\n".join(part for part in (self.text, *(call.raw for call in self.invalid_calls)) if part)
        message: Message = {"role": "assistant", "content": text}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message


class AnswerReaders:
    """Makes the readers for one tokenizer's answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: Collection[int]) -> None:
        self._tokenizer: Any = tokenizer
        self._added = {each.content: token for token, each in tokenizer.added_tokens_decoder.items()}
        self._end_tokens = frozenset(end_tokens)
        self._has_response_template = bool(getattr(tokenizer, "response_template", None))

    def marks(self, template_inputs: TemplateInputs) -> frozenset[int]:
        """Token ids, special ones among them, that mean something to `reader`."""
        if self._has_response_template:
            return frozenset(self._added.values()) - self._end_tokens
        marks = REASONING_MARKS | CALL_MARKS if template_inputs.tools else REASONING_MARKS
        return frozenset(token for text, token in self._added.items() if text in marks)

    def reader(self, prompt: str, template_inputs: TemplateInputs, seed: bytes) -> Reader:
        """A reader of one answer.

        Args:
            prompt: the text before the answer, or its end.
            seed: what the ids of calls are made from.
        """
        if self._has_response_template:
            parser = self._tokenizer.get_response_parser(prefix=prompt, tools=[*template_inputs.tools] or None)
            return TemplateReader(parser, prompt, seed)
        return MarkReader([tool["function"]["name"] for tool in template_inputs.tools], prompt, seed)


class MarkReader:
    """Reads by the marks in `TOOL_CALL_FORMATS` and `REASONING`.

    Args:
        tools: names of the tools that may be called; without any, nothing is read as a call.
        prompt: the text before the answer; where that opens a reasoning block, the answer begins in it.
        seed: what the ids of calls are made from.
    """

    def __init__(self, tools: Collection[str], prompt: str, seed: bytes) -> None:
        self._tools = frozenset(tools)
        self._ids = _call_ids(seed)
        self._rest = ""
        self._has_begun = False
        self._skipped = ""  # letters to drop before the next text
        self._closing = _closing_of(prompt)
        self._format: ToolCallFormat | None = None

    @property
    def is_reasoning(self) -> bool:
        return bool(self._closing)

    @property
    def closing(self) -> str:
        return self._closing

    def push(self, text: str) -> list[AnswerPart]:
        self._rest += text
        return self._read(is_whole=False)

    def flush(self) -> list[AnswerPart]:
        return self._read(is_whole=True)

    def _read(self, is_whole: bool) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        while True:
            before = self._position
            if self._closing:
                parts += self._reasoning(is_whole)
            elif self._format is not None:
                parts += self._call(self._format, is_whole)
            else:
                parts += self._text(is_whole)
            if before == self._position:
                return [part for part in parts if not isinstance(part, Text | Reasoning) or part.text]

    @property
    def _position(self) -> tuple[int, str, ToolCallFormat | None, bool]:
        return len(self._rest), self._closing, self._format, self._has_begun

    def _reasoning(self, is_whole: bool) -> list[AnswerPart]:
        if not self._has_begun:
            self._rest = self._rest.lstrip("\n")
            self._has_begun = bool(self._rest)
        piece, mark, rest = self._rest.partition(self._closing)
        if mark:
            self._rest, self._closing = rest, ""
            self._has_begun, self._skipped = False, WHITE_SPACE
        else:
            piece, self._rest = self._certain((self._closing,), is_whole)
        return [Reasoning(piece)]

    def _text(self, is_whole: bool) -> list[AnswerPart]:
        if self._skipped:
            self._rest = self._rest.lstrip(self._skipped)
            self._skipped = "" if self._rest else self._skipped
        start = self._rest.lstrip()
        if not self._has_begun:
            for begin, end in REASONING:
                if start.startswith(begin):
                    self._rest, self._closing = start[len(begin) :], end
                    return []
            openings = [begin for begin, _ in REASONING]
            if self._tools:
                if start.startswith(("{", "[{", "```")):
                    return self._bare(start, is_whole)
                openings += ["```", "[{"]
            if not is_whole and any(begin.startswith(start) for begin in openings):
                return []
        formats = MARKED if self._tools else ()
        marks = [each.begin for each in formats]
        found = [(at, each) for each in formats if (at := self._rest.find(each.begin)) >= 0]
        if found:
            at, call_format = min(found, key=lambda pair: pair[0])
            piece, self._rest = self._rest[:at].rstrip(), self._rest[at + len(call_format.begin) :]
            self._format = call_format
        else:
            piece, self._rest = self._certain(marks, is_whole)
            if marks and not is_whole:  # white space before a call is not text
                text = piece.rstrip()
                piece, self._rest = text, piece[len(text) :] + self._rest
        self._has_begun = self._has_begun or bool(piece.strip())
        return [Text(piece)]

    def _certain(self, marks: Sequence[str], is_whole: bool) -> tuple[str, str]:
        """What is left, without what at its end may begin one of the marks; and that end."""
        return (self._rest, "") if is_whole else split_certain(self._rest, marks)

    def _bare(self, start: str, is_whole: bool) -> list[AnswerPart]:
        """An answer that begins like JSON: calls of known tools as soon as they are complete, else text."""
        size = len(start)
        try:
            if not start.startswith("`"):
                size = JSON.raw_decode(start)[1]
            elif not is_whole:
                return []
            calls = BARE.calls(start[:size])
        except (ValueError, RecursionError):
            self._has_begun = is_whole
            return []
        if any(call.name not in self._tools for call in calls):
            self._has_begun = True
            return []
        self._rest, self._skipped = start[size:], WHITE_SPACE + ";,"
        return [Call(*call, next(self._ids)) for call in calls]

    def _call(self, call_format: ToolCallFormat, is_whole: bool) -> list[AnswerPart]:
        body, mark, rest = self._rest.partition(call_format.end) if call_format.end else (self._rest, "", "")
        if not mark and not is_whole:
            return []
        self._rest, self._format = rest, None
        self._has_begun, self._skipped = False, WHITE_SPACE
        try:
            if call_format.end and not mark:
                JSON.decode(body)  # cut after a complete call: only its closing mark is missing
            return [Call(*call, next(self._ids)) for call in call_format.calls(body)]
        except ValueError as error:
            return [InvalidCall(f"{call_format.begin}{body}{mark}", str(error), next(self._ids))]


class TemplateReader:
    """Reads by a tokenizer's own response template, through transformers' parser for it.

    Fields of `THINKING_FIELDS` are reasoning, `tool_calls` are calls, `content` is text. A call that the parser gives
    up on is invalid, with all that follows it.
    """

    def __init__(self, parser: Any, prompt: str, seed: bytes) -> None:
        self.is_reasoning = False
        self.closing = _closing_of(prompt)
        self._parser = parser
        self._ids = _call_ids(seed)
        self._text = ""
        self._num_read = 0  # letters of the text that are in the parser's events
        self._field, self._begin, self._held = "", 0, ""  # the region under way: where its mark begins, what it holds
        self._error = ""
        self._parts(parser.initial_events)
        self._held = ""

    def push(self, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        for letter in text:  # one at a time: where the parser gives up, its events hold all before
            self._text += letter
            if not self._error:
                parts += self._read(lambda letter=letter: self._parser.feed(letter))  # type: ignore[misc]
        return parts

    def flush(self) -> list[AnswerPart]:
        parts = [] if self._error else self._read(lambda: self._parser.finalize()[1])
        if self._error and self._field == "tool_calls":
            parts.append(InvalidCall(self._text[self._begin :], self._error, next(self._ids)))
        elif self._error and self._num_read < len(self._text):
            parts.append(Text(self._text[self._num_read :]))
        return parts

    def _read(self, events: Callable[[], Iterable[Mapping[str, Any]]]) -> list[AnswerPart]:
        try:
            return self._parts(events())
        except (ValueError, LookupError, RecursionError) as error:
            self._error = str(error)
            return []

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> list[AnswerPart]:
        parts: list[AnswerPart] = []
        kind = "region_open"
        for event in events:
            field, kind = event["field"], event["type"]
            self.is_reasoning = field in THINKING_FIELDS and kind != "region_close"
            if kind == "region_open":
                self._field, self._begin, self._held = field, self._num_read, ""
            elif kind == "region_close" and field == "tool_calls":
                parts += self._calls(event["value"])
            elif kind == "region_chunk":
                before = self._held.strip()  # white space around a region is not part of it
                self._held += event["text"]
                piece = self._held.strip()[len(before) :]
                if piece and field == "content":
                    parts.append(Text(piece))
                elif piece and field in THINKING_FIELDS:
                    parts.append(Reasoning(piece))
        if kind != "region_open":  # else the last that came is the mark of what follows
            self._num_read = len(self._text)
        return parts

    def _calls(self, value: Any) -> list[AnswerPart]:
        try:
            return [Call(*call, next(self._ids)) for call in BARE.calls(json.dumps(value))]
        except (ValueError, TypeError) as error:
            return [InvalidCall(self._text[self._begin :], str(error), next(self._ids))]


def _call_ids(seed: bytes) -> Iterator[str]:
    """Ids for an answer's calls, one after another; the same for the same seed."""
    for number in itertools.count(1):
        yield hashlib.sha256(seed + number.to_bytes(4, "big")).hexdigest()[:ID_LETTERS]


def _closing_of(prompt: str) -> str:
    """What ends the reasoning block that a prompt's end opens; "" where it opens none."""
    return next((end for begin, end in REASONING if prompt.rstrip().endswith(begin)), "")
