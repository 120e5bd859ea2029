"""Tools and reasoning from a bound function to the next turn: real calls of a tiny model whose tokens are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from pydantic import BaseModel, Field
from test_template import CONVERSATIONS, END, LLAMA, MISTRAL, QWEN3, QWEN25, REFUSED, TEMPLATES, TOOL
from transformers import AutoTokenizer
from transformers.generation.logits_process import LogitsProcessor
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.errors import ConfigError, TemplateError
from langgraph_latent.events import Diverged
from langgraph_latent.handle import KVHandle
from langgraph_latent.handle.tokens import unpack_tokens
from langgraph_latent.prompt.prompt import PromptWriter
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.testing import tiny_tokenizer

THINKS = QWEN3.replace(END, END.replace("assistant\n", "assistant\n<think>\n"))
"""The prompt opens the reasoning, as of DeepSeek-R1 and Qwen3-Thinking."""
SERIALIZER = JsonPlusSerializer()


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def look_up(query: str) -> str:
    """Look something up."""
    return query


class Says(LogitsProcessor):
    """Makes a model sample the given tokens, one after another, and then `end` for ever."""

    def __init__(self, ids: Sequence[int], end: int) -> None:
        self._ids = iter(ids)
        self._end = end

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, float("-inf"))
        forced[0, next(self._ids, self._end)] = 0.0
        return forced


def saying(chat: ChatLatent, text: str) -> dict[str, Any]:
    """Options of a call whose answer is `text`."""
    return {"logits_processor": [Says(chat.get_token_ids(text), chat.tokenizer.eos_token_id)]}


@pytest.fixture
def chat_of(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> Callable[..., ChatLatent]:
    """`chat_of(template, ...)`: a greedy chat model over the tiny llama with a chat template."""

    def chat(template: str, workspace: LatentWorkspace = ws, **options: Any) -> ChatLatent:
        folder = tiny_folder("llama", template=template, num_hidden_layers=1)
        return ChatLatent(model=str(folder), workspace=workspace, **{"max_tokens": 400, **options})

    return chat


def call_text(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


ADD, LOOK = call_text("add", {"a": 1, "b": 2}), call_text("look_up", {"query": "<b> ünïcode"})
ANSWERS = {
    "plain": "Just  text. \n",
    "empty": "",
    "call": ADD,
    "text and call": f"I will.\n\n{ADD}",
    "two calls": f"{ADD}\n{LOOK}",
    "call and text": f"{ADD}\n\nthat is all",
    "bare": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "json": '{"answer": 3}',
    "malformed": "so: <tool_call>\n{'name': add}\n</tool_call>",
    "no name": '<tool_call>{"arguments": {"a": 1}}</tool_call>',
    "call and malformed": f"<tool_call>{{</tool_call>{ADD}",
    "cut": '<tool_call>\n{"name": "add", "argu',
    "reasoning": "<think>\nhm\nhm\n</think>\n\nyes",
    "reasoning and call": f"<think>hm</think>\n{ADD}",
    "reasoning cut": "<think>\nhm, I",
    "other tool": call_text("nothing", {}),
}


def calls_of(reply: AIMessage) -> list[tuple[str, dict[str, Any]]]:
    return [(call["name"], call["args"]) for call in reply.tool_calls]


def reply_data(reply: AIMessage) -> dict[str, Any]:
    """All of a reply but its run id, and errors of invalid calls, which LangChain's chunks don't carry."""
    return {
        "content": reply.content,
        "tool_calls": reply.tool_calls,
        "invalid": [{**call, "error": None} for call in reply.invalid_tool_calls],
        "reasoning": reply.additional_kwargs,
        "usage": {**reply.usage_metadata, "input_token_details": None},
        "finish_reason": reply.response_metadata["finish_reason"],
        "handle": reply.response_metadata["kv_handle"],
    }


@pytest.mark.parametrize("answer", ANSWERS)
def test_invoke_stream_and_their_async_forms_say_the_same(answer: str, chat_of: Callable[..., ChatLatent]) -> None:
    """Field cases 2, 16 and 58: calls (ids too), invalid calls, reasoning, usage; and a checkpointer keeps each."""
    chat = chat_of(QWEN25)
    bound = chat.bind_tools([add, look_up])

    def options() -> dict[str, Any]:
        return saying(chat, ANSWERS[answer])

    async def in_async() -> tuple[AIMessage, list[AIMessageChunk]]:
        reply = await bound.ainvoke("go", **options())
        return reply, [chunk async for chunk in bound.astream("go", **options())]

    invoked = bound.invoke("go", **options())
    chunks = list(bound.stream("go", **options()))
    awaited, awaited_chunks = asyncio.run(in_async())
    streaming = chat_of(QWEN25, streaming=True).bind_tools([add, look_up]).invoke("go", **options())
    replies = [invoked, sum(chunks[1:], chunks[0]), awaited, sum(awaited_chunks[1:], awaited_chunks[0]), streaming]
    for reply in replies[1:]:
        assert reply_data(reply) == reply_data(invoked)
    for message in (*replies, *chunks):
        kept = SERIALIZER.loads_typed(SERIALIZER.dumps_typed(message))
        assert kept == message
        assert type(kept) is type(message)


@pytest.mark.parametrize(
    ("answer", "content", "calls", "invalid", "reasoning", "finish"),
    [
        ("plain", "Just  text. \n", [], 0, "", "stop"),
        ("call", "", ["add"], 0, "", "tool_calls"),
        ("text and call", "I will.", ["add"], 0, "", "tool_calls"),
        ("two calls", "", ["add", "look_up"], 0, "", "tool_calls"),
        ("call and text", "that is all", ["add"], 0, "", "tool_calls"),
        ("bare", "", ["add"], 0, "", "tool_calls"),
        ("json", '{"answer": 3}', [], 0, "", "stop"),
        ("malformed", "so:", [], 1, "", "stop"),
        ("no name", "", [], 1, "", "stop"),
        ("call and malformed", "", ["add"], 1, "", "tool_calls"),
        ("cut", "", [], 1, "", "stop"),
        ("reasoning", "yes", [], 0, "hm\nhm\n", "stop"),
        ("reasoning and call", "", ["add"], 0, "hm", "tool_calls"),
        ("reasoning cut", "", [], 0, "hm, I", "stop"),
        ("other tool", "", ["nothing"], 0, "", "tool_calls"),
    ],
)
def test_an_answer_is_a_message(
    answer: str,
    content: str,
    calls: list[str],
    invalid: int,
    reasoning: str,
    finish: str,
    chat_of: Callable[..., ChatLatent],
) -> None:
    """Field case 2: a call is in `tool_calls`, what can't be read in `invalid_tool_calls`, and neither in the text."""
    chat = chat_of(QWEN25)
    reply = chat.bind_tools([add, look_up]).invoke("go", **saying(chat, ANSWERS[answer]))
    assert reply.content == content
    assert [call["name"] for call in reply.tool_calls] == calls
    assert len(reply.invalid_tool_calls) == invalid
    assert reply.additional_kwargs.get("reasoning_content", "") == reasoning
    assert reply.response_metadata["finish_reason"] == finish
    kinds = [block["type"] for block in reply.content_blocks]
    assert kinds.count("reasoning") == bool(reasoning)
    assert kinds.count("tool_call") == len(calls)
    if invalid:
        assert all(call["error"] and call["args"] for call in reply.invalid_tool_calls)


