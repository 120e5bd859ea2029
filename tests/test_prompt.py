"""Messages become token ids by the model's own template; sampled ids stand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from langgraph_latent.errors import TemplateError
from langgraph_latent.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import pack_tokens, unpack_tokens
from langgraph_latent.prompt.prompt import PromptWriter
from langgraph_latent.testing import CHATML, tiny_tokenizer

ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ '<|endoftext|>' }}" + CHATML
# Keeps the reasoning of the last message only, as reasoning models do.
STRIPS_HISTORY = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last %}{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + text + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRIPS_ALWAYS = STRIPS_HISTORY.replace(" and not loop.last", "")
TRIMS = CHATML.replace("message['content']", "message['content'] | trim")
PLAIN_WORDS = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def writer(template: str = CHATML) -> PromptWriter:
    return PromptWriter(tiny_tokenizer(template), "tiny")


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def double_newline_tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One in which two newlines, and two x, are one token: text on both sides of a border can melt together."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=261,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["\n\n", "\n\n", "\n\n", "xx", "xx"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|im_end|>", chat_template=template)


# -- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reply", [True, False])
def test_a_prompt_is_what_the_template_makes_of_it(reply: bool) -> None:
    tokenizer = tiny_tokenizer()
    messages = [{"role": "system", "content": "s"}, user("the team"), assistant("a"), user("q")]
    prompt = PromptWriter(tokenizer, "tiny").write(messages, reply=reply)
    want = tokenizer.apply_chat_template(messages, add_generation_prompt=reply, return_dict=False)
    assert unpack_tokens(prompt.tokens) == want
    assert prompt.num_inherited == 0


def test_a_tool_call_without_text_is_not_empty() -> None:
    """Field case 4: an assistant's turn may be a tool call alone."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    prompt = writer().write([{"role": "assistant", "content": "", "tool_calls": [call]}], reply=False)
    assert prompt.tokens


@pytest.mark.parametrize("messages", [[assistant("a")], [assistant("a"), user("b")]])
def test_a_template_that_refuses_the_order_is_a_typed_error_with_roles_and_reason(messages: list[Message]) -> None:
    """Field case 8: an order that no merging of neighbours mends, in a template that only alternates."""
    with pytest.raises(TemplateError) as caught:
        writer(ALTERNATING).write(messages, reply=True)
    text = str(caught.value)
    assert "'tiny'" in text
    assert "roles must alternate" in text
    assert ", ".join(message["role"] for message in messages) in text
    assert writer(ALTERNATING).write([user("a"), assistant("b"), user("c")], reply=True).tokens


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0]['content'] | no_such_filter }}",
        "{% for m in messages %}{{ m.content + 1 }}{% endfor %}",
        "{{ missing.attribute.deep }}",
        "{% if %}",
        "{{ messages[0].content.no_such_method() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_broken_template_is_a_typed_error(template: str) -> None:
    with pytest.raises(TemplateError, match="'tiny'"):
        writer(template).write([user("a")], reply=True)


