"""Text, reasoning and tool calls are separated, whatever form a model writes them in and however its text is cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from langgraph_latent.prompt.answer import (
    REASONING,
    Answer,
    Call,
    InvalidCall,
    MarkReader,
    Reader,
    Reasoning,
    TemplateReader,
    Text,
)
from langgraph_latent.prompt.tool_calls import CALL_MARKS, MARKED, TOOL_CALL_FORMATS, format_of
from langgraph_latent.testing import tiny_tokenizer

Calls = Sequence[tuple[str, dict[str, Any]]]
ONE: Calls = [("add", {"a": 1, "b": 2})]
TWO: Calls = [("add", {"a": 1, "b": 2}), ("look.up", {"q": 'say "{x}" ünïcode', "deep": {"l": [1, None, True]}})]


class Form(NamedTuple):
    """How one family of models writes calls; `begin` and `end` are as in the row of `TOOL_CALL_FORMATS` for it."""

    begin: str
    end: str
    write: Callable[[Calls], str]


def _json(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


def _each(form: str) -> Callable[[Calls], str]:
    return lambda calls: "".join(form % (name, json.dumps(given)) for name, given in calls)


def _parameters(form: str) -> Callable[[dict[str, Any]], str]:
    return lambda given: "".join(form % (k, v if isinstance(v, str) else json.dumps(v)) for k, v in given.items())


_xml, _arg = (
    _parameters("<parameter=%s>\n%s\n</parameter>\n"),
    _parameters("<arg_key>%s</arg_key>\n<arg_value>%s</arg_value>\n"),
)
FORMS = {
    "qwen": Form(
        "<tool_call>", "</tool_call>", lambda c: "\n".join(f"<tool_call>\n{_json(*e)}\n</tool_call>" for e in c)
    ),
    "one tag for all": Form(
        "<tool_call>", "</tool_call>", lambda c: "<tool_call>" + "\n".join(_json(*e) for e in c) + "</tool_call>"
    ),
    "arguments as text": Form(
        "<tool_call>",
        "</tool_call>",
        lambda c: "".join(
            f"<tool_call>{json.dumps({'function': {'name': n, 'arguments': json.dumps(a)}})}</tool_call>" for n, a in c
        ),
    ),
    "qwen3-coder": Form(
        "<tool_call>",
        "</tool_call>",
        lambda c: "\n".join(f"<tool_call>\n<function={n}>\n{_xml(a)}</function>\n</tool_call>" for n, a in c),
    ),
    "glm-4.5": Form(
        "<tool_call>", "</tool_call>", lambda c: "\n".join(f"<tool_call>{n}\n{_arg(a)}</tool_call>" for n, a in c)
    ),
    "mistral": Form("[TOOL_CALLS]", "", lambda c: f"[TOOL_CALLS] [{', '.join(_json(*e) for e in c)}]"),
    "mistral-args": Form("[TOOL_CALLS]", "", _each("[TOOL_CALLS]%s[ARGS]%s")),
    "mistral-id": Form("[TOOL_CALLS]", "", _each("[TOOL_CALLS]%s[CALL_ID]abcdef123[ARGS]%s")),
    "llama-3": Form("<|python_tag|>", "", lambda c: "<|python_tag|>" + "; ".join(_json(*e, "parameters") for e in c)),
    "llama-3.1": Form("<function=", "</function>", _each("<function=%s>%s</function>")),
    "deepseek-r1": Form(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        lambda c: (
            "<｜tool▁calls▁begin｜>"
            + _each("<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n%s\n```<｜tool▁call▁end｜>")(c)
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "deepseek-v3.1": Form(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        lambda c: (
            "<｜tool▁calls▁begin｜>"
            + _each("<｜tool▁call▁begin｜>%s<｜tool▁sep｜>%s<｜tool▁call▁end｜>")(c)
            + "<｜tool▁calls▁end｜>"
        ),
    ),
    "granite": Form("<|tool_call|>", "", lambda c: f"<|tool_call|>[{', '.join(_json(*e) for e in c)}]"),
    "bare": Form("", "", lambda c: "; ".join(_json(*e, "parameters") for e in c)),
    "bare list": Form("", "", lambda c: f"[{', '.join(_json(*e) for e in c)}]"),
    "fence": Form("", "", lambda c: "```json\n" + "\n".join(_json(*e) for e in c) + "\n```"),
}
MARKED_FORMS = {name: form for name, form in FORMS.items() if form.begin}
CLOSED_FORMS = {name: form for name, form in FORMS.items() if form.end}
TOOLS = ("add", "look.up", "f")


def forms(those: dict[str, Form]) -> Any:
    return pytest.mark.parametrize("form", those.values(), ids=those.keys())


def reader(tools: Sequence[str] = TOOLS, prompt: str = "") -> MarkReader:
    return MarkReader(tools, prompt, b"seed")


def read(pieces: Sequence[str], by: Reader | None = None) -> Answer:
    by = by or reader()
    answer = Answer()
    for piece in pieces:
        for part in by.push(piece):
            assert not isinstance(part, Text | Reasoning) or part.text, "an empty part"
            answer.add(part)
    for part in by.flush():
        answer.add(part)
    return answer


def content_of(answer: Answer) -> tuple[Any, ...]:
    return answer.text, answer.reasoning, answer.calls, answer.invalid_calls


def called(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in answer.calls]


def test_every_format_has_a_form_here() -> None:
    assert {form.begin for form in FORMS.values()} == {each.begin for each in TOOL_CALL_FORMATS}
    assert {(form.begin, form.end) for form in FORMS.values()} == {(each.begin, each.end) for each in TOOL_CALL_FORMATS}


# -- calls -----------------------------------------------------------------------------------------------------------


@forms(FORMS)
@pytest.mark.parametrize("calls", [ONE, TWO], ids=["one", "two"])
def test_calls_are_read(form: Form, calls: Calls) -> None:
    """Field case 2."""
    answer = read([form.write(calls)])
    assert called(answer) == [*calls]
    assert content_of(answer)[:2] == ("", "")
    assert not answer.invalid_calls
    ids = [call.id for call in answer.calls]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch("[a-z0-9]{9}", each) for each in ids)


@forms(MARKED_FORMS)
def test_text_before_calls_comes_without_the_space_between(form: Form) -> None:
    answer = read([f" I look <it> up. \n\n{form.write(TWO)}"])
    assert answer.text == " I look <it> up."
    assert called(answer) == [*TWO]


@forms(CLOSED_FORMS)
def test_text_after_calls_is_text(form: Form) -> None:
    answer = read([f"{form.write(TWO)}\n\nand {{that}} is it. "])
    assert answer.text == "and {that} is it. "
    assert called(answer) == [*TWO]


@forms(MARKED_FORMS)
def test_all_of_a_call_that_cannot_be_read_is_kept(form: Form) -> None:
    """Field case 2: malformed JSON is an invalid call; an unclosed form takes the rest of the answer with it."""
    broken = (
        form.write(ONE).replace("add", "").replace('"a"', "a").replace("arg_key", "arg").replace("parameter=", "p=")
    )
    answer = read([f"so: {broken}"])
    assert not answer.calls
    assert "".join(call.raw for call in answer.invalid_calls) == broken
    assert answer.text == "so:"
    assert all(call.error and call.id for call in answer.invalid_calls)
    assert broken in answer.message["content"], "the model's next prompt still holds it"
    if not form.end:
        late = read([f"{form.write(ONE)} and more"])
        assert [call.raw for call in late.invalid_calls] == [f"{form.write(ONE)} and more"]


@forms(FORMS)
def test_a_cut_call_is_never_a_call_nor_text(form: Form) -> None:
    whole = form.write(ONE)
    for end in range(len(whole)):
        answer = read([whole[:end]])
        if form.begin and end >= len(form.begin):
            assert answer.text == ""
            assert [call.raw for call in answer.invalid_calls] == [whole[:end]] * (not answer.calls)
        else:
            assert content_of(answer) == (whole[:end], "", [], [])
        if answer.calls:  # all but its closing mark is there
            assert called(answer) == [*ONE]
            assert form.end.startswith(whole[end:].strip())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ('{"x": 1000000000000000000000}', "64 bits"),
        ('{"x": NaN}', "NaN"),
        ('{"x": "\\ud800"}', "surrogates"),
        ("[" * 5000, "deep"),
        ('{"x": ' * 5000, "deep"),
    ],
)
def test_arguments_that_no_checkpoint_keeps_are_an_invalid_call(arguments: str, error: str) -> None:
    """Field case 58: such a call in a message fails in the checkpointer, or comes back as something else."""
    raw = f'<tool_call>{{"name": "add", "arguments": {arguments}}}</tool_call>'
    answer = read([raw])
    assert not answer.calls
    assert answer.invalid_calls[0].raw == raw
    assert error in answer.invalid_calls[0].error
    assert read([raw.removeprefix("<tool_call>").removesuffix("</tool_call>")]).text, "bare: just text"


@pytest.mark.parametrize("number", [-(1 << 63), (1 << 64) - 1, 1.5, 1e300])
def test_numbers_that_a_checkpoint_keeps_are_exact(number: float) -> None:
    assert read([FORMS["qwen"].write([("add", {"x": number})])]).calls[0].arguments == {"x": number}


def test_calls_of_unknown_tools_are_calls_only_with_a_mark() -> None:
    """With a mark the graph's tool node answers that there is no such tool; bare JSON may be the answer itself."""
    assert called(read(['<tool_call>{"name": "other", "arguments": {}}</tool_call>'])) == [("other", {})]
    for form in ("bare list", "fence"):
        text = FORMS[form].write([("add", {}), ("other", {})])
        assert content_of(read([text])) == (text, "", [], [])
    known, other = (FORMS["bare"].write([(name, {})]) for name in ("add", "other"))
    assert content_of(read([other])) == (other, "", [], [])
    both = read([known + "\n" + other])
    assert (both.text, called(both)) == (other, [("add", {})])


