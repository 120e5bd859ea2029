"""What one call shows its model and forces on the answer: tools, a tool choice, a JSON schema.

It knows the forms that LangChain and OpenAI have for these; not messages, models or handles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
from pydantic import BaseModel

from langgraph_latent.errors import ConfigError
from langgraph_latent.prompt.grammar import Constraint, check_grammars

Tool = Mapping[str, Any] | type | Callable[..., Any] | BaseTool
TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")
HIDDEN, UNFORCED, FORCED = ("none", False), ("none", False, "auto", None), ("any", "required", True)
"""Tool choices that are not a tool's name: no tools are shown, none must be called, one must be."""
ANY_JSON = {"type": "json_object"}
"""The response format of a JSON object whose keys the prompt itself asks for."""


@dataclass(frozen=True)
class CallTools:
    """A call's tool options, read once.

    Attributes:
        shown: the tools in the prompt, in OpenAI's form.
        asked_schema: the JSON schema that the prompt asks for, if any.
        constraint: what the answer is constrained to, if anything.
        max_calls: tool calls after which an answer ends; None for no limit.
    """

    shown: list[dict[str, Any]]
    asked_schema: Mapping[str, Any] | None
    constraint: Constraint | None
    max_calls: int | None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> CallTools:
        """Read `TOOL_OPTIONS`. Raises `ConfigError` for an unknown tool choice or response format."""
        choice, response_format = options.get("tool_choice"), options.get("response_format")
        shown = [] if choice in HIDDEN else openai_tools(options.get("tools") or ())
        schema = _schema_of(response_format)
        return cls(
            shown,
            None if response_format == ANY_JSON else schema,
            _constraint(shown, choice, schema),
            1 if options.get("parallel_tool_calls") is False else None,
        )

    def check_grammars(self) -> None:
        """Raise `MissingExtraError` where the answer is constrained and the extra `grammar` is not installed."""
        if self.constraint is not None:
            check_grammars()


def openai_tools(tools: Iterable[Tool], *, strict: bool | None = None) -> list[dict[str, Any]]:
    """Tools in OpenAI's form."""
    return [convert_to_openai_tool(tool, strict=strict) for tool in tools]


def structured_answers(
    chat: BaseChatModel,
    schema: dict[str, Any] | type,
    method: str,
    *,
    include_raw: bool,
    options: Mapping[str, Any],
) -> Runnable[Any, Any]:
    """A chat model whose answers are JSON by "json_schema" or "json_mode", parsed; bound to `options` too.

    With `include_raw` it answers with a dict of `raw`, `parsed` and `parsing_error`. Raises `ConfigError` for another
    method.
    """
    llm = chat.bind(
        response_format=_response_format(schema, method),
        ls_structured_output_format={"kwargs": {"method": method}, "schema": schema},
        **options,
    )
    parser: Any = JsonOutputParser()
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        parser = PydanticOutputParser(pydantic_object=schema)
    if not include_raw:
        return llm | parser
    parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    failed = RunnablePassthrough.assign(parsed=lambda _: None)
    return RunnableMap(raw=llm) | parsed.with_fallbacks([failed], exception_key="parsing_error")


def _response_format(schema: dict[str, Any] | type, method: str) -> dict[str, Any]:
    if method == "json_mode":
        return {**ANY_JSON}
    if method != "json_schema":
        raise ConfigError(f"method={method!r} is unknown; known methods: function_calling, json_schema, json_mode")
    as_json = convert_to_json_schema(schema)
    return {"type": "json_schema", "json_schema": {"name": as_json["title"], "schema": as_json}}


def _constraint(shown: list[dict[str, Any]], choice: Any, schema: Mapping[str, Any] | None) -> Constraint | None:
    if isinstance(choice, Mapping):  # in OpenAI's form, or in Anthropic's; any other is refused below
        named = choice.get("function", choice)
        choice = (named.get("name") if isinstance(named, Mapping) else None) or {**choice}
    if choice in UNFORCED:
        return None if schema is None else Constraint(shown, schema)
    chosen = [tool for tool in shown if choice in FORCED or tool["function"]["name"] == choice]
    if not chosen:
        names = ", ".join(tool["function"]["name"] for tool in shown) or "none"
        raise ConfigError(f"tool_choice={choice!r} is not a bound tool; bound tools: {names}; or auto, any, none")
    return Constraint(chosen)


def _schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema that a `response_format` (OpenAI's form) asks for. Raises `ConfigError` for another form."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        return {"type": "object"}
    named = response_format.get("json_schema") if kind == "json_schema" else None
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError(
            f"response_format={response_format!r} is unknown; use with_structured_output(), or "
            '{"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}, or {"type": "json_object"}'
        )
    return schema