def test_a_repeated_question_repeats_its_ids_and_another_gets_others(chat_of: Callable[..., ChatLatent]) -> None:
    chat = chat_of(QWEN25)
    bound = chat.bind_tools([add])
    ids = [bound.invoke(each, **saying(chat, ADD)).tool_calls[0]["id"] for each in ("a", "a", "b")]
    assert ids[0] == ids[1] != ids[2]


def test_without_tools_a_call_is_text(chat_of: Callable[..., ChatLatent]) -> None:
    chat = chat_of(QWEN25)
    for bound in (chat, chat.bind_tools([add], tool_choice="none")):
        reply = bound.invoke("go", **saying(chat, f" {ADD}\n"))
        assert (reply.content, reply.tool_calls) == (f" {ADD}\n", [])


# -- reasoning -------------------------------------------------------------------------------------------------------


def test_reasoning_that_is_cut_is_not_content(chat_of: Callable[..., ChatLatent]) -> None:
    """Field case 23: the prompt opens the block and `max_tokens` ends the answer before it is closed."""
    chat = chat_of(THINKS)
    reply = chat.invoke("go", max_tokens=5, **saying(chat, "hm, so what"))
    assert reply.content == ""
    assert reply.response_metadata["finish_reason"] == "length"
    assert reply.usage_metadata["output_tokens"] == 5
    assert reply.usage_metadata["output_token_details"]["reasoning"] == 5
    reasoning = chat.tokenizer.decode(chat.get_token_ids("hm, so what")[:5])
    assert [(block["type"], block["reasoning"]) for block in reply.content_blocks] == [("reasoning", reasoning)]