def test_a_tokenizer_without_a_template_is_a_typed_error() -> None:
    """Field case 12: no chat_template, and no attempt to fetch one."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(TemplateError, match=r"'tiny'.*template"):
        PromptWriter(tokenizer, "tiny").write([user("a")], reply=True)


def test_a_template_that_writes_its_bos_gives_exactly_one() -> None:
    """Field case 20: rendered text is tokenised without adding the special tokens again."""
    tokenizer = tiny_tokenizer(WITH_BOS)
    bos = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    assert tokenizer.encode("a").count(bos) == 1, "this tokenizer adds a BOS by itself"
    ids = unpack_tokens(PromptWriter(tokenizer, "tiny").write([user("a"), assistant("b")], reply=True).tokens)
    assert ids.count(bos) == 1
    assert ids[0] == bos


def test_special_tokens_in_a_template_are_single_ids() -> None:
    tokenizer = tiny_tokenizer()
    ids = unpack_tokens(PromptWriter(tokenizer, "tiny").write([user("a")], reply=True).tokens)
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1


# -- extending -------------------------------------------------------------------------------------------------------


def read_handle(prompts: PromptWriter, messages: list[Message], *, reply: bool = False) -> KVHandle:
    return KVHandle.root("m").extend("prompt", "n", prompts.write(messages, reply=reply).tokens, messages)


def answered(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], sampled: list[int], text: str | None = None
) -> KVHandle:
    """The handle after an answer: the prompt, then the sampled ids and their text."""
    handle = read_handle(PromptWriter(tokenizer, "tiny"), messages, reply=True)
    answer = tokenizer.decode(sampled, skip_special_tokens=True) if text is None else text
    return handle.extend("generated", "n", pack_tokens(sampled), [assistant(answer)])


texts = st.text(st.sampled_from("the team \n\N{GRINNING FACE}é."), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(first=st.lists(texts, min_size=1, max_size=3), second=st.lists(texts, min_size=1, max_size=3))
def test_extending_what_was_read_is_writing_it_all(first: list[str], second: list[str]) -> None:
    """Law 1 on tokens: the prompt over a handle is the prompt of all messages, and inherits the common part."""
    prompts = writer()
    before, after = [user(text) for text in first], [user(text) for text in second]
    handle = read_handle(prompts, before)
    prompt = prompts.extend(handle, after, reply=True)
    assert prompt.tokens == prompts.write([*before, *after], reply=True).tokens
    assert prompt.num_inherited == handle.num_tokens


@pytest.mark.parametrize("ended", [True, False])
def test_an_answer_that_re_tokenises_to_itself_is_inherited_completely(ended: bool) -> None:
    """Law 2 on tokens, for answers that end by themselves and for those that were cut."""
    tokenizer = tiny_tokenizer()
    sampled = encode(tokenizer, "the team reads" + ("<|im_end|>" if ended else ""))
    handle = answered(tokenizer, [user("q")], sampled)
    prompts = PromptWriter(tokenizer, "tiny")
    prompt = prompts.extend(handle, [user("more")], reply=True)
    assert prompt.num_inherited == handle.num_tokens
    assert prompt.tokens == prompts.write([user("q"), assistant("the team reads"), user("more")], reply=True).tokens


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("turns", [1, 3])
def test_sampled_ids_stand_where_the_text_would_tokenise_otherwise(ended: bool, turns: int) -> None:
    """Law 2: a model may spell a word letter by letter; what it sampled is the truth, in every later turn too."""
    tokenizer = tiny_tokenizer()
    prompts = PromptWriter(tokenizer, "tiny")
    spelled = [index for letter in "the team" for index in encode(tokenizer, letter)]
    assert encode(tokenizer, "the team") != spelled
    end = encode(tokenizer, "<|im_end|>") if ended else []
    handle, asked = KVHandle.root("m"), [user("q")]
    first = prompts.write(asked, reply=True)
    handle = handle.extend("prompt", "n", first.tokens, asked)
    for turn in range(turns):
        handle = handle.extend("generated", "n", pack_tokens([*spelled, *end]), [assistant("the team")])
        prompt = prompts.extend(handle, [user(f"more {turn}")], reply=True)
        closing = "\n" if ended else "<|im_end|>\n"
        after = f"{closing}<|im_start|>user\nmore {turn}<|im_end|>\n<|im_start|>assistant\n"
        assert prompt.num_inherited == handle.num_tokens
        assert prompt.tokens == handle.tokens + pack_tokens(encode(tokenizer, after))
        handle = handle.extend("prompt", "n", prompt.tokens[len(handle.tokens) :], [user(f"more {turn}")])


def test_an_answer_cut_at_a_stop_string_is_closed_after_what_was_sampled() -> None:
    tokenizer = tiny_tokenizer()
    sampled = encode(tokenizer, "the team STOP")
    handle = answered(tokenizer, [user("q")], sampled, "the team ")
    prompt = PromptWriter(tokenizer, "tiny").extend(handle, [user("more")], reply=True)
    assert prompt.num_inherited == handle.num_tokens
    text = tokenizer.decode(unpack_tokens(prompt.tokens))
    assert text.endswith("the team STOP<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_trims_answers_still_inherits_the_sampled_ids() -> None:
    tokenizer = tiny_tokenizer(TRIMS)
    handle = answered(tokenizer, [user("q")], encode(tokenizer, " the team \n<|im_end|>"))
    prompt = PromptWriter(tokenizer, "tiny").extend(handle, [user("more")], reply=True)
    assert prompt.num_inherited == handle.num_tokens
    assert prompt.tokens.startswith(handle.tokens)
    assert tokenizer.decode(unpack_tokens(prompt.tokens)).count("<|im_end|>") == 3


def test_a_sampled_newline_is_not_taken_for_the_templates_own() -> None:
    """Field case 43: where the answer was cut after a newline, the template's newline still has to be read."""
    tokenizer = double_newline_tokenizer(PLAIN_WORDS)
    handle = answered(tokenizer, [user("q")], encode(tokenizer, "ok\n"))
    prompt = PromptWriter(tokenizer, "tiny").extend(handle, [user("more")], reply=True)
    assert prompt.num_inherited == handle.num_tokens
    assert tokenizer.decode(unpack_tokens(prompt.tokens)) == "user: q\nassistant:\nok\n\nuser: more\nassistant:\n"