def test_a_bare_call_is_a_part_as_soon_as_it_is_complete() -> None:
    """So that an answer can end after its first call. A second call that is cut does not spoil the first."""
    known = FORMS["bare"].write([("add", {"x": 1})])
    by = reader()
    assert [(part.name, part.arguments) for letter in known for part in by.push(letter)] == [("add", {"x": 1})]
    cut = read([known + '\n{"name": "add", "argu'])
    assert (cut.text, called(cut)) == ('{"name": "add", "argu', [("add", {"x": 1})])


def test_a_mark_within_a_string_of_bare_json_is_part_of_the_string() -> None:
    calls: Calls = [("add", {"x": "<tool_call> and [TOOL_CALLS]"})]
    for pieces in ([FORMS["bare"].write(calls)], [*FORMS["bare"].write(calls)]):
        assert called(read(pieces)) == [*calls]


@pytest.mark.parametrize(
    "text",
    [
        "{", "{x} is a set", '{"name": "add"', '{"answer": 42}', "[{", "[1, 2]", "[{}]", "```python\nprint()\n```",
        "```", "``", "<", "<b>bold</b>", "< 3", "<tool", "<think", "[TOOL", "[THIN", '"add"', "  {", " \n", "<|", "｜>",
    ],
)  # fmt: skip
@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["tools", "no tools"])
def test_what_only_begins_like_a_call_arrives_complete(text: str, tools: Sequence[str]) -> None:
    for pieces in ([text], [*text], [text, " and more \n"]):
        answer = read(pieces, reader(tools))
        assert content_of(answer) == ("".join(pieces), "", [], [])


