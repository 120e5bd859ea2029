"""What an answer's text says: text, reasoning and tool calls, told apart while it is written. Plain text and JSON only.

`SHAPES` has one row per form in which models write tool calls, `REASONING` one per form of thinking aloud. A tokenizer
that ships its own response template is read by that instead.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from langgraph_latent.handle import Message

REASONING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|inner_prefix|>", "<|inner_suffix|>"))
THINKING_FIELDS = ("thinking", "reasoning", "reasoning_content")
WHITE_SPACE = " \t\r\n"
ID_LETTERS = 9
"""Length of a tool call's id: what Mistral's templates demand, and all others take."""


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
    """Something that is marked as a tool call, whole, and can't be read as one."""

    raw: str
    error: str
    id: str


Part = Text | Reasoning | Call | InvalidCall


class Named(NamedTuple):
    """A function's name and arguments, as found in an answer."""

    name: str
    arguments: dict[str, Any]


class Shape(NamedTuple):
    """A form in which models write tool calls.

    Attributes:
        begin: what opens it; "" for calls without a mark, which must begin the answer and name a known tool.
        end: what closes it; "" where it reaches to the answer's end.
        read: the calls in what stands between; raises `ValueError` where there are none.
        arguments_key: under which key a call's JSON object has the arguments; "" where a call is none.
    """

    begin: str
    end: str
    read: Callable[[str], list[Named]]
    arguments_key: str = "arguments"

    def calls(self, text: str) -> list[Named]:
        """The calls in a text. Raises `ValueError` where there are none, or none that a checkpoint can keep."""
        try:
            calls = self.read(text)
            json.dumps(calls, ensure_ascii=False).encode()  # half a surrogate pair is no text
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return calls


