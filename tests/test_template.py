"""What a graph sends is rendered by the templates of all families: every word of it, with a note; or it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from tokenizers import processors

from langgraph_latent import ChatLatent, LatentWorkspace
from langgraph_latent.errors import TemplateError
from langgraph_latent.events import Reworded
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import unpack_tokens
from langgraph_latent.prompt.prompt import PromptWriter
from langgraph_latent.prompt.template import PLAIN, ChatTemplate, TemplateInputs, _merge_roles
from langgraph_latent.testing import CHATML, tiny_tokenizer

END = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
# As of Mistral-7B-Instruct-v0.3: the system message is rendered in the last message, and only if that is a user's.
MISTRAL = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set rest = messages[1:] %}"
    "{% else %}{% set rest = messages %}{% endif %}"
    "{% set users = rest | selectattr('role', 'equalto', 'user') | list %}"
    "{% set turn = namespace(index=0) %}{% for m in rest %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (turn.index % 2 == 0) %}"
    "{{ raise_exception('After the optional system message, roles must alternate') }}{% endif %}"
    "{% set turn.index = turn.index + 1 %}{% endif %}{% endfor %}"
    "{% for m in rest %}{% if m.role == 'user' %}"
    "{% if tools and m == users[-1] %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST] {% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id is not defined or call.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs have length 9!') }}{% endif %}"
    '{{ (call.function | tojson)[:-1] }}, "id": "{{ call.id }}"}{{ \', \' if not loop.last }}{% endfor %}]<|im_end|>'
    "{% elif m.role == 'assistant' %} {{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs have length 9!') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ raise_exception('Only user, assistant and tool roles are supported') }}{% endif %}{% endfor %}"
)
LLAMA = (
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}"
    "{% else %}{% set system = '' %}{% endif %}<|im_start|>system\n{{ system }}"
    '{% if tools %}\nRespond with JSON {"name": ..., "parameters": ...}\n'
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}<|im_end|>"
    "{% for m in messages %}{% if m.tool_calls %}"
    "{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|im_start|>assistant\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|im_end|>'
    "{% elif m.role == 'tool' or m.role == 'ipython' %}<|im_start|>ipython\n{{ m.content | tojson }}<|im_end|>"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>{% endif %}{% endfor %}" + END
)
QWEN_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ '\n\n' }}# Tools\n<tools>{% for t in tools %}{{ '\n' }}{{ t | tojson }}{% endfor %}\n</tools><|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
)
QWEN_CALLS = (
    "{% for call in m.tool_calls %}{% if text or not loop.first %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n'
)
QWEN_RESULT = (
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% endif %}{% endfor %}"
)
QWEN25 = (
    QWEN_TOOLS + "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) or "
    "(m.role == 'assistant' and not m.tool_calls) %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% set text = true %}"
    + QWEN_CALLS + QWEN_RESULT + END
)  # fmt: skip
# Reasoning before the last question is left out; `enable_thinking=False` closes the reasoning in the prompt.
QWEN3 = (
    QWEN_TOOLS + "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last and m.reasoning_content %}<think>\n{{ m.reasoning_content.strip('\n') }}\n</think>\n\n"
    "{% endif %}{{ text }}" + QWEN_CALLS + QWEN_RESULT + END
    + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)  # fmt: skip
DEEPSEEK = (
    "{% set ns = namespace(system='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "{% set ns.system = m.content %}{% endif %}{% endfor %}{{ '<|endoftext|>' + ns.system }}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' and m.tool_calls %}<｜Assistant｜>{{ m.content or '' }}<｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\n```json\n' + "
    "call.function.arguments + '\n```<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜><|im_end|>"
    "{% elif m.role == 'assistant' %}<｜Assistant｜>{{ m.content }}<|im_end|>"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)
DROPS = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\n{% elif m.role == 'assistant' %}"
    "A: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
# Only the first call is rendered, and arguments are printed as they are: text is JSON, a dict is Python.
FIRST_CALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if m.tool_calls %}"
    '<tool_call>{"name": "{{ m.tool_calls[0].function.name }}", "arguments": {{ m.tool_calls[0].function.arguments }}}'
    "</tool_call>{% endif %}<|im_end|>\n{% endfor %}" + END
)
# The system message gives way to the tools.
TOOLS_FOR_SYSTEM = QWEN25.replace("{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}", "", 1)
TEMPLATES = {
    "chatml": CHATML,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "llama": LLAMA,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "deepseek": DEEPSEEK,
    "drops": DROPS,
    "first call": FIRST_CALL,
    "tools for system": TOOLS_FOR_SYSTEM,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "toolname",
        "description": "tooldescription",
        "parameters": {"type": "object", "properties": {"toolparameter": {"type": "integer"}}},
    },
}


def system(text: str = "systemtext") -> Message:
    return {"role": "system", "content": text}


def user(text: str = "usertext") -> Message:
    return {"role": "user", "content": text}


def ai(text: str = "aitext", *calls: tuple[str, dict[str, Any], str]) -> Message:
    made = [{"type": "function", "id": i, "function": {"name": n, "arguments": a}} for n, a, i in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if calls else {})}


def result(text: str, call_id: str) -> Message:
    return {"role": "tool", "content": text, "tool_call_id": call_id}


CALL, OTHER = ("callname", {"callkey": "callvalue"}, "abcdef123"), ("othername", {"otherkey": [1, True]}, "abcdef456")
LONG = "call_abc123"  # another provider's id
CONVERSATIONS: dict[str, tuple[list[Message], bool]] = {
    "user": ([user()], False),
    "system": ([system(), user()], False),
    "chat": ([system(), user("q1"), ai("a1"), user("q2"), ai("a2"), user("q3")], False),
    "tools": ([user()], True),
    "system and tools": ([system(), user(), ai(), user("q2")], True),
    "call": ([user(), ai("", CALL), result("resulttext", CALL[2])], True),
    "system and call": ([system(), user(), ai("aitext", CALL), result("resulttext", CALL[2])], True),
    "call, then on": ([system(), user(), ai("", CALL), result("resulttext", CALL[2]), ai(), user("q2")], False),
    "parallel": ([user(), ai("", CALL, OTHER), result("r1", CALL[2]), result("r2", OTHER[2]), ai(), user("q2")], True),
    "foreign ids": ([user(), ai("", (*CALL[:2], LONG)), result("resulttext", LONG)], True),
    "result, human": ([user(), ai("", CALL), result("resulttext", CALL[2]), user("q2")], False),
    "late system": ([user(), ai(), system(), user("q2")], False),
    "two systems": ([system(), system("system2"), user()], False),
    "human, human": ([user(), user("usertext2")], False),
    "system, ai, human": ([system(), ai(), user()], False),
    "ai, human": ([ai(), user()], False),
    "ai, ai": ([user(), ai(), ai("aitext2"), user("q2")], False),
    "system alone": ([system()], False),
}
NATIVE = {"mistral", "llama", "qwen2.5", "qwen3", "deepseek"}
TEXTS, RESULTS, TOOLS = "tool_calls_as_text", "tool_results_as_user", "tools_in_system"
SYSTEM, LATE, MERGED, IDS = "system_in_user", "late_system_as_user", "roles_merged", "short_call_ids"
CHANGES: dict[str, dict[str, tuple[str, ...]]] = {
    "user": {},
    "system": {"gemma": (SYSTEM,), "mistral": (SYSTEM,), "drops": (SYSTEM,)},
    "tools": {
        "chatml": (TOOLS,), "gemma": (TOOLS, SYSTEM), "deepseek": (TOOLS,), "drops": (TOOLS, SYSTEM),
        "first call": (TOOLS,), "tools for system": (TOOLS,),
    },
    "call": {
        "chatml": (TEXTS, TOOLS), "gemma": (TEXTS, RESULTS, TOOLS, SYSTEM), "deepseek": (TOOLS,),
        "drops": (TEXTS, RESULTS, TOOLS, SYSTEM), "first call": (TOOLS,), "tools for system": (TOOLS,),
    },
    "parallel": {
        "chatml": (TEXTS, TOOLS), "gemma": (TEXTS, RESULTS, TOOLS, SYSTEM, MERGED), "llama": (TEXTS, RESULTS),
        "deepseek": (TOOLS,), "drops": (TEXTS, RESULTS, TOOLS, SYSTEM), "first call": (TEXTS, RESULTS, TOOLS),
        "tools for system": (TOOLS,),
    },
    "foreign ids": {
        "chatml": (TEXTS, TOOLS), "gemma": (TEXTS, RESULTS, TOOLS, SYSTEM), "mistral": (IDS,), "deepseek": (TOOLS,),
        "drops": (TEXTS, RESULTS, TOOLS, SYSTEM), "first call": (TOOLS,), "tools for system": (TOOLS,),
    },
    "late system": {"gemma": (LATE, MERGED), "mistral": (LATE, MERGED), "deepseek": (LATE,), "drops": (LATE,)},
    "human, human": {"gemma": (MERGED,), "mistral": (MERGED,)},
    "ai, ai": {"gemma": (MERGED,), "mistral": (MERGED,)},
    "system, ai, human": {"gemma": (SYSTEM,), "mistral": (SYSTEM,), "drops": (SYSTEM,)},
    "system alone": {"gemma": (SYSTEM,), "mistral": (SYSTEM,), "drops": (SYSTEM,)},
}  # fmt: skip
REFUSED = {("gemma", "ai, human"), ("mistral", "ai, human"), ("mistral", "result, human")}


def template(name: str) -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer(TEMPLATES[name]), name)


def words(messages: list[Message], has_tools: bool) -> set[str]:
    """What must be found in a prompt of these messages."""
    found = {message["content"] for message in messages}
    for message in messages:
        for call in message.get("tool_calls", ()):
            found |= {
                call["function"]["name"],
                *call["function"]["arguments"],
                *map(json.dumps, call["function"]["arguments"].values()),
            }
    return found | ({"toolname", "tooldescription", "toolparameter"} if has_tools else set())


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_word_is_rendered_or_the_conversation_is_refused(name: str, conversation: str) -> None:
    """Field cases 1, 3, 4, 8: no template drops tools, calls, results or a system message in silence."""
    messages, has_tools = CONVERSATIONS[conversation]
    before = json.dumps(messages)
    template_inputs = TemplateInputs([TOOL] if has_tools else [])
    if (name, conversation) in REFUSED:
        with pytest.raises(TemplateError, match="alternate"):
            template(name).render(messages, template_inputs, reply=True)
        return
    text = template(name).render(messages, template_inputs, reply=True)
    missing = {word for word in words(messages, has_tools) if word not in text}
    assert not missing, text
    assert json.dumps(messages) == before, "the caller's messages"
    order = [text.rindex(each["content"]) for each in messages if each["role"] != "system" and each["content"]]
    assert order == sorted(order)
    if conversation in CHANGES:
        assert template(name).adapt(messages, template_inputs.tools).changes == CHANGES[conversation].get(name, ())


def test_what_is_merged_is_rendered_completely() -> None:
    """Merging puts text beside calls, and calls beside calls, where a template may render only one of them."""
    call, other = ("add", {"x": 1}, "abcdef123"), ("look", {"y": 2}, "abcdef124")
    conversations = [
        [user("q"), ai("thoughttext"), ai("", call), result("42", "abcdef123")],
        [user("q"), ai("", call), result("42", "abcdef123"), ai("latertext"), ai("lasttext"), user("more")],
        [user("q"), ai("", call), ai("", other), result("1", "abcdef123"), result("2", "abcdef124")],
    ]
    for name in ("mistral", "llama"):
        for messages in conversations:
            text = template(name).render(messages, PLAIN, reply=True)
            assert not [word for word in words(messages, False) if word not in text]


def test_merged_messages_keep_their_reasoning_and_a_name_that_both_have() -> None:
    one = {**ai("a"), "reasoning_content": "r1", "name": "n"}
    merged = _merge_roles([one, {**ai("b"), "reasoning_content": "r2", "name": "n"}, user("c")])
    assert merged == [{**ai("a\n\nb"), "reasoning_content": "r1\n\nr2", "name": "n"}, user("c")]
    assert "name" not in _merge_roles([one, {**ai("b"), "name": "other"}])[0]


@pytest.mark.parametrize("name", sorted(NATIVE))
def test_what_a_template_can_say_is_left_untouched(name: str) -> None:
    """The prompt is what transformers itself makes of the messages, arguments as the template takes them."""
    messages, _ = CONVERSATIONS["call, then on"]
    if name == "mistral":
        messages = messages[1:]
    tools = [] if name == "deepseek" else [TOOL]
    adapted = template(name).adapt(messages, tools)
    assert adapted.changes == ()
    assert adapted.tools == tools
    if name == "deepseek":
        messages = json.loads(json.dumps(messages))
        messages[2]["tool_calls"][0]["function"]["arguments"] = json.dumps(CALL[1])
    assert adapted.messages == messages
    own = tiny_tokenizer(TEMPLATES[name]).apply_chat_template(messages, tools=tools or None, tokenize=False)
    assert (
        template(name).render(
            CONVERSATIONS["call, then on"][0][name == "mistral" :], TemplateInputs(tools), reply=False
        )
        == own
    )


def test_arguments_are_json_even_where_a_template_prints_them() -> None:
    """A dict printed by Jinja is Python: True for true, single quotes."""
    text = template("first call").render([user(), ai("", OTHER)], TemplateInputs(), reply=False)
    assert '{"name": "othername", "arguments": {"otherkey": [1, true]}}' in text


def test_reasoning_reaches_a_template_that_asks_for_it() -> None:
    reasoning = {**ai("", CALL), "reasoning_content": "thoughttext"}
    during = [user(), reasoning, result("resulttext", CALL[2])]
    assert "<think>\nthoughttext\n</think>" in template("qwen3").render(during, TemplateInputs(), reply=True)
    assert "thoughttext" not in template("qwen3").render([*during, ai(), user("q2")], TemplateInputs(), reply=True)


def test_template_options_reach_the_template() -> None:
    off = template("qwen3").render([user()], TemplateInputs(options={"enable_thinking": False}), reply=True)
    on = template("qwen3").render([user()], TemplateInputs(options={"enable_thinking": True}), reply=True)
    assert off == on + "<think>\n\n</think>\n\n"


def test_short_ids_keep_calls_and_results_together() -> None:
    messages = [user(), ai("", (*CALL[:2], LONG), (*OTHER[:2], "x")), result("r1", LONG), result("r2", "x")]
    adapted = template("mistral").adapt(messages)
    ids = [call["id"] for call in adapted.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in adapted.messages[2:]] == ids
    assert len({*ids}) == 2
    assert all(len(each) == 9 and each.isalnum() for each in ids)


def test_a_template_without_any_form_for_a_conversation_refuses_it_by_name() -> None:
    """Field case 8."""
    with pytest.raises(
        TemplateError, match=r"'gemma' refuses these messages \(roles: assistant, user\): .*must alternate"
    ):
        template("gemma").render([ai(), user()], TemplateInputs(), reply=True)


# -- in a chat model -------------------------------------------------------------------------------------------------


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def chat_of(tiny_folder: Callable[..., Path], ws: LatentWorkspace, template: str, **options: Any) -> ChatLatent:
    return ChatLatent(model=str(tiny_folder("llama", template=template)), workspace=ws, max_tokens=3, **options)


HISTORY = [
    SystemMessage("systemtext"),
    HumanMessage("usertext"),
    AIMessage("", tool_calls=[{"name": "multiply", "args": {"a": 2, "b": 3}, "id": LONG}]),
    ToolMessage("resulttext", tool_call_id=LONG),
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_bound_tools_and_tool_results_are_in_the_prompts_ids(
    name: str, tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    """Field cases 1, 3 and 4: what the model reads holds the tool's name, and a tool's result at its end."""
    chat = chat_of(tiny_folder, ws, TEMPLATES[name])
    reply = chat.bind_tools([multiply]).invoke(HISTORY)
    handle = ws.handle(reply)
    text = chat.tokenizer.decode(unpack_tokens(handle.tokens)[: reply.usage_metadata["input_tokens"]])
    assert all(word in text for word in ("multiply", "Multiply two numbers.", "systemtext", "usertext", "resulttext"))
    events = [event.changes for event in ws.tracer.events if isinstance(event, Reworded)]
    plain = [{**system()}, user(), ai("", ("multiply", {"a": 2, "b": 3}, LONG)), result("resulttext", LONG)]
    changes = template(name).adapt(plain, [TOOL]).changes
    assert events == ([changes] if changes else []), "each rewording is an event once, and only if there is one"


def test_the_number_of_tokens_of_messages_counts_their_tools(
    tiny_folder: Callable[..., Path], ws: LatentWorkspace
) -> None:
    chat = chat_of(tiny_folder, ws, QWEN25)
    messages = [HumanMessage("hello")]
    alone, with_tools = (chat.get_num_tokens_from_messages(messages, tools=each) for each in (None, [multiply]))
    assert with_tools - alone > len("multiply")
    prompt = chat.bind_tools([multiply]).invoke(messages).usage_metadata["input_tokens"]
    assert prompt == with_tools + len(chat.get_token_ids("<|im_start|>assistant\n"))


@pytest.mark.parametrize("adds", [False, True], ids=["plain tokenizer", "tokenizer adds bos"])
@pytest.mark.parametrize("in_template", [False, True], ids=["no bos", "bos in template"])
def test_a_prompt_has_the_bos_of_its_template_once(adds: bool, in_template: bool) -> None:
    """Field case 20: a tokenizer that puts its own before every text does not double it."""
    tokenizer = tiny_tokenizer("{{ bos_token }}" * in_template + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    bos = tokenizer.bos_token_id
    if adds:
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
        )
        assert tokenizer.encode("x")[0] == bos
    ids = unpack_tokens(PromptWriter(tokenizer, "tiny").write([user("hi"), ai(), user("on")], reply=True).tokens)
    assert ids.count(bos) == in_template
    assert (ids[0] == bos) == in_template
    assert ids == tokenizer.apply_chat_template(
        [user("hi"), ai(), user("on")], add_generation_prompt=True, return_dict=False
    )