def test_sampled_ids_stand_also_where_their_first_melts_into_the_prompts_last() -> None:
    """The answer began with a newline, and newline + newline is one token: the difference is in the prompt's part."""
    tokenizer = double_newline_tokenizer(PLAIN_WORDS)
    handle = answered(tokenizer, [user("q")], encode(tokenizer, "\nok"))
    assert encode(tokenizer, "assistant:\n\nok") != encode(tokenizer, "assistant:\n") + encode(tokenizer, "\nok")
    prompt = PromptWriter(tokenizer, "tiny").extend(handle, [user("more")], reply=True)
    assert prompt.num_inherited == handle.num_tokens
    assert prompt.tokens.startswith(handle.tokens)
    assert tokenizer.decode(unpack_tokens(prompt.tokens)) == "user: q\nassistant:\n\nok\nuser: more\nassistant:\n"


@pytest.mark.parametrize("template", [STRIPS_HISTORY, STRIPS_ALWAYS], ids=["history", "always"])
def test_a_template_that_rewrites_history_leaves_only_the_common_part(template: str) -> None:
    """Field case 41: the reasoning is gone from turn 2; the tokens up to it are reused, the rest is read again."""
    tokenizer = tiny_tokenizer(template)
    prompts = PromptWriter(tokenizer, "tiny")
    handle = answered(tokenizer, [user("q")], encode(tokenizer, "<think>the report</think>yes<|im_end|>"))
    prompt = prompts.extend(handle, [user("more")], reply=True)
    start = read_handle(prompts, [user("q")], reply=True)
    assert prompt.tokens == prompts.write([user("q"), assistant("yes"), user("more")], reply=True).tokens
    assert prompt.num_inherited == start.num_tokens
    assert "the report" not in tokenizer.decode(unpack_tokens(prompt.tokens))


def test_a_template_that_marks_the_last_message_leaves_what_is_before_the_mark() -> None:
    """Field case 43: partial reuse, not all or nothing."""
    template = CHATML.replace("{% endfor %}", "{% if loop.last %}{{ 'last' }}{% endif %}{% endfor %}")
    tokenizer = tiny_tokenizer(template)
    prompts = PromptWriter(tokenizer, "tiny")
    handle = read_handle(prompts, [user("the team"), user("the report")])
    prompt = prompts.extend(handle, [user("more")], reply=True)
    assert prompt.tokens == prompts.write([user("the team"), user("the report"), user("more")], reply=True).tokens
    assert prompt.num_inherited == handle.num_tokens - len(encode(tokenizer, "last"))