def _integer(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{text} has more than 64 bits")
    return value


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


JSON = json.JSONDecoder(parse_int=_integer, parse_constant=_no_number)
"""Reads what a checkpoint can keep."""


def _json_calls(text: str) -> list[Named]:
    """JSON objects (a list of them, or one after another), `name` or `function` with `arguments` or `parameters`."""
    values, at = [], 0
    while rest := text[at:].lstrip(" \t\r\n;,"):
        at = len(text) - len(rest)
        value, size = JSON.raw_decode(rest)
        values += value if isinstance(value, list) else [value]
        at += size
    if not values:
        raise ValueError("there is no JSON object")
    return [_json_call(value) for value in values]


def _json_call(value: Any) -> Named:
    if not isinstance(value, Mapping):
        raise ValueError("a call is no JSON object")
    inner = value.get("function")
    if isinstance(inner, Mapping):
        value = inner
    name = value.get("name", inner)
    arguments: Any = next((value[key] for key in ("arguments", "parameters", "args") if key in value), {})
    if isinstance(arguments, str):
        arguments = JSON.decode(arguments)
    if not isinstance(name, str) or not name:
        raise ValueError("a call has no name")
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {name!r} are no JSON object")
    return Named(name, arguments)


def _tagged_calls(text: str) -> list[Named]:
    """JSON, or what some models write in the same tags: `<function=name><parameter=key>value</parameter></function>`
    (Qwen3-Coder), or a name and then `<arg_key>key</arg_key><arg_value>value</arg_value>` (GLM)."""
    if "<function=" in text:
        return _function_calls(text)
    name, mark, _ = text.partition("<arg_key>")
    if not mark:
        return _json_calls(text)
    pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", text, re.DOTALL)
    return [Named(name.strip(), {key.strip(): _value(value) for key, value in pairs})]


def _function_calls(text: str) -> list[Named]:
    found = re.findall(r"<function=([^>\n]+)>(.*?)(?:</function>|\Z)", text, re.DOTALL)
    if not found:
        raise ValueError("there is no <function=...>")
    return [Named(name.strip(), _function_arguments(body)) for name, body in found]


def _function_arguments(body: str) -> dict[str, Any]:
    parameters = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    if not parameters and body.strip():
        arguments = JSON.decode(body)
        if not isinstance(arguments, dict):
            raise ValueError("the arguments are no JSON object")
        return arguments
    return {name.strip(): _value(text) for name, text in parameters}


def _value(text: str) -> Any:
    """A parameter's value: JSON where it is that, else the text itself."""
    try:
        return JSON.decode(text)
    except ValueError:
        return text


def _mistral_calls(text: str) -> list[Named]:
    """A JSON list, or `name{...}`, `name[ARGS]{...}` one after another."""
    if text.lstrip().startswith(("[", "{")):
        return _json_calls(text)
    calls: list[Named] = []
    rest = text.strip()
    while rest or not calls:
        found = re.match(r"(?:\[TOOL_CALLS\])?\s*([\w.-]+)\s*(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{)", rest)
        if not found:
            raise ValueError("expected a function's name and its arguments")
        arguments, size = JSON.raw_decode(rest[found.end() :])
        calls.append(Named(found[1], arguments))
        rest = rest[found.end() + size :].lstrip(" \t\r\n,;")
    return calls


def _deepseek_calls(text: str) -> list[Named]:
    calls = re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", text, re.DOTALL)
    if not calls:
        raise ValueError("there is no complete call")
    named = []
    for head, body in calls:
        old = re.fullmatch(r"\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", body, re.DOTALL)
        name, arguments = (old[1], old[2]) if old else (head, body)
        named.append(_json_call({"name": name.strip(), "arguments": arguments}))
    return named


def _bare_calls(text: str) -> list[Named]:
    """JSON alone, or in a fence of backticks."""
    fenced = re.fullmatch(r"\s*```(?:json|tool_call|)\s*\n?(.*?)\n?\s*```\s*", text, re.DOTALL)
    return _json_calls(fenced[1] if fenced else text)


SHAPES = (
    Shape("<tool_call>", "</tool_call>", _tagged_calls),  # Qwen, Hermes, SmolLM3, GLM, Granite and most others
    Shape("[TOOL_CALLS]", "", _mistral_calls),  # Mistral
    Shape("<|python_tag|>", "", _json_calls, "parameters"),  # Llama 3
    Shape("<function=", "</function>", lambda text: _function_calls(f"<function={text}</function>"), ""),  # Llama 3.1
    Shape("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_calls, ""),  # DeepSeek V3, R1
    Shape("<|tool_call|>", "", _json_calls),  # Granite 3, Phi 4
    Shape("", "", _bare_calls),  # Llama 3.2, Qwen2.5-Coder: a JSON object and nothing else
)
BARE = SHAPES[-1]
MARKED = SHAPES[:-1]
REASONING_MARKS = frozenset(mark for pair in REASONING for mark in pair)
CALL_MARKS = frozenset(
    [mark for shape in MARKED for mark in (shape.begin, shape.end)]
    + ["[ARGS]", "[CALL_ID]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
)


class Reader(Protocol):
    """Takes an answer's text piece by piece, and tells its parts as soon as they are certain."""

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is thinking aloud now."""

    @property
    def closing(self) -> str:
        """What will end the thinking aloud; "" where there is none, or its end is not known."""

    def push(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]: ...


class Answer:
    """An answer so far.

    Attributes:
        text: what is said, without reasoning and tool calls.
        reasoning: what was thought aloud.
        calls, invalid_calls: tool calls.
    """

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[Call] = []
        self.invalid_calls: list[InvalidCall] = []

    def add(self, part: Part) -> None:
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
        """The answer as a plain chat message; what can't be read as a call stays in its text."""
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


class MarkReader:
    """Reads by the marks in `SHAPES` and `REASONING`.

    Args:
        tools: names of the tools that may be called; without any, nothing is taken for a call.
        prompt: the text before the answer; where it ends in an opened reasoning block, the answer begins in it.
        seed: what the ids of calls are made from.
    """

    def __init__(self, tools: Collection[str], prompt: str, seed: bytes) -> None:
        self._tools = frozenset(tools)
        self._seed = seed
        self._num_calls = 0
        self._rest = ""
        self._has_begun = False
        self._skipped = ""  # what is dropped before the next text
        self._closing = _closing_of(prompt)
        self._shape: Shape | None = None

    @property
    def is_reasoning(self) -> bool:
        return bool(self._closing)

    @property
    def closing(self) -> str:
        return self._closing

    def push(self, text: str) -> list[Part]:
        self._rest += text
        return self._read(is_whole=False)

    def flush(self) -> list[Part]:
        return self._read(is_whole=True)

    def _read(self, is_whole: bool) -> list[Part]:
        parts: list[Part] = []
        while True:
            before = self._position
            if self._closing:
                parts += self._reasoning(is_whole)
            elif self._shape is not None:
                parts += self._call(self._shape, is_whole)
            else:
                parts += self._text(is_whole)
            if before == self._position:
                return [part for part in parts if not isinstance(part, Text | Reasoning) or part.text]

    @property
    def _position(self) -> tuple[int, str, Shape | None, bool]:
        return len(self._rest), self._closing, self._shape, self._has_begun

    def _reasoning(self, is_whole: bool) -> list[Part]:
        if not self._has_begun:
            self._rest = self._rest.lstrip("\n")
            self._has_begun = bool(self._rest)
        piece, mark, rest = self._rest.partition(self._closing)
        if mark:
            self._rest, self._closing = rest, ""
            self._has_begun, self._skipped = False, WHITE_SPACE
        else:
            piece, self._rest = _certain(self._rest, (self._closing,), is_whole)
        return [Reasoning(piece)]

    def _text(self, is_whole: bool) -> list[Part]:
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
        marks = [shape.begin for shape in MARKED] if self._tools else []
        found = [(at, shape) for shape in MARKED if self._tools and (at := self._rest.find(shape.begin)) >= 0]
        if found:
            at, shape = min(found, key=lambda pair: pair[0])
            piece, self._rest, self._shape = self._rest[:at].rstrip(), self._rest[at + len(shape.begin) :], shape
        else:
            piece, self._rest = _certain(self._rest, marks, is_whole)
            if marks and not is_whole:  # white space before a call is not said
                said = piece.rstrip()
                piece, self._rest = said, piece[len(said) :] + self._rest
        self._has_begun = self._has_begun or bool(piece.strip())
        return [Text(piece)]

    def _bare(self, start: str, is_whole: bool) -> list[Part]:
        """An answer that begins like JSON: calls of known tools as soon as they are whole, or just text."""
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
        return [self._made(call) for call in calls]

    def _call(self, shape: Shape, is_whole: bool) -> list[Part]:
        body, mark, rest = self._rest.partition(shape.end) if shape.end else (self._rest, "", "")
        if not mark and not is_whole:
            return []
        self._rest, self._shape = rest, None
        self._has_begun, self._skipped = False, WHITE_SPACE
        try:
            if shape.end and not mark:
                JSON.decode(body)  # cut behind a complete call: only its closing mark is missing
            return [self._made(call) for call in shape.calls(body)]
        except ValueError as error:
            return [InvalidCall(f"{shape.begin}{body}{mark}", str(error), self._next_id())]

    def _made(self, call: Named) -> Call:
        return Call(call.name, call.arguments, self._next_id())

    def _next_id(self) -> str:
        self._num_calls += 1
        return hashlib.sha256(self._seed + self._num_calls.to_bytes(4, "big")).hexdigest()[:ID_LETTERS]


class TemplateReader:
    """Reads by a tokenizer's own response template, through transformers' parser for it.

    Fields of `THINKING_FIELDS` are reasoning, `tool_calls` are calls, `content` is text. A call that the parser gives
    up on is invalid, with all that comes behind it.
    """

    def __init__(self, parser: Any, prompt: str, seed: bytes) -> None:
        self.is_reasoning = False
        self.closing = _closing_of(prompt)
        self._parser = parser
        self._seed = seed
        self._num_calls = 0
        self._text = ""
        self._told = 0  # how much of the text the parser has told of
        self._field, self._begin, self._said = "", 0, ""  # the region under way: where its mark begins, what it holds
        self._error = ""
        self._parts(parser.initial_events)
        self._said = ""

    def push(self, text: str) -> list[Part]:
        parts: list[Part] = []
        for letter in text:  # one at a time: where the parser gives up, it has told of all before
            self._text += letter
            if not self._error:
                parts += self._read(lambda letter=letter: self._parser.feed(letter))  # type: ignore[misc]
        return parts

    def flush(self) -> list[Part]:
        parts = [] if self._error else self._read(lambda: self._parser.finalize()[1])
        if self._error and self._field == "tool_calls":
            parts.append(InvalidCall(self._text[self._begin :], self._error, self._next_id()))
        elif self._error and self._told < len(self._text):
            parts.append(Text(self._text[self._told :]))
        return parts

    def _read(self, events: Callable[[], Iterable[Mapping[str, Any]]]) -> list[Part]:
        try:
            return self._parts(events())
        except (ValueError, LookupError, RecursionError) as error:
            self._error = str(error)
            return []

    def _parts(self, events: Iterable[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        kind = "region_open"
        for event in events:
            field, kind = event["field"], event["type"]
            self.is_reasoning = field in THINKING_FIELDS and kind != "region_close"
            if kind == "region_open":
                self._field, self._begin, self._said = field, self._told, ""
            elif kind == "region_close" and field == "tool_calls":
                parts += self._calls(event["value"])
            elif kind == "region_chunk":
                before = self._said.strip()  # white space around a region is not said
                self._said += event["text"]
                piece = self._said.strip()[len(before) :]
                if piece and field == "content":
                    parts.append(Text(piece))
                elif piece and field in THINKING_FIELDS:
                    parts.append(Reasoning(piece))
        if kind != "region_open":  # else the last that came is a mark of what follows
            self._told = len(self._text)
        return parts

    def _calls(self, value: Any) -> list[Part]:
        try:
            return [Call(*call, self._next_id()) for call in BARE.calls(json.dumps(value))]
        except (ValueError, TypeError) as error:
            return [InvalidCall(self._text[self._begin :], str(error), self._next_id())]

    def _next_id(self) -> str:
        self._num_calls += 1
        return hashlib.sha256(self._seed + self._num_calls.to_bytes(4, "big")).hexdigest()[:ID_LETTERS]


def shape_of(told: str, name: str) -> Shape:
    """The shape in which a template tells a call of function `name`, of those that hold JSON; `BARE` where it is none
    that has a mark."""
    before, _, behind = told.partition(name)
    marked = [(before.rfind(shape.begin), shape) for shape in MARKED if shape.arguments_key and shape.begin in before]
    shape = max(marked, key=lambda pair: pair[0])[1] if marked else BARE
    key = re.match(r'",\s*"(arguments|parameters)":', behind)
    return shape._replace(arguments_key=key[1]) if key else shape


def _closing_of(prompt: str) -> str:
    """What ends the reasoning block that a prompt's end opens; "" where it opens none."""
    return next((end for begin, end in REASONING if prompt.rstrip().endswith(begin)), "")


def _certain(text: str, marks: Sequence[str], is_whole: bool) -> tuple[str, str]:
    """A text, and what at its end may begin one of the marks."""
    if is_whole:
        return text, ""
    held = max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
    return text[: len(text) - held], text[len(text) - held :]
