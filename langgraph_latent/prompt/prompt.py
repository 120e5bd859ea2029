"""Messages to a prompt's token ids, by the model's own template and tokenizer. It knows no tensors and no caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from langgraph_latent.errors import PromptError, TemplateError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import TOKEN_BYTES, common_tokens, pack_tokens, unpack_tokens
from langgraph_latent.prompt.template import PLAIN, USER, ChatTemplate, TemplateInputs

ANSWER_MARK = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for an answer in a probe of the template, so that what the template appends to an answer can be found."""
NUM_END_TOKENS = 8


class RenderedPrompt(NamedTuple):
    """A prompt as packed token ids, of which the first `num_inherited` are those of a given handle."""

    tokens: bytes
    num_inherited: int


class PromptWriter:
    """Renders messages for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.template = ChatTemplate(tokenizer, name)
        self._tokenizer = tokenizer
        self._cuts: dict[int, bool] = {}

    def write(
        self, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN, *, reply: bool
    ) -> RenderedPrompt:
        """The prompt for `messages`; with `reply` it ends where the assistant's answer begins.

        Raises `PromptError` where there is nothing to read and `TemplateError` where the template refuses.
        """
        return RenderedPrompt(
            pack_tokens(self._encode(self.template.render(messages, template_inputs, reply=reply))), 0
        )

    def extend(
        self, handle: KVHandle, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN, *, reply: bool
    ) -> RenderedPrompt:
        """The prompt for a handle's messages and `messages` after them.

        It equals `write` of all messages, with one exception: where an answer's sampled tokens are not what the
        tokenizer makes of its text, the sampled ones stand. Only the common part is inherited where a template rewrites
        history, and where a handle was made with other template inputs.
        """
        if not handle.segments:
            return self.write(messages, template_inputs, reply=reply)
        inherited = handle.messages
        text = self.template.render([*inherited, *messages], template_inputs, reply=reply)
        digest = template_inputs.digest
        is_alike = all(segment.inputs_digest == digest for segment in handle.segments)
        rest = self._after(handle, inherited, text, template_inputs) if is_alike else None
        is_composed = bool(handle.provenance_digest)  # then there are no other tokens for its messages
        if rest is not None and (is_composed or self._can_cut_before(rest)):
            return RenderedPrompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        tokens = pack_tokens(self._encode(text))
        common = common_tokens(tokens, handle.tokens)
        if rest is not None and common < handle.num_tokens and _was_sampled(handle, common):
            return RenderedPrompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        return RenderedPrompt(tokens, common)

    def system_prefix(self, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN) -> bytes:
        """The tokens that lead a conversation of these messages: its system message, or the template's own words.

        Empty where nothing leads it, and where its end can't be found.
        """
        lead = [message for message in messages[:1] if message["role"] == "system"]
        try:
            text, rest = self.template.render([*lead, USER], template_inputs, reply=False), self._user_text
        except TemplateError:
            return b""
        if not rest or not text.endswith(rest) or not self._can_cut_before(rest):
            return b""
        return pack_tokens(self._encode(text[: -len(rest)]))

    @cached_property
    def _user_text(self) -> str:
        """What the template makes of `USER` after a system message; "" where that can't be found."""
        system = {"role": "system", "content": ANSWER_MARK}
        alone, both = (self.template.render(each, PLAIN, reply=False) for each in ([system], [system, USER]))
        return both[len(alone) :] if both.startswith(alone) else ""

    def _can_cut_before(self, rest: str) -> bool:
        """Whether a text begins with a special token before which any text can be cut: either side is tokenised the
        same without the other."""
        for token, added in self._tokenizer.added_tokens_decoder.items():
            if rest.startswith(added.content):
                if token not in self._cuts:
                    self._cuts[token] = added.special and self._separates(token, added.content)
                return self._cuts[token]
        return False

    def _separates(self, token: int, content: str) -> bool:
        probes = ("\n", " a", "a b")
        return all(
            self._encode(f"{before}{content}{after}") == [*self._encode(before), token, *self._encode(after)]
            for before in probes
            for after in probes
        )

    def _after(
        self, handle: KVHandle, messages: Sequence[Message], text: str, template_inputs: TemplateInputs
    ) -> str | None:
        """What of a prompt comes after a handle's tokens, which are those of `messages`; None where the prompt renders
        these messages in another way."""
        try:
            rendered = self.template.render(messages, template_inputs, reply=False)
            if not text.startswith(rendered):
                return None
            if not ends_open(handle):
                return text[len(rendered) :]
            asked = self.template.render(messages[:-1], template_inputs, reply=True)
            marked_answer = {"role": "assistant", "content": ANSWER_MARK}
            marked = self.template.render([*messages[:-1], marked_answer], template_inputs, reply=False)
        except TemplateError:  # it can't render the handle's messages alone
            return None
        before, _, closing = marked.rpartition(ANSWER_MARK)
        if before.rstrip() != asked.rstrip() or not (rendered.startswith(before) and rendered.endswith(closing)):
            return None  # the question is not rendered as it was when it was asked
        answer = rendered[len(before) : len(rendered) - len(closing)]
        if not self._is_as_sampled(handle, messages[-1], answer):
            return None  # the answer is not rendered as it was given
        last = unpack_tokens(handle.tokens[-TOKEN_BYTES:])
        if handle.num_sampled and last[0] in self._tokenizer.all_special_ids:  # a sampled end token closes it already
            space, end, after_end = closing.partition(self._decode(last))
            if end and not space.strip():
                closing = after_end
        return closing + text[len(rendered) :]

    def _is_as_sampled(self, handle: KVHandle, answer: Message, rendered: str) -> bool:
        """Whether a template's version of an answer is what was sampled for it."""
        rendered = rendered.strip()
        if set(answer) == {"role", "content"}:
            return rendered == str(answer["content"]).strip()
        sampled = self._decode(unpack_tokens(handle.tokens[-handle.num_sampled * TOKEN_BYTES :])).strip()
        return sampled.startswith(rendered) and bool(rendered or not sampled)

    def decode_end(self, tokens: bytes) -> str:
        """The last few tokens of a prompt as text: what an answer begins in."""
        return self._decode(unpack_tokens(tokens[-NUM_END_TOKENS * TOKEN_BYTES :]))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise PromptError(f"the prompt is not text that can be tokenised: {error}") from error
        return ids


def ends_open(handle: KVHandle) -> bool:
    """Whether a handle ends in an assistant's turn that is still to be closed: a sampled answer, or latent steps."""
    return bool(handle.num_sampled) or (bool(handle.spans) and handle.spans[-1].kind == "latent")


def _was_sampled(handle: KVHandle, index: int) -> bool:
    """Whether token `index` of a handle was sampled, or is one that the first sampled token melts into."""
    begin = 0
    for segment in handle.segments:
        end = begin + segment.num_tokens
        if segment.kind == "generated" and begin - 1 <= index < end:
            return True
        begin = end
    return False
