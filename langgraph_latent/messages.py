"""What LangChain passes (messages, a run's config) as plain data, and generations as LangChain's replies.

It does not know how a reply comes about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from langchain_core.messages.ai import OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import ensure_config

from langgraph_latent.errors import PromptError
from langgraph_latent.events import CallSite
from langgraph_latent.handle.message import Message
from langgraph_latent.prompt.answer import AnswerPart, Call, InvalidCall, Reasoning, Text
from langgraph_latent.workspace.generation import Generation

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
"""Content blocks of an AIMessage that its other fields hold."""
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
        if reasoning := _reasoning_of(message):
            plain["reasoning_content"] = reasoning
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


def plain_prompt(
    messages: Iterable[BaseMessage], schema: Mapping[str, Any] | None = None, *, has_tools: bool = False
) -> list[Message]:
    """Messages as plain data, with a request for JSON of a schema at their end, where it disturbs no cached prefix.

    Raises `PromptError` where none of them holds anything.
    """
    plain = [plain_message(message) for message in messages]
    if not any(str(message["content"]).strip() or message.get("tool_calls") for message in plain):
        raise PromptError("the prompt is empty: pass at least one message with some text")
    if schema is None:
        return plain
    text = (SCHEMA_TEXT_WITH_TOOLS if has_tools else SCHEMA_TEXT).format(schema=json.dumps(schema, ensure_ascii=False))
    if plain[-1]["role"] == "user":
        return [*plain[:-1], {**plain[-1], "content": f"{plain[-1]['content']}\n\n{text}"}]
    return [*plain, {"role": "user", "content": text}]


def call_site(config: RunnableConfig | None) -> CallSite:
    """Where in a graph this call happens, from the metadata that LangGraph puts into a run's config."""
    config = ensure_config(config)
    metadata = config.get("metadata") or {}
    run_id = config.get("run_id") or getattr(config.get("callbacks"), "parent_run_id", None)
    thread_id = metadata.get("thread_id") or (config.get("configurable") or {}).get("thread_id")
    return CallSite(str(metadata.get("langgraph_node") or ""), str(thread_id or ""), str(run_id or ""))


def batch_config(config: Any, num_calls: int) -> Any:
    """The config of a batch, or one for each input; without `max_concurrency` it runs `num_calls` at a time."""
    if isinstance(config, Sequence):
        return [batch_config(each, num_calls) for each in config]
    return {**(config or {}), "max_concurrency": (config or {}).get("max_concurrency") or num_calls}


def reply_result(generation: Generation, parts: Iterable[AnswerPart], model: str) -> ChatResult:
    """The answer of a generation when all of its parts have come, by the name of its model."""
    for _ in parts:
        pass
    answer = generation.decoding.answer
    message = AIMessage(
        answer.text,
        additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.calls],
        invalid_tool_calls=[
            invalid_tool_call(name=None, args=call.raw, id=call.id, error=call.error) for call in answer.invalid_calls
        ],
        usage_metadata=_usage(generation),
        response_metadata=_metadata(generation, model),
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def reply_chunks(generation: Generation, parts: Iterable[AnswerPart], model: str) -> Iterator[ChatGenerationChunk]:
    """The parts of an answer as they come, then an empty chunk with what `reply_result` has beside the content."""
    num_calls = 0
    for part in parts:
        yield ChatGenerationChunk(message=_chunk(part, num_calls))
        num_calls += isinstance(part, Call | InvalidCall)
    usage, metadata = _usage(generation), _metadata(generation, model)
    last = AIMessageChunk(content="", usage_metadata=usage, response_metadata=metadata, chunk_position="last")
    yield ChatGenerationChunk(message=last)


def _chunk(part: AnswerPart, index: int) -> AIMessageChunk:
    """A part of an answer; `index` counts its tool calls."""
    if isinstance(part, Text):
        return AIMessageChunk(content=part.text)
    if isinstance(part, Reasoning):
        return AIMessageChunk(content="", additional_kwargs={"reasoning_content": part.text})
    if isinstance(part, Call):
        name, arguments = part.name, json.dumps(part.arguments, ensure_ascii=False)
    else:  # LangChain finds out by itself that this is not JSON
        name, arguments = None, part.raw
    return AIMessageChunk(
        content="", tool_call_chunks=[tool_call_chunk(name=name, args=arguments, id=part.id, index=index)]
    )


def _usage(generation: Generation) -> UsageMetadata:
    num_read, num_written = generation.num_prompt_tokens, len(generation.decoding.sampled)
    num_reasoning = generation.decoding.num_reasoning_tokens
    return UsageMetadata(
        input_tokens=num_read,
        output_tokens=num_written,
        total_tokens=num_read + num_written,
        input_token_details={"cache_read": generation.cache_read},
        output_token_details=OutputTokenDetails(reasoning=num_reasoning) if num_reasoning else {},
    )


def _metadata(generation: Generation, model: str) -> dict[str, Any]:
    return {
        "model_name": model,
        "model_provider": "langgraph-latent",
        "finish_reason": generation.decoding.finish_reason,
        "kv_handle": generation.handle.id,
        "kv_route": generation.decision.to_dict(),
    }


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
        invalid = [(call["name"], call["args"]) for call in message.invalid_tool_calls]
        raws = [" ".join(part for part in parts if part) for parts in invalid]
        return "\n".join(part for part in ("".join(texts), *raws) if part)
    return "".join(texts)


def _reasoning_of(message: AIMessage) -> str:
    """Reasoning, from wherever LangChain keeps it."""
    reasoning = message.additional_kwargs.get("reasoning_content")
    if isinstance(reasoning, str):
        return reasoning
    blocks = [block for block in message.content if isinstance(block, dict) and block.get("type") == "reasoning"]
    return "".join(str(block.get("reasoning", "")) for block in blocks)
