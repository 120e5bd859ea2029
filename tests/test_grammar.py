"""A forced call or an answer of a schema fits it, whatever the model would have written: here, random models."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from pydantic import BaseModel, Field
from test_template import LLAMA, MISTRAL, QWEN25
from test_tools import ADD, THINKS, Says, add, call_text, calls_of, look_up, saying
from transformers import AutoTokenizer
from typing_extensions import TypedDict

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.errors import ConfigError, MissingExtraError
from langgraph_latent.prompt.answer import MarkReader
from langgraph_latent.prompt.grammar import Constraint, GrammarCompiler, has_grammars
from langgraph_latent.prompt.tool_calls import BARE, TOOL_CALL_FORMATS
from langgraph_latent.testing import CHATML, tiny_tokenizer


def of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*(required or properties)]}


SHORT = {"type": "string", "maxLength": 4}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
TREE = {
    "$defs": {"node": {**of("v", v={"type": "boolean"}, next={"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]})}},
    **of(root={"$ref": "#/$defs/node"}),
}
# name: a schema, what fits it, and what does not
SCHEMAS: dict[str, tuple[dict[str, Any], list[Any], list[Any]]] = {
    "integer": (of(x={"type": "integer"}), [{"x": 0}, {"x": -12}], [{"x": 1.5}, {"x": "1"}, {}, {"x": 10**19}]),
    "range": (
        of(x={"type": "integer", "minimum": 3, "maximum": 21}),
        [{"x": 3}, {"x": 21}, {"x": 10}],
        [{"x": 2}, {"x": 22}, {"x": -3}, {"x": 100}],
    ),
    "at least": (of(x={"type": "integer", "minimum": 0}), [{"x": 0}, {"x": 10**18}], [{"x": -1}, {"x": 10**20}]),
    "number": (of(x={"type": "number"}), [{"x": 1.5}, {"x": -2}, {"x": 1e300}], [{"x": "1"}, {"x": None}]),
    "enum": (of(x={"enum": ["red", "green", 3, None]}), [{"x": "red"}, {"x": 3}, {"x": None}], [{"x": "re"}, {"x": 4}]),
    "const": (of(x={"const": {"a": [1]}}), [{"x": {"a": [1]}}], [{"x": {"a": []}}, {"x": 1}]),
    "nested": (
        of(x=of(y=of(z={"type": "boolean"}))),
        [{"x": {"y": {"z": True}}}],
        [{"x": {"y": {}}}, {"x": {"y": {"z": 1}}}],
    ),
    "array": (
        of(x={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}),
        [{"x": [True]}, {"x": [True, False]}],
        [{"x": []}, {"x": [True, True, True]}, {"x": [1]}],
    ),
    "optional": (
        of("y", x={"anyOf": [DIGIT, {"type": "null"}]}, y={"type": ["boolean", "null"]}),
        [{"x": 3, "y": True}, {"x": None, "y": None}, {"y": False}],
        [{"x": 3}, {"x": "3", "y": True}, {"x": 11, "y": True}],
    ),
    "definitions": (
        TREE,
        [{"root": {"v": True}}, {"root": {"v": False, "next": {"v": True, "next": None}}}],
        [{"root": {"next": None}}, {"root": {"v": 1}}, {"root": None}],
    ),
    "string": (of(x=SHORT), [{"x": ""}, {"x": "ü\"\n"}, {"x": "abcd"}], [{"x": "abcde"}, {"x": 1}]),
    "pattern": (
        of(x={"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}),
        [{"x": "AB-1"}, {"x": "XY-123"}],
        [{"x": "ab-1"}, {"x": "AB-"}],
    ),
    "map": (
        of(x={"type": "object", "additionalProperties": DIGIT}),
        [{"x": {}}, {"x": {"any": 1, "key": 2}}],
        [{"x": {"any": "1"}}, {"x": []}],
    ),
    "map beside properties": (
        {**of(x={"type": "boolean"}), "additionalProperties": {"type": "null"}},
        [{"x": True}, {"x": True, "more": None}],
        [{"x": True, "more": 1}],
    ),
    "closed": (of(x={"type": "boolean"}), [{"x": True}], [{"x": True, "more": None}, {"more": None}]),
    "all of": (
        {"allOf": [of(x={"type": "boolean"}), of(y={"type": "boolean"})]},
        [{"x": True, "y": True}],
        [{"x": True}, {"y": True}],
    ),
    "names of keywords": (
        of(type={"type": "boolean"}, properties={"type": "boolean"}, enum={"type": "null"}),
        [{"type": True, "properties": False, "enum": None}],
        [{"type": True}],
    ),
    "nothing": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
}  # fmt: skip
ENDLESS = {"all of", "number", "map", "map beside properties", "pattern", "definitions"}
"""Of these, a random model may find no end."""


class Walk:
    """Feeds a text's tokens to a constraint, one by one."""

    def __init__(self, constraint: Constraint, call_format: Any = BARE) -> None:
        self.tokenizer = tiny_tokenizer()
        compiler = GrammarCompiler(self.tokenizer, [self.tokenizer.eos_token_id], call_format)
        self.processor = compiler.compile(constraint)
        self.ids = [self.tokenizer.eos_token_id]

    def allowed(self) -> set[int]:
        scores = self.processor(torch.tensor([self.ids]), torch.zeros(1, len(self.tokenizer)))
        return set(torch.isfinite(scores[0]).nonzero().flatten().tolist())

    def takes(self, text: str) -> bool:
        for token in [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]:
            if token not in self.allowed():
                return False
            self.ids.append(token)
        return True