@forms(FORMS)
def test_without_tools_nothing_is_a_call_and_no_space_is_lost(form: Form) -> None:
    text = f" \n {form.write(TWO)} \n"
    assert content_of(read([text], reader(()))) == (text, "", [], [])
    assert content_of(read([*text], reader(()))) == (text, "", [], [])


def test_plain_text_is_a_part_at_once_but_for_what_may_begin_a_mark() -> None:
    by = reader()
    assert by.push("Hello") == [Text("Hello")]
    assert by.push(" you <") == [Text(" you")]
    assert by.push("3 ") == [Text(" <3")]
    assert by.push("<tool_call>") == []
    assert by.push('{"name": "add", "arguments": {}}') == []
    (call,) = by.push("</tool_call>")
    assert isinstance(call, Call), "a call is a part as soon as it is closed"


# -- reasoning -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("begin", "end"), REASONING)
def test_reasoning_is_separated_and_text_and_calls_follow_it(begin: str, end: str) -> None:
    call = FORMS["qwen"].write(ONE)
    for text, prompt in (
        (f"{begin}\nhm {{}}\n{end}\n\nyes {call}", ""),
        (f"hm {{}}\n{end}\n\nyes {call}", f"A:{begin}\n"),
    ):
        by = reader(prompt=prompt)
        assert by.is_reasoning == bool(prompt)
        assert by.closing == (end if prompt else "")
        answer = read([text], by)
        assert (answer.text, answer.reasoning.strip(), called(answer)) == ("yes", "hm {}", [*ONE])
        assert not by.is_reasoning
    bare = read([f"{begin}hm{end}\n{FORMS['bare'].write(ONE)}"])
    assert (bare.text, bare.reasoning, called(bare)) == ("", "hm", [*ONE])


