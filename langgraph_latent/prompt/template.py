"""One model's chat template: what it can render, found out by trying, and messages adapted to that.

Many templates refuse or silently drop what a graph sends: a system message, tools, tool results, two messages of one
role in a row. Each has one adaptation here. It is used only where the template needs it, and named in the result. This
module knows text, and no token ids.

| code | what happens where the template can't render it |
|---|---|
| `tool_calls_as_text` | calls, even if only several at once or beside text, follow the text in `<tool_call>` tags |
| `tool_results_as_user` | a tool's result is a user message in `<tool_response>` tags |
| `tools_in_system` | the tools' JSON schemas and how to call them end the system message |
| `system_in_user` | the system message leads the first user message |
| `late_system_as_user` | a system message after the first message is a user message |
| `roles_merged` | neighbours of one role become one message, an empty line between them |
| `short_call_ids` | tool call ids become nine letters and digits, as Mistral's templates demand |
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

from langgraph_latent.errors import TemplateError
from langgraph_latent.handle.message import Message

ID_LETTERS = 9
"""Length of a tool call's id: what Mistral's templates demand, and all others take."""
MARK, OTHER_MARK = "latentmarkone", "latentmarktwo"
"""Words in a probe of the template: is each of them in the rendered text?"""
USER: Message = {"role": "user", "content": "hello"}
ANSWER: Message = {"role": "assistant", "content": "hello"}
TOOLS_TEXT = """# Tools

You may call one or more functions. Their signatures are within <tools></tools> tags:
<tools>
{tools}
</tools>

To call a function, answer with its name and arguments as a JSON object within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


