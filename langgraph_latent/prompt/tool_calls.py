"""The forms in which models write tool calls: one row each in `TOOL_CALL_FORMATS`. It knows text and JSON only."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class Named(NamedTuple):
    """A function's name and arguments, as found in an answer."""

    name: str
    arguments: dict[str, Any]


class ToolCallFormat(NamedTuple):
    """A form in which models write tool calls.

    Attributes:
        begin: what opens it; "" for calls without a mark, which must begin the answer and name a known tool.
        end: what closes it; "" where it reaches to the answer's end.
        read: the calls in the text between; raises `ValueError` where there are none.
        arguments_key: under which key a call's JSON object has the arguments; "" where a call is not a JSON object.
    """

    begin: str
    end: str
    read: Callable[[str], list[Named]]
    arguments_key: str = "arguments"

    def calls(self, text: str) -> list[Named]:
        """The calls in a text. Raises `ValueError` where there are none, and where a checkpoint can't keep them."""
        try:
            calls = self.read(text)
            json.dumps(calls, ensure_ascii=False).encode()  # half a surrogate pair can't be encoded
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        return calls


def _integer(text: str) -> int:
    value = int(text)
    if not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"{text} has more than 64 bits")
    return value


def _not_json(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


JSON = json.JSONDecoder(parse_int=_integer, parse_constant=_not_json)
"""Reads only what a checkpoint can keep."""


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
    return [json_call(value) for value in values]


def json_call(value: Any) -> Named:
    if not isinstance(value, Mapping):
        raise ValueError("a call is not a JSON object")
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
        raise ValueError(f"the arguments of {name!r} are not a JSON object")
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
            raise ValueError("the arguments are not a JSON object")
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
    for name, body in calls:
        old = re.fullmatch(r"\s*([^\n]+)\n```(?:json)?\n(.*?)\n?```\s*", body, re.DOTALL)
        name, arguments = (old[1], old[2]) if old else (name, body)
        named.append(json_call({"name": name.strip(), "arguments": arguments}))
    return named


def _bare_calls(text: str) -> list[Named]:
    """JSON alone, or in a fence of backticks."""
    fenced = re.fullmatch(r"\s*```(?:json|tool_call|)\s*\n?(.*?)\n?\s*```\s*", text, re.DOTALL)
    return _json_calls(fenced[1] if fenced else text)


TOOL_CALL_FORMATS = (
    ToolCallFormat("<tool_call>", "</tool_call>", _tagged_calls),  # Qwen, Hermes, SmolLM3, GLM, Granite and most others
    ToolCallFormat("[TOOL_CALLS]", "", _mistral_calls),  # Mistral
    ToolCallFormat("<|python_tag|>", "", _json_calls, "parameters"),  # Llama 3
    ToolCallFormat(
        "<function=", "</function>", lambda text: _function_calls(f"<function={text}</function>"), ""
    ),  # Llama 3.1
    ToolCallFormat("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", _deepseek_calls, ""),  # DeepSeek V3, R1
    ToolCallFormat("<|tool_call|>", "", _json_calls),  # Granite 3, Phi 4
    ToolCallFormat("", "", _bare_calls),  # Llama 3.2, Qwen2.5-Coder: a JSON object and nothing else
)
BARE = TOOL_CALL_FORMATS[-1]
MARKED = TOOL_CALL_FORMATS[:-1]
CALL_MARKS = frozenset(
    [mark for each in MARKED for mark in (each.begin, each.end)]
    + ["[ARGS]", "[CALL_ID]", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"]
)


def format_of(before: str, after: str) -> ToolCallFormat:
    """The format in which a template renders a call, from what it writes before and after the function's name.

    One of those that hold JSON; `BARE` where the template uses none that has a mark.
    """
    marked = [(before.rfind(each.begin), each) for each in MARKED if each.arguments_key and each.begin in before]
    found = max(marked, key=lambda pair: pair[0])[1] if marked else BARE
    key = re.match(r'",\s*"(arguments|parameters)":', after)
    return found._replace(arguments_key=key[1]) if key else found