@pytest.mark.parametrize(("begin", "end"), REASONING)
def test_reasoning_that_is_cut_is_no_content(begin: str, end: str) -> None:
    """Field case 23: the prompt opens the block, and the answer ends before it is closed."""
    for cut in range(len(end)):
        answer = read(["so I th", "ink" + end[:cut]], reader(prompt=f"assistant\n{begin}\n"))
        assert answer.text == ""
        assert answer.reasoning == "so I think" + end[:cut]


def test_a_call_in_reasoning_is_reasoning_and_a_mark_in_a_sentence_is_text() -> None:
    text = f"<think>shall I {FORMS['qwen'].write(ONE)}?</think>no"
    assert content_of(read([text])) == ("no", f"shall I {FORMS['qwen'].write(ONE)}?", [], [])
    assert content_of(read(["the tag <think> opens it"])) == ("the tag <think> opens it", "", [], [])


# -- pieces ----------------------------------------------------------------------------------------------------------

FRAGMENTS = [
    *FORMS["qwen"].write(ONE).partition("\n"), *(form.write(ONE) for form in FORMS.values()),
    *CALL_MARKS, *(mark for pair in REASONING for mark in pair), *(each.begin for each in MARKED),
    "text", " ", "\n", "\n\n", "{", "[{", "}", "<", "[", "```", "```json\n", "ü", '"', '{"name": "f", "arguments": ',
]  # fmt: skip


@st.composite
def pieces_of(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    text = draw(texts)
    cuts = sorted(draw(st.sets(st.integers(0, len(text)))))
    return [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=400, deadline=None)
@given(pieces_of(st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join)), st.booleans(), st.booleans())
def test_pieces_hold_what_the_whole_text_holds(pieces: list[str], has_tools: bool, is_thinking: bool) -> None:
    text = "".join(pieces)
    made = lambda: reader(TOOLS if has_tools else (), "<think>\n" if is_thinking else "")  # noqa: E731
    whole = read([text], made())
    assert content_of(read(pieces, made())) == content_of(whole)
    assert content_of(read([*text], made())) == content_of(whole)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=7).map("".join))
def test_no_opening_mark_is_text_and_no_letter_is_lost(text: str) -> None:
    answer = read([text])
    marks = [each.begin for each in MARKED]
    if not text.lstrip().startswith(("{", "[{", "```")):
        assert not any(mark in answer.text for mark in marks)
    if not answer.calls and not any(mark in text for pair in REASONING for mark in pair):
        kept = answer.text + "".join(call.raw for call in answer.invalid_calls)
        assert sorted("".join(kept.split())) == sorted("".join(text.split()))


def test_ids_differ_by_what_was_asked_and_repeat_for_the_same() -> None:
    ids = [read([FORMS["qwen"].write(TWO)], MarkReader(TOOLS, "", seed)).calls for seed in (b"a", b"a", b"b")]
    assert ids[0] == ids[1]
    assert {call.id for call in ids[0]}.isdisjoint(call.id for call in ids[2])