class TemplateInputs(NamedTuple):
    """What a template gets beside the messages: tools as JSON schemas (OpenAI's form), and options of its own."""

    tools: Sequence[dict[str, Any]] = ()
    options: Mapping[str, Any] = {}

    @property
    def digest(self) -> str:
        """Sixteen letters, different for different inputs; "" for nothing beside the messages."""
        if not self.tools and not self.options:
            return ""
        text = json.dumps([[*self.tools], dict(self.options)], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


PLAIN = TemplateInputs()
"""Nothing beside the messages."""


class Adapted(NamedTuple):
    """Messages and tools as a template can render them, and the codes of what was changed for that."""

    messages: list[Message]
    tools: Sequence[dict[str, Any]]
    changes: tuple[str, ...]


class ChatTemplate:
    """A tokenizer's chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name

    def render(self, messages: Sequence[Message], template_inputs: TemplateInputs, *, reply: bool) -> str:
        """The prompt text, adapted where needed; with `reply` it ends where the assistant's answer begins.

        Raises `TemplateError` where there is no template, and where it refuses the adapted messages too.
        """
        messages, tools, _ = self.adapt(messages, template_inputs.tools)
        return self._render(messages, tools, template_inputs.options, reply)

    def adapt(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> Adapted:
        """Messages and tools as this template can render them; unchanged where it can render all of it."""
        adapted = [*messages]
        changes = []

        def change(code: str, by: Callable[[list[Message]], list[Message]]) -> None:
            nonlocal adapted
            adapted = by(adapted)
            changes.append(code)

        calling = [message for message in self._as_neighbours(adapted) if message.get("tool_calls")]
        is_partial = bool(calling and self._call_arguments) and not self._renders_all_of(calling)
        if calling and (is_partial or not self._call_arguments):
            change("tool_calls_as_text", _calls_as_text)
        elif calling and self._call_arguments is str:
            adapted = _arguments_as_text(adapted)
        if any(message["role"] == "tool" for message in adapted) and (is_partial or not self._supports_results):
            change("tool_results_as_user", _results_as_user)
        if any(_is_long_id(each) for each in adapted) and not self._supports_long_ids and self._call_arguments:
            change("short_call_ids", _with_short_ids)
        if tools and not self.renders_tools:
            text = TOOLS_TEXT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
            change("tools_in_system", lambda each: _with_system(each, text))
            tools = ()
        if any(message["role"] == "system" for message in adapted[1:]) and not self._supports_late_system:
            change("late_system_as_user", _late_system_as_user)
        if adapted and adapted[0]["role"] == "system" and not self._supports_system:
            change("system_in_user", _system_in_user)
        if self._as_neighbours(adapted) is not adapted:
            change("roles_merged", _merge_roles)
        return Adapted(adapted, tools, tuple(changes))

    def _as_neighbours(self, messages: list[Message]) -> list[Message]:
        """The messages, with neighbours of one role merged where the template needs that."""
        has_alike = any(_are_alike(*pair) for pair in itertools.pairwise(messages))
        return _merge_roles(messages) if has_alike and not self._supports_repeats else messages

    @cached_property
    def renders_tools(self) -> bool:
        """Whether the template itself renders tools, beside a system message if it supports one."""
        system = [{"role": "system", "content": OTHER_MARK}] if self._supports_system else []
        return self._renders_lead(system, OTHER_MARK if system else MARK, tools=[_tool(MARK)])

    @cached_property
    def call_frame(self) -> tuple[str, str]:
        """What the template writes before and after the name of a called function; twice "" where it refuses calls."""
        messages = self.adapt([USER, _call(MARK, {"x": 1})]).messages
        before, _, after = (self._try(messages) or "").partition(MARK)
        return before, after

    # -- what the template can render; each is tried once, when it first matters -----------------------------------

    @cached_property
    def _supports_system(self) -> bool:
        return self._renders_lead([{"role": "system", "content": MARK}])

    @cached_property
    def _supports_late_system(self) -> bool:
        late: Message = {"role": "system", "content": MARK}
        first = [{"role": "system", "content": OTHER_MARK}] if self._supports_system else []
        also = OTHER_MARK if first else MARK
        return all(self._renders_marks([*first, USER, *rest, late, USER], also) for rest in ([], [ANSWER]))

    @cached_property
    def _supports_repeats(self) -> bool:
        """Whether two messages of one role in a row are both rendered."""
        users = [{"role": "user", "content": mark} for mark in (MARK, OTHER_MARK)]
        answers = [{"role": "assistant", "content": mark} for mark in (MARK, OTHER_MARK)]
        return self._renders_marks(users, OTHER_MARK) and self._renders_marks([USER, *answers, USER], OTHER_MARK)

    @cached_property
    def _call_arguments(self) -> type | None:
        """The type of a call's arguments that the template takes: dict, str (JSON), or None: it renders no calls."""
        for arguments in ({MARK: 1}, json.dumps({MARK: 1})):
            text = self._try(_calling(_call(OTHER_MARK, arguments), _result("42")))
            if text and MARK in text and OTHER_MARK in text and repr({MARK: 1}) not in text:  # Python is not JSON
                return type(arguments)
        return None

    def _renders_all_of(self, calling: Sequence[Message]) -> bool:
        """Whether all of messages with calls is rendered: some templates render one call only, or no text beside it."""
        has_several = any(len(message["tool_calls"]) > 1 for message in calling)
        has_text = any(message["content"] for message in calling)
        return (not has_several or self._supports_parallel_calls) and (not has_text or self._supports_text_beside_calls)

    @cached_property
    def _supports_text_beside_calls(self) -> bool:
        return self._renders_marks(_calling({**self._known_call, "content": MARK}, _result("42")))

    @cached_property
    def _supports_parallel_calls(self) -> bool:
        first, second = (self._known_call_of(mark) for mark in (MARK, OTHER_MARK))
        both = {**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}
        return self._renders_marks(_calling(both, _result("1"), _result("2")), OTHER_MARK)

    @cached_property
    def _supports_results(self) -> bool:
        return self._renders_marks(_calling(self._known_call, _result(MARK)))

    @cached_property
    def _supports_long_ids(self) -> bool:
        messages = _calling(self._known_call, _result(MARK))
        return self._renders_marks([_with_ids(message, lambda _: "call_0123456789abcdef") for message in messages])

    @property
    def _known_call(self) -> Message:
        return self._known_call_of("f")

    def _known_call_of(self, name: str) -> Message:
        arguments: Any = {"x": 1}
        return _call(name, json.dumps(arguments) if self._call_arguments is str else arguments)

    def _renders_lead(self, lead: list[Message], also: str = MARK, tools: Sequence[dict[str, Any]] = ()) -> bool:
        """Whether what leads a conversation is rendered in each kind of conversation that the template accepts.

        Some templates render a system message only beside the last message, and only if that is a user's.
        """
        rests = [[USER], [USER, ANSWER, USER], [USER, self._known_call, _result("42")]]
        return all(
            self._renders_marks([*lead, *rest], also, tools) for rest in rests if self._try(rest) or rest == [USER]
        )

    def _renders_marks(self, messages: list[Message], also: str = MARK, tools: Sequence[dict[str, Any]] = ()) -> bool:
        """Whether the marks in the messages are in the rendered text."""
        text = self._try(messages, tools)
        return text is not None and MARK in text and also in text

    def _try(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> str | None:
        try:
            return self._render(messages, tools, {}, reply=False)
        except TemplateError:
            return None

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], options: Mapping[str, Any], reply: bool
    ) -> str:
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"{self._name!r} has no chat template; pass an instruction-tuned model, or save a chat_template.jinja "
                "in its folder"
            )
        try:
            text: Any = self._tokenizer.apply_chat_template(
                [*messages], tools=[*tools] or None, tokenize=False, add_generation_prompt=reply, **options
            )
        except (JinjaError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template of {self._name!r} refuses these messages (roles: {roles}): {error}"
            ) from error
        if not text:
            raise TemplateError(f"the chat template of {self._name!r} renders nothing for these messages")
        return str(text)