def tool_of(schema: Mapping[str, Any], name: str = "f") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_fits_a_schema_can_be_written_and_nothing_else(name: str) -> None:
    schema, fitting, others = SCHEMAS[name]
    for value in fitting:
        jsonschema.validate(value, schema)
        assert Walk(Constraint(schema=schema)).takes(json.dumps(value, ensure_ascii=False)), value
    for value in others:
        assert not Walk(Constraint(schema=schema)).takes(json.dumps(value, ensure_ascii=False)), value


@pytest.mark.parametrize(
    "text", [' {"x": true}', '{"x":  true}', '{"x":true}', '{\n"x": true}', '{"x": true} ', "true"]
)
def test_json_is_written_in_one_way_so_that_no_model_loops_in_blanks(text: str) -> None:
    assert not Walk(Constraint(schema=SCHEMAS["closed"][0])).takes(text)


@pytest.mark.parametrize(
    "call_format", [each for each in TOOL_CALL_FORMATS if each.arguments_key], ids=lambda each: each.begin or "bare"
)
def test_a_call_is_written_in_the_templates_format_and_read_back(call_format: Any) -> None:
    tools = [tool_of(SCHEMAS["integer"][0], "größe"), tool_of(SCHEMAS["nothing"][0], "g")]
    for name, arguments in (("größe", {"x": -5}), ("g", {})):
        space = "\n" if call_format.end else ""
        key = call_format.arguments_key
        call = f'{{"name": "{name}", "{key}": {json.dumps(arguments)}}}'
        text = f"{call_format.begin}{space}{call}{space}{call_format.end}"
        walk = Walk(Constraint(tools), call_format)
        assert walk.takes(text)
        reader = MarkReader(["größe", "g"], "", b"")
        (read,) = [*reader.push(text), *reader.flush()]
        assert (read.name, read.arguments) == (name, arguments)
        assert not Walk(Constraint(tools), call_format).takes(text.replace(f'"{name}"', '"h"'))
        assert not Walk(Constraint(tools), call_format).takes(text * 2), "one call"
        assert not Walk(Constraint(tools), call_format).takes(f"so: {text}")


@pytest.fixture
def chat_of(tiny_folder: Callable[..., Path], ws: LatentWorkspace) -> Callable[..., ChatLatent]:
    def chat(template: str = CHATML, seed: int = 0, **options: Any) -> ChatLatent:
        folder = tiny_folder("llama", template=template, seed=seed, num_hidden_layers=1)
        return ChatLatent(
            model=str(folder), workspace=ws, **{"max_tokens": 120, "temperature": 1.0, "seed": 0, **options}
        )

    return chat


