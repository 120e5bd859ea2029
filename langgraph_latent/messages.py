"""LangChain's messages as plain data for a chat template, and answers as LangChain's messages. It knows no models."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk

from langgraph_latent.errors import PromptError
from langgraph_latent.handle.handle import Message
from langgraph_latent.prompt.answer import Answer, Call, Part, Reasoning, Text

ROLES = {
    HumanMessage: "user",
    SystemMessage: "system",
    AIMessage: "assistant",
    ToolMessage: "tool",
    FunctionMessage: "tool",
}
OUTSIDE_TEXT = (
    "reasoning",
    "thinking",
    "redacted_thinking",
    "tool_call",
    "tool_use",
    "invalid_tool_call",
    "function_call",
)
"""Content blocks of an AIMessage that are told by its other fields."""
SCHEMA_TEXT = "Answer with one JSON object that matches this JSON schema, and nothing else:\n{schema}"
SCHEMA_TEXT_WITH_TOOLS = "When you give the final answer, give one JSON object that matches this JSON schema:\n{schema}"


def plain_message(message: BaseMessage) -> Message:
    """A LangChain message as plain data for a chat template. Raises `PromptError` for content that is not text."""
    if isinstance(message, ChatMessage):
        role = message.role
    else:
        known = [name for kind, name in ROLES.items() if isinstance(message, kind)]
        if not known:
            raise PromptError(
                f"a {type(message).__name__} can't be part of a prompt; pass human, system, assistant or tool messages"
            )
        role = known[0]
    plain: Message = {"role": role, "content": _text_of(message)}
    if message.name:
        plain["name"] = message.name
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    if isinstance(message, AIMessage):
        if thought := _reasoning_of(message):
            plain["reasoning_content"] = thought
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "type": "function",
                    "id": call["id"],
                    "function": {"name": call["name"], "arguments": _as_json(call["args"])},
                }
                for call in message.tool_calls
            ]
    return plain


def with_schema(messages: list[Message], schema: Mapping[str, Any] | None, *, has_tools: bool) -> list[Message]:
    """The messages with a request for JSON of a schema at their end, where a cached prefix is not disturbed by it."""
    if schema is None:
        return messages
    text = (SCHEMA_TEXT_WITH_TOOLS if has_tools else SCHEMA_TEXT).format(schema=json.dumps(schema, ensure_ascii=False))
    if messages and messages[-1]["role"] == "user":
        return [*messages[:-1], {**messages[-1], "content": f"{messages[-1]['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]


def answer_message(answer: Answer, **fields: Any) -> AIMessage:
    """A whole answer."""
    return AIMessage(
        answer.text,
        additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=call.raw, id=call.id, error=call.error) for call in answer.invalid_calls
        ],
        **fields,
    )


def answer_chunk(part: Part, index: int) -> AIMessageChunk:
    """A part of an answer; `index` counts its tool calls."""
    if isinstance(part, Text):
        return AIMessageChunk(content=part.text)
    if isinstance(part, Reasoning):
        return AIMessageChunk(content="", additional_kwargs={"reasoning_content": part.text})
    if isinstance(part, Call):
        name, arguments = part.name, json.dumps(part.arguments, ensure_ascii=False)
    else:  # LangChain finds out by itself that this is no JSON
        name, arguments = None, part.raw
    return AIMessageChunk(
        content="", tool_call_chunks=[tool_call_chunk(name=name, args=arguments, id=part.id, index=index)]
    )


def _as_json(value: Any) -> Any:
    """A value as a JSON reader would get it; what JSON has no form for (dates, sets) as text."""
    return json.loads(json.dumps(value, default=str))


def _text_of(message: BaseMessage) -> str:
    blocks = [message.content] if isinstance(message.content, str) else message.content
    texts = []
    for block in blocks:
        kind = "text" if isinstance(block, str) else block.get("type")
        if kind in OUTSIDE_TEXT and isinstance(message, AIMessage):
            continue
        if kind not in ("text", "text-plain"):
            raise PromptError(f"a message holds a block of type {kind!r}; ChatLatent reads text only; leave it out")
        texts.append(block if isinstance(block, str) else str(block.get("text", "")))
    if isinstance(message, AIMessage):
        told = [(call["name"], call["args"]) for call in message.invalid_tool_calls]
        raws = [" ".join(part for part in parts if part) for parts in told]
        return "\n".join(part for part in ("".join(texts), *raws) if part)
    return "".join(texts)


def _reasoning_of(message: AIMessage) -> str:
    """Reasoning, from wherever LangChain keeps it."""
    thought = message.additional_kwargs.get("reasoning_content")
    if isinstance(thought, str):
        return thought
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "reasoning"]
    return "".join(str(block.get("reasoning", "")) for block in blocks)