def _tagged_call(name: str, arguments: Any) -> str:
    """A tool call in the form that `TOOLS_TEXT` asks for."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def _tool(name: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"x": {"type": "integer", "description": "x"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": schema}}


def _call(name: str, arguments: Any) -> Message:
    call = {"type": "function", "id": "abcdef123", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(text: str) -> Message:
    return {"role": "tool", "name": "f", "tool_call_id": "abcdef123", "content": text}


def _calling(call: Message, *results: Message) -> list[Message]:
    """A conversation around a call, in the one order that every template with calls takes."""
    return [USER, call, *results, ANSWER, USER]


def _calls_as_text(messages: list[Message]) -> list[Message]:
    return [_with_tagged_calls(message) if message.get("tool_calls") else message for message in messages]


def _with_tagged_calls(message: Message) -> Message:
    calls = [call["function"] for call in message["tool_calls"]]
    parts = [message["content"], *(_tagged_call(call["name"], call["arguments"]) for call in calls)]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(part for part in parts if part)}


def _arguments_as_text(messages: list[Message]) -> list[Message]:
    def with_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    return [
        {**message, "tool_calls": [with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _results_as_user(messages: list[Message]) -> list[Message]:
    return [
        {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if message["role"] == "tool"
        else message
        for message in messages
    ]


def _with_system(messages: list[Message], text: str) -> list[Message]:
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _late_system_as_user(messages: list[Message]) -> list[Message]:
    late = [{**each, "role": "user"} if each["role"] == "system" else each for each in messages[1:]]
    return [messages[0], *late]


def _system_in_user(messages: list[Message]) -> list[Message]:
    system, *rest = messages
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system['content']}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [{**system, "role": "user"}, *rest]


def _are_alike(first: Message, second: Message) -> bool:
    return bool(first["role"] == second["role"] != "tool")


def _merge_roles(messages: list[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if merged and _are_alike(merged[-1], message):
            merged[-1] = _merged(merged[-1], message)
        else:
            merged.append(message)
    return merged


def _merged(first: Message, second: Message) -> Message:
    """Two messages of one role as one; the name stays where both have the same."""
    merged: Message = {"role": first["role"]}
    for field in ("content", "reasoning_content"):
        if field in first or field in second:
            merged[field] = "\n\n".join(part for part in (first.get(field), second.get(field)) if part)
    if calls := [*first.get("tool_calls", ()), *second.get("tool_calls", ())]:
        merged["tool_calls"] = calls
    if first.get("name") == second.get("name") is not None:
        merged["name"] = first["name"]
    return merged


def _is_long_id(message: Message) -> bool:
    ids = [message.get("tool_call_id"), *(call.get("id") for call in message.get("tool_calls", ()))]
    return any(each is not None and not re.fullmatch(rf"[A-Za-z0-9]{{{ID_LETTERS}}}", each) for each in ids)


def _with_short_ids(messages: list[Message]) -> list[Message]:
    return [
        _with_ids(message, lambda own: hashlib.sha256(str(own).encode()).hexdigest()[:ID_LETTERS])
        for message in messages
    ]


def _with_ids(message: Message, new: Callable[[Any], str]) -> Message:
    """A message with other tool call ids."""
    changed = {**message}
    if "tool_call_id" in message:
        changed["tool_call_id"] = new(message["tool_call_id"])
    if message.get("tool_calls"):
        changed["tool_calls"] = [{**call, "id": new(call.get("id"))} for call in message["tool_calls"]]
    return changed