def outside_strings(text: str) -> str:
    return re.sub(r'"(?:\\.|[^"\\])*"', '""', text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_random_model_fits_the_schema(name: str, chat_of: Callable[..., ChatLatent]) -> None:
    """Field case 5: as a forced call and as an answer, whatever is sampled."""
    schema = SCHEMAS[name][0]
    chat = chat_of()
    response_format = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    finished = 0
    for seed in range(2):
        call = chat.bind_tools([tool_of(schema)], tool_choice="any").invoke("go", seed=seed)
        answer = chat.invoke("go", seed=seed, response_format=response_format)
        assert call.content == ""
        for made in call.tool_calls:
            jsonschema.validate(made["args"], schema)
            finished += 1
        assert call.tool_calls or call.response_metadata["finish_reason"] == "length"
        assert not re.search(r"\s\s", outside_strings(answer.content))
        if answer.response_metadata["finish_reason"] == "stop":
            jsonschema.validate(json.loads(answer.content), schema)
            finished += 1
    assert finished == 4 or name in ENDLESS


@pytest.mark.parametrize("template", [CHATML, QWEN25, MISTRAL, LLAMA], ids=["chatml", "qwen", "mistral", "llama"])
def test_a_forced_call_fits_in_the_form_of_every_template(template: str, chat_of: Callable[..., ChatLatent]) -> None:
    schema = of(x=SHORT, y={"enum": [1, 2]})
    for seed in range(3):
        bound = chat_of(template, seed=seed).bind_tools([tool_of(schema, "f"), tool_of(schema, "g")], tool_choice="g")
        reply = bound.invoke("go", seed=seed)
        ((name, arguments),) = calls_of(reply)
        assert name == "g"
        jsonschema.validate(arguments, schema)
        assert reply.response_metadata["finish_reason"] == "tool_calls"


# -- what can't be enforced ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "object", "properties": {"x": {"not": {"type": "string"}}}}, "not"),
        ({"type": "object", "properties": {"x": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"type": "object", "properties": {"x": {"$ref": "#/$defs/nowhere"}}, "required": ["x"]}, "nowhere"),
        ({"type": "object", "properties": {"x": {"type": "string", "pattern": "(?<=a)b"}}}, "look"),
        (of(x={"type": "integer", "minimum": 5, "maximum": 1}), "minimum"),
    ],
)
def test_a_schema_that_cannot_be_enforced_is_an_error_that_says_why(
    schema: dict[str, Any], reason: str, chat_of: Callable[..., ChatLatent]
) -> None:
    chat = chat_of()
    with pytest.raises(ConfigError, match=rf"(?s)can't be enforced.*{reason}"):
        chat.bind_tools([tool_of(schema)], tool_choice="any").invoke("go")
    with pytest.raises(ConfigError, match=rf"(?s)can't be enforced.*{reason}"):
        chat.invoke("go", response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    assert chat.bind_tools([tool_of(schema)]).invoke("go", max_tokens=2).usage_metadata["output_tokens"] == 2


@pytest.mark.parametrize(
    "form",
    [
        "json",
        {"type": "grammar"},
        {"type": "json_schema", "json_schema": {"name": "s"}},
        {"type": "json_schema", "json_schema": None},
        {"type": "json_schema"},
        {},
    ],
)
def test_an_unknown_response_format_is_an_error(form: Any, chat_of: Callable[..., ChatLatent]) -> None:
    with pytest.raises(ConfigError, match="response_format"):
        chat_of().invoke("go", response_format=form)


@pytest.mark.parametrize(
    "schema",
    [
        {
            "type": "object",
            "properties": {"a": {"const": 1}},
            "required": ["a"],
            "allOf": [{"properties": {"b": {"const": 2}}, "required": ["b"]}],
        },
        {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a", "b"]},
    ],
    ids=["allOf", "required undeclared"],
)
def test_properties_that_are_declared_elsewhere_are_not_forbidden(
    schema: dict[str, Any], chat_of: Callable[..., ChatLatent]
) -> None:
    chat = chat_of(max_tokens=2)
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    assert chat.invoke("go", response_format=form).text.startswith("{")


@pytest.fixture
def looked_up_afresh() -> Iterator[None]:
    """Whether the extra is installed is asked once per process: not here."""
    has_grammars.cache_clear()
    yield
    has_grammars.cache_clear()


def test_without_the_extra_only_what_needs_it_fails(
    monkeypatch: pytest.MonkeyPatch, looked_up_afresh: None, chat_of: Callable[..., ChatLatent]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "llguidance" else find(name, *more)
    )
    monkeypatch.setitem(sys.modules, "llguidance", None)
    chat = chat_of(max_tokens=3)
    needing: Sequence[Callable[[], Any]] = (
        lambda: chat.bind_tools([add], tool_choice="any"),
        lambda: chat.with_structured_output(Joke),
        lambda: chat.with_structured_output(Joke, method="json_schema"),
        lambda: chat.invoke("go", response_format={"type": "json_object"}),
        lambda: chat.invoke("go", tools=[tool_of(of())], tool_choice="f"),
    )
    for need in needing:
        with pytest.raises(MissingExtraError, match=r"langgraph-latent\[grammar\]"):
            need()
    assert chat.bind_tools([add]).invoke("go").usage_metadata["output_tokens"] == 3
    assert not chat_of().profile["structured_output"]


# -- after reasoning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_token", [True, False], ids=["one token", "letters"])
def test_the_constraint_begins_after_the_reasoning(
    is_token: bool, tmp_path: Path, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field case 23: a prompt that opens reasoning leaves it free, and forces what comes after it."""
    folder = tiny_folder("llama", template=THINKS, num_hidden_layers=1, vocab_size=330)
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if is_token:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
        tokenizer.save_pretrained(tmp_path)
    chat = ChatLatent(model=str(tmp_path), workspace=ws, max_tokens=200, temperature=1.0, seed=0)
    reasoning = chat.get_token_ids("hm {}\n</think>")
    schema = of(x=SHORT)
    for options in (
        {"tools": [tool_of(schema)], "tool_choice": "any"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}},
    ):
        reply = chat.invoke("go", logits_processor=[Thinks(reasoning)], **options)
        assert reply.additional_kwargs["reasoning_content"] == "hm {}\n"
        answer = reply.tool_calls[0]["args"] if "tools" in options else json.loads(reply.content)
        jsonschema.validate(answer, schema)


class Thinks(Says):
    """Forces the given tokens; what comes after them is the model's own."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(ids, -1)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = next(self._ids, None)
        if token is None:
            return scores
        forced = torch.full_like(scores, float("-inf"))
        forced[0, token] = 0.0
        return forced


# -- structured output -----------------------------------------------------------------------------------------------


class Mood(Enum):
    dry = "dry"
    silly = "silly"


class Joke(BaseModel):
    """A joke."""

    setup: str = Field(max_length=4)
    punchline: str = Field(max_length=4)
    mood: Mood
    rating: int | None = Field(default=None, ge=1, le=10)


class DictJoke(TypedDict):
    """A joke."""

    funny: bool
    number: int


JSON_JOKE = {"title": "JsonJoke", "description": "A joke.", **of(funny={"type": "boolean"}, setup=SHORT)}
KINDS = {"pydantic": Joke, "typed dict": DictJoke, "json schema": JSON_JOKE}
METHODS = ("function_calling", "json_schema", "json_mode")
JOKE_TEXTS = {
    "pydantic": '{"setup": "a", "punchline": "b", "mood": "dry"}',
    "typed dict": '{"funny": true, "number": 3}',
    "json schema": '{"funny": true, "setup": "a"}',
}


def structured(chat: ChatLatent, kind: str, method: str, **options: Any) -> Any:
    if method == "json_mode":  # any object: left to itself, a random model finds no end
        options.update(saying(chat, JOKE_TEXTS[kind]))
    return chat.with_structured_output(KINDS[kind], method=method, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_structured_output_of_a_random_model(kind: str, method: str, chat_of: Callable[..., ChatLatent]) -> None:
    """Field cases 5 and 6: an instance of the class, or a dict of the schema; raw, parsed and error on demand."""
    for seed in range(1 if method == "json_mode" else 3):
        chat = chat_of(seed=seed)
        answer = structured(chat, kind, method).invoke("tell a joke")
        assert isinstance(answer, Joke if kind == "pydantic" else dict)
        if kind == "typed dict":
            assert isinstance(answer["funny"], bool)
            assert isinstance(answer["number"], int)
        if kind == "json schema":
            jsonschema.validate(answer, JSON_JOKE)
    both = structured(chat, kind, method, include_raw=True).invoke("tell a joke")
    assert {*both} == {"raw", "parsed", "parsing_error"}
    assert both["parsing_error"] is None
    assert both["parsed"] == answer
    assert both["raw"].usage_metadata["output_tokens"] > 0
    chunks = list(structured(chat, kind, method).stream("tell a joke"))
    assert chunks
    assert chunks[-1] == answer


@pytest.mark.parametrize("method", METHODS)
async def test_structured_output_in_async_form(method: str, chat_of: Callable[..., ChatLatent]) -> None:
    chat = chat_of()
    answer = await structured(chat, "pydantic", method).ainvoke("tell a joke")
    assert answer == structured(chat, "pydantic", method).invoke("tell a joke")


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_an_answer_that_is_cut_has_a_parsing_error_or_nothing_but_never_half(
    method: str, chat_of: Callable[..., ChatLatent]
) -> None:
    both = structured(chat_of(max_tokens=10), "pydantic", method, include_raw=True).invoke("tell a joke")
    assert both["parsed"] is None
    assert both["raw"].response_metadata["finish_reason"] == "length"


def test_an_unknown_method_is_an_error(chat_of: Callable[..., ChatLatent]) -> None:
    with pytest.raises(ConfigError, match="known methods: function_calling, json_schema, json_mode"):
        chat_of().with_structured_output(Joke, method="magic")  # type: ignore[arg-type]


def test_the_schema_is_asked_for_in_the_prompt(chat_of: Callable[..., ChatLatent], ws: LatentWorkspace) -> None:
    chat = chat_of()
    raw = chat.with_structured_output(Joke, method="json_schema", include_raw=True).invoke("tell a joke")["raw"]
    assert "punchline" in ws.handle(raw).messages[-2]["content"]
    raw = structured(chat, "pydantic", "json_mode", include_raw=True).invoke("tell a joke")["raw"]
    assert ws.handle(raw).messages[-2]["content"] == "tell a joke"


# -- tools and a schema ----------------------------------------------------------------------------------------------

FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": of(x=SHORT)}}


def test_tools_beside_a_schema_give_a_call_or_an_answer(chat_of: Callable[..., ChatLatent]) -> None:
    chat = chat_of(QWEN25, max_tokens=400)
    bound = chat.bind_tools([add, look_up], response_format=FORMAT)
    call = bound.invoke("go", **saying(chat, ADD))
    assert calls_of(call) == [("add", {"a": 1, "b": 2})]
    answer = bound.invoke("go", **saying(chat, '{"x": "abc"}'))
    assert (answer.content, answer.tool_calls) == ('{"x": "abc"}', [])
    for seed in range(4):
        reply = bound.invoke("go", seed=seed, max_tokens=100)
        if reply.response_metadata["finish_reason"] != "length":
            assert bool(reply.tool_calls) != bool(reply.content)
            if reply.content:
                jsonschema.validate(json.loads(reply.content), of(x=SHORT))


def test_tools_beside_a_schema_are_all_that_is_allowed() -> None:
    call_format = next(each for each in TOOL_CALL_FORMATS if each.begin == "<tool_call>")
    constraint = Constraint([tool_of(of(a={"type": "integer"}), "add")], of(x=SHORT))
    for text, fits in (
        (call_text("add", {"a": 1}), True),
        ('{"x": "abc"}', True),
        (call_text("subtract", {"a": 1}), False),
        ('{"y": "abc"}', False),
        ("Sure!", False),
        ("", False),
    ):
        assert Walk(constraint, call_format).takes(text) == fits


@pytest.mark.parametrize(
    "answer", ['{"x": "abc"}', '{"name": "abc"}', '{"name": "add"}', '{"name": "add", "parameters": "x"}']
)
def test_bare_calls_and_answers_are_both_open(answer: str) -> None:
    """Where a template has no mark for calls, both are JSON, and may begin alike."""
    call_format = BARE._replace(arguments_key="parameters")
    schema = of(**dict.fromkeys(json.loads(answer), SHORT))
    constraint = Constraint([tool_of(of(a=DIGIT), "add"), tool_of(of(a=DIGIT), "add_two")], schema)
    for text in (answer, '{"name": "add", "parameters": {"a": 1}}', '{"name": "add_two", "parameters": {"a": 1}}'):
        assert Walk(constraint, call_format).takes(text)
    assert not Walk(constraint, call_format).takes('{"name": "add_two", "parameters": {"a": "1"}}')


def test_the_tools_name_separates_bare_calls_from_answers(chat_of: Callable[..., ChatLatent]) -> None:
    """Where a template has no mark for calls, both are JSON."""
    chat = chat_of(LLAMA, max_tokens=200)
    bound = chat.bind_tools([add], response_format=FORMAT)
    assert calls_of(bound.invoke("go", **saying(chat, '{"name": "add", "parameters": {"a": 1, "b": 2}}'))) == [
        ("add", {"a": 1, "b": 2})
    ]
    answer = bound.invoke("go", **saying(chat, '{"x": "abc"}'))
    assert (answer.content, answer.tool_calls) == ('{"x": "abc"}', [])