def test_reasoning_that_is_closed_leaves_the_content(chat_of: Callable[..., ChatLatent]) -> None:
    chat = chat_of(THINKS)
    reply = chat.invoke("go", **saying(chat, "hm\n</think>\n\nyes"))
    assert (reply.content, reply.additional_kwargs["reasoning_content"]) == ("yes", "hm\n")
    counted = reply.usage_metadata["output_token_details"]["reasoning"]
    assert 0 < counted < reply.usage_metadata["output_tokens"]
    assert [block["type"] for block in reply.content_blocks] == ["reasoning", "text"]


def test_marks_that_are_special_tokens_are_read(
    tmp_path: Path, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Most tokenizers hold <think> and <tool_call> as special tokens, which are left out of plain text."""
    folder = tiny_folder("llama", template=QWEN25, vocab_size=330)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|other|>"]}
    )
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    chat = ChatLatent(model=str(tmp_path), workspace=ws, max_tokens=200)
    text = f"<think>hm</think>yes<|other|>{ADD}"
    assert len(chat.get_token_ids("<think>")) == 1
    reply = chat.bind_tools([add]).invoke("go", **saying(chat, text))
    assert (reply.content, reply.additional_kwargs["reasoning_content"]) == ("yes", "hm")
    assert calls_of(reply) == [("add", {"a": 1, "b": 2})]
    assert reply.usage_metadata["output_token_details"]["reasoning"] == 1 + len(chat.get_token_ids("hm"))
    plain = chat.invoke("go", **saying(chat, text))
    assert "<|other|>" not in plain.content


# -- the next turn ---------------------------------------------------------------------------------------------------

NATIVE_CALLS = {
    "qwen2.5": (QWEN25, ADD),
    "qwen2.5 with text": (QWEN25, f"I will.\n{ADD}"),
    "llama": (LLAMA, '{"name": "add", "parameters": {"a": 1, "b": 2}}'),
}
OTHER_CALLS = {
    "no blanks": (QWEN25, '<tool_call>{"name":"add","arguments":{"a":1,"b":2}}</tool_call>'),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}]'),  # the template adds an id
    "text": (QWEN25, f"I will. {ADD}"),
    "two": (QWEN25, ADD + LOOK),
    "malformed": (QWEN25, "<tool_call>{add}</tool_call>"),
    "llama, blanks": (LLAMA, '{ "name": "add",  "parameters": {"b": 2, "a": 1} }'),
    "llama, two": (LLAMA, '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {"query": "x"}}'),
    "reasoning": (QWEN3, f"<think>\nhm\n</think>\n\n{ADD}"),
    "cut": (QWEN25, '<tool_call>{"name": '),
}


def results_of(reply: AIMessage) -> list[BaseMessage]:
    results = [ToolMessage("3", tool_call_id=call["id"]) for call in reply.tool_calls]
    return [*results] or [HumanMessage("try again")]


@pytest.mark.parametrize("name", [*NATIVE_CALLS, *OTHER_CALLS])
def test_a_turn_after_a_handle_is_the_turn_of_the_whole_history(
    name: str, chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    """Field cases 25, 41 and 43: only what the template renders in another way is read again."""
    template, answer = {**NATIVE_CALLS, **OTHER_CALLS}[name]
    chat = chat_of(template, max_tokens=20)
    options = {"tool_choice": "auto"}
    first: list[BaseMessage] = [HumanMessage("what is 1 + 2?")]
    reply = chat.bind_tools([add, look_up], **options).invoke(first, max_tokens=400, **saying(chat, answer))
    new = results_of(reply)
    asked = chat.bind_tools([add, look_up], **options)
    continued = asked.invoke(new, inherit=ws.handle(reply))
    with LatentWorkspace() as empty:
        alone = chat_of(template, empty, max_tokens=20)
        whole = alone.bind_tools([add, look_up], **options).invoke([*first, reply, *new])
        fresh = empty.handle(whole)
    assert reply_data(continued) | {"handle": ""} == reply_data(whole) | {"handle": ""}
    assert ws.handle(continued).tokens == fresh.tokens
    read = continued.usage_metadata["input_token_details"]["cache_read"]
    prompt = reply.usage_metadata["input_tokens"]
    assert read >= prompt - 1 - len("assistant\n<think>\n"), "at least the question is reused"
    if name in NATIVE_CALLS:
        assert read == prompt + reply.usage_metadata["output_tokens"] - 1, "all but the pending token"


def test_an_agent_that_thinks_reuses_what_its_template_leaves_of_it(
    chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    """Field case 41: the second question drops the first answer's reasoning from the history."""
    chat = chat_of(THINKS, max_tokens=40)
    history: list[BaseMessage] = [SystemMessage("You think."), HumanMessage("one")]
    reply = chat.invoke(history, **saying(chat, "hm hm hm\n</think>\n\nyes"))
    second = chat.invoke([HumanMessage("two")], inherit=ws.handle(reply))
    with LatentWorkspace() as empty:
        alone = chat_of(THINKS, empty, max_tokens=40).invoke([*history, reply, HumanMessage("two")])
        assert reply_data(second) | {"handle": ""} == reply_data(alone) | {"handle": ""}
    (event,) = [event for event in ws.tracer.events if isinstance(event, Diverged)]
    read = second.usage_metadata["input_token_details"]["cache_read"]
    assert 0 < read == event.num_tokens < event.num_inherited
    assert "hm hm" not in chat.tokenizer.decode(unpack_tokens(ws.handle(second).tokens))


def test_reasoning_before_a_call_leaves_the_history_two_turns_later(
    chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    """Field case 41: kept while the tool's result is read, gone with the next question."""
    chat = chat_of(QWEN3, max_tokens=20)
    bound = chat.bind_tools([add])
    history: list[BaseMessage] = [HumanMessage("one")]
    call = bound.invoke(history, max_tokens=400, **saying(chat, f"<think>\nhm hm\n</think>\n\n{ADD}"))
    history += [call, ToolMessage("3", tool_call_id=call.tool_calls[0]["id"])]
    answer = bound.invoke(history[-1:], inherit=ws.handle(call), **saying(chat, "It is 3."))
    assert "hm hm" in chat.tokenizer.decode(unpack_tokens(ws.handle(answer).tokens))
    history += [answer, HumanMessage("two")]
    last = bound.invoke(history[-1:], inherit=ws.handle(answer))
    assert "hm hm" not in chat.tokenizer.decode(unpack_tokens(ws.handle(last).tokens))
    assert last.usage_metadata["input_token_details"]["cache_read"] > len("one")
    with LatentWorkspace() as empty:
        whole = chat_of(QWEN3, empty, max_tokens=20).bind_tools([add]).invoke(history)
        assert reply_data(last) | {"handle": ""} == reply_data(whole) | {"handle": ""}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"tools": [TOOL]}),
        ({"tools": [TOOL]}, {}),
        ({}, {"template_options": {"greeting": "ahoy"}}),
    ],
    ids=["tools come", "tools go", "options"],
)
def test_a_reader_with_other_tools_reads_its_own_prompt(
    before: dict[str, Any], after: dict[str, Any], chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    """Field cases 1 and 70: producer and consumer have different prompts; the consumer's own is what counts."""
    template = "{{ greeting | default('') }}" + QWEN25
    chat = chat_of(template, max_tokens=20)
    read = chat.invoke("read this", **before)
    reply = chat.invoke([HumanMessage("and?")], inherit=ws.handle(read), **after)
    with LatentWorkspace() as empty:
        alone = chat_of(template, empty, max_tokens=20)
        whole = alone.invoke([HumanMessage("read this"), read, HumanMessage("and?")], **after)
        assert reply_data(reply) | {"handle": ""} == reply_data(whole) | {"handle": ""}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_after_a_handle_is_the_prompt_of_all_messages(name: str, conversation: str) -> None:
    """Field case 45: no template is trusted to render a conversation's beginning as it rendered it alone."""
    messages, has_tools = CONVERSATIONS[conversation]
    if (name, conversation) in REFUSED:
        return
    writer, template_inputs = (
        PromptWriter(tiny_tokenizer(TEMPLATES[name]), name),
        TemplateInputs([TOOL] if has_tools else []),
    )
    whole = writer.write(messages, template_inputs, reply=True).tokens
    for length in range(1, len(messages)):
        try:
            tokens = writer.write(messages[:length], template_inputs, reply=False).tokens
        except TemplateError:  # what the template refuses has no handle
            continue
        handle = KVHandle.root("model").extend("prompt", "node", tokens, messages[:length], 1)
        prompt = writer.extend(handle, messages[length:], template_inputs, reply=True)
        assert prompt.tokens == whole
        assert prompt.tokens.startswith(handle.tokens[: prompt.num_inherited * 4])


def test_tool_histories_of_other_providers_are_read(chat_of: Callable[..., ChatLatent], ws: LatentWorkspace) -> None:
    """Field case 4: content blocks, long ids and an invalid call, as a cloud model leaves them in a graph's state."""
    history = [
        HumanMessage("go"),
        AIMessage(
            [{"type": "text", "text": "I will."}, {"type": "tool_use", "id": "toolu_01", "name": "add", "input": {}}],
            tool_calls=[{"name": "add", "args": {"a": 1, "b": 2}, "id": "toolu_01"}],
        ),
        ToolMessage([{"type": "text", "text": "three"}], tool_call_id="toolu_01"),
        AIMessage("", invalid_tool_calls=[{"name": "add", "args": "{a: 1", "id": "call_abc123", "error": "bad"}]),
        HumanMessage("again"),
    ]
    for template in (QWEN25, LLAMA, MISTRAL):
        chat = chat_of(template, max_tokens=3)
        reply = chat.bind_tools([add]).invoke(history)
        text = chat.tokenizer.decode(unpack_tokens(ws.handle(reply).tokens))
        assert all(word in text for word in ("I will.", "three", "{a: 1", "again"))


# -- binding ---------------------------------------------------------------------------------------------------------


@tool
def tool_add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class ModelAdd(BaseModel):
    """Add two numbers."""

    a: int = Field(description="the first")
    b: int


class DictAdd(TypedDict):
    """Add two numbers."""

    a: int
    b: int


OPENAI_ADD = {
    "type": "function",
    "function": {
        "name": "openai_add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
FORMS = [(add, "add"), (tool_add, "tool_add"), (ModelAdd, "ModelAdd"), (DictAdd, "DictAdd"), (OPENAI_ADD, "openai_add")]


@pytest.mark.parametrize(("form", "name"), FORMS)
def test_every_form_of_a_tool_can_be_bound(
    form: Any, name: str, chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    """Field case 1."""
    chat = chat_of(QWEN25)
    reply = chat.bind_tools([form]).invoke("go", **saying(chat, call_text(name, {"a": 1, "b": 2})))
    assert calls_of(reply) == [(name, {"a": 1, "b": 2})]
    prompt = chat.tokenizer.decode(unpack_tokens(ws.handle(reply).tokens))
    schema = prompt.partition("<tools>")[2].partition("</tools>")[0]
    function = json.loads(schema)["function"]
    assert (function["name"], function["description"]) == (name, "Add two numbers.")
    assert {*function["parameters"]["properties"]} == {"a", "b"}


@pytest.mark.parametrize(
    ("choice", "shown", "forced"),
    [
        (None, True, ()),
        ("auto", True, ()),
        ("none", False, ()),
        (False, False, ()),
        ("any", True, ("add", "look_up")),
        ("required", True, ("add", "look_up")),
        (True, True, ("add", "look_up")),
        ("look_up", True, ("look_up",)),
        ({"type": "function", "function": {"name": "look_up"}}, True, ("look_up",)),
        ({"type": "tool", "name": "look_up"}, True, ("look_up",)),
    ],
)
def test_tool_choices(
    choice: Any, shown: bool, forced: Sequence[str], chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    chat = chat_of(QWEN25, max_tokens=90)
    reply = chat.bind_tools([add, look_up], tool_choice=choice).invoke("go", temperature=1.0, seed=1)
    prompt = unpack_tokens(ws.handle(reply).tokens)[: reply.usage_metadata["input_tokens"]]
    assert ("look_up" in chat.tokenizer.decode(prompt)) == shown
    names = {call["name"] for call in reply.tool_calls}
    if forced:
        raws = [call["args"] for call in reply.invalid_tool_calls]  # cut by max_tokens
        assert names <= {*forced}
        assert names or all(any(f'"name": "{name}"' in raw for name in forced) for raw in raws)
        assert reply.content == ""
    else:
        assert not names


@pytest.mark.parametrize(
    "choice",
    [
        "subtract",
        {"type": "function", "function": {"name": "subtract"}},
        {"type": "any"},
        {"function": "add"},
        "anything",
    ],
)
def test_an_unknown_choice_is_an_error_that_names_the_tools(choice: Any, chat_of: Callable[..., ChatLatent]) -> None:
    with pytest.raises(ConfigError, match=r"not a bound tool; bound tools: add, look_up"):
        chat_of(QWEN25).bind_tools([add, look_up], tool_choice=choice)
    with pytest.raises(ConfigError, match="bound tools: none"):
        chat_of(QWEN25).bind_tools([], tool_choice="any")


def test_parallel_tool_calls_false_ends_after_the_first_call(
    chat_of: Callable[..., ChatLatent], ws: LatentWorkspace
) -> None:
    chat = chat_of(QWEN25)
    bound = chat.bind_tools([add, look_up], parallel_tool_calls=False)
    reply = bound.invoke("go", **saying(chat, f"{ADD}\n{LOOK}"))
    assert calls_of(reply) == [("add", {"a": 1, "b": 2})]
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert reply.usage_metadata["output_tokens"] == len(chat.get_token_ids(ADD))
    assert len(chat.bind_tools([add, look_up]).invoke("go", **saying(chat, f"{ADD}\n{LOOK}")).tool_calls) == 2


@pytest.mark.parametrize(
    "answer",
    [
        '{"name": "add", "parameters": {}}; {"name": "look_up", "parameters": {}}',
        '[TOOL_CALLS] [{"name": "add", "arguments": {}}, {"name": "look_up", "arguments": {}}]',
        '<tool_call>{"name": "add", "arguments": {}}\n{"name": "look_up", "arguments": {}}</tool_call>',
    ],
)
def test_parallel_tool_calls_false_leaves_one_call_where_a_form_has_all_at_once(
    answer: str, chat_of: Callable[..., ChatLatent]
) -> None:
    chat = chat_of(QWEN25)
    bound = chat.bind_tools([add, look_up], parallel_tool_calls=False)
    assert [name for name, _ in calls_of(bound.invoke("go", **saying(chat, answer)))] == ["add"]


# -- a response template ---------------------------------------------------------------------------------------------


def test_a_tokenizers_own_response_template_is_used(
    tmp_path: Path, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    from test_answer import RESPONSE

    folder = tiny_folder("llama", template=QWEN25)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = RESPONSE
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    chat = ChatLatent(model=str(tmp_path), workspace=ws, max_tokens=200)
    bound = chat.bind_tools([add])
    for answer, content, calls, invalid in (
        (
            '<think>hm</think>\n\nyes\n<call>{"name": "add", "arguments": {"a": 1}}</call>',
            "yes",
            [("add", {"a": 1})],
            [],
        ),
        ("<think>hm</think>yes<call>{broken}</call>", "yes", [], ["<call>{broken}</call>"]),
        ("<think>hm</think>yes<call>{broken", "yes", [], ["<call>{broken"]),
        ('<think>hm</think>yes<call>{"arguments": {}}</call>', "yes", [], ['<call>{"arguments": {}}</call>']),
    ):
        reply = bound.invoke("go", **saying(chat, answer))
        chunks = list(bound.stream("go", **saying(chat, answer)))
        assert reply_data(sum(chunks[1:], chunks[0])) == reply_data(reply)
        assert (reply.content, calls_of(reply)) == (content, calls)
        assert [call["args"] for call in reply.invalid_tool_calls] == invalid
        assert reply.additional_kwargs["reasoning_content"] == "hm"
        assert reply.usage_metadata["output_token_details"]["reasoning"] > 0