# -- the form of a template ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rendered", "begin"),
    [
        ('user: hi assistant: <tool_call>\n{"name": "it"}', "<tool_call>"),
        ('[INST]hi[/INST][TOOL_CALLS] [{"name": "it"', "[TOOL_CALLS]"),
        ('<|python_tag|>{"name": "it"', "<|python_tag|>"),
        ('{"name": "it", "parameters": {}}', ""),
        ("<tool_call>\n<function=it>", "<tool_call>"),
        ("<function=it>{}", ""),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>it<｜tool▁sep｜>{}", ""),
        ("nothing", ""),
        ("", ""),
    ],
)
def test_a_forced_call_is_written_in_the_templates_form_where_that_is_json(rendered: str, begin: str) -> None:
    before, _, after = rendered.partition("it")
    found = format_of(before, after)
    assert found.begin == begin
    assert ("parameters" in rendered) <= (found.arguments_key == "parameters")
    call = f'{{"name": "add", "{found.arguments_key}": {{"a": 1}}}}'
    assert called(read([f"{found.begin}{call}{found.end}"])) == [("add", {"a": 1})], "what it reads back"


# -- a tokenizer's own response template -----------------------------------------------------------------------------

RESPONSE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {},
    },
}


def template_reader(prompt: str = "<|im_start|>assistant\n", response: dict[str, Any] = RESPONSE) -> TemplateReader:
    return TemplateReader(tiny_tokenizer().get_response_parser(response, prefix=prompt), prompt, b"seed")


@pytest.mark.parametrize(
    "text",
    [
        " plain text \n\n of two lines ",
        "<think>\nhm\n</think>\n\nyes",
        f"<think>hm</think>\n<call>{_json(*ONE[0])}</call>\n<call>{_json(*TWO[1])}</call>\n",
        f"text first\n<call>{_json(*ONE[0])}</call>",
        "<call> a <cal <",
    ],
)
def test_a_response_template_is_read_as_transformers_reads_it(text: str) -> None:
    if text.startswith("<call> a"):
        text = text.replace("<call>", "< call>")
    tokenizer = tiny_tokenizer()
    whole = tokenizer.parse_response(text, RESPONSE, prefix="<|im_start|>assistant\n")
    for pieces in ([text], [*text], re.findall(r".{1,5}", text, re.DOTALL)):
        answer = read(pieces, template_reader())
        assert answer.text == whole.get("content", "")
        assert answer.reasoning == whole.get("thinking", "")
        functions = [call["function"] for call in whole.get("tool_calls", [])]
        assert called(answer) == [(each["name"], each["arguments"]) for each in functions]
        assert not answer.invalid_calls


def test_a_response_template_streams_text_and_reasoning() -> None:
    by = template_reader()
    assert by.push("<think>a") == [Reasoning("a")]
    assert by.is_reasoning
    assert by.push("b</think>") == [Reasoning("b")]
    assert not by.is_reasoning
    assert "".join(part.text for part in by.push("\n\nHello there")) == "Hello there"


def test_a_prompt_that_opens_reasoning_begins_in_it() -> None:
    """Field case 23, for a response template."""
    by = template_reader("<|im_start|>assistant\n<think>\n")
    assert by.is_reasoning
    assert content_of(read(["hm", "hm"], by)) == ("", "hmhm", [], [])


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "add", ',
        "no JSON",
        '{"arguments": {}}',
        "[]",
        '{"name": "add", "arguments": {"x": 1000000000000000000000}}',
    ],
)
@pytest.mark.parametrize("end", ["</call>", "</call> after", ""])
def test_a_call_that_the_response_template_cannot_read_is_invalid(body: str, end: str) -> None:
    """Field case 2: never an exception, and nothing of the answer is lost."""
    text = f"so: <call>{body}{end}"
    for pieces in ([text], [*text]):
        answer = read(pieces, template_reader())
        assert not answer.calls
        kept = answer.text + "".join(call.raw for call in answer.invalid_calls)
        assert sorted("".join(kept.split())) == sorted("".join(text.split()))
        assert all(isinstance(call, InvalidCall) and call.raw.startswith("<call>") for call in answer.invalid_calls)
        assert answer.invalid_calls


def test_a_required_field_that_is_missing_loses_no_text() -> None:
    response = {
        **RESPONSE,
        "fields": {**RESPONSE["fields"], "thinking": {**RESPONSE["fields"]["thinking"], "optional": False}},
    }
    assert content_of(read(["just ", "text<"], template_reader(response=response))) == ("just text<", "", [], [])
