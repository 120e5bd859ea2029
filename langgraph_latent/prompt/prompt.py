"""From messages to token ids and back, by the model's own template and tokenizer. It knows no tensors and no caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from langgraph_latent.errors import PromptError, TemplateError
from langgraph_latent.handle.handle import KVHandle, Message
from langgraph_latent.handle.tokens import TOKEN_BYTES, common_tokens, pack_tokens, unpack_tokens
from langgraph_latent.prompt.template import PLAIN, USER, ChatTemplate, TemplateInputs

# Stands for an answer in a probe of the template, so that what comes behind it can be told apart.
MARK = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"
NUM_END_TOKENS = 8


class Prompt(NamedTuple):
    """A rendered prompt: packed token ids, of which the first `num_inherited` are those of a given handle."""

    tokens: bytes
    num_inherited: int


class PromptWriter:
    """Renders messages for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self.template = ChatTemplate(tokenizer, name)
        self._tokenizer = tokenizer
        self._cuts: dict[int, bool] = {}

    def write(self, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN, *, reply: bool) -> Prompt:
        """The prompt for `messages`; with `reply` it ends where the assistant's answer begins.

        Raises `PromptError` where there is nothing to read and `TemplateError` where the template refuses.
        """
        return Prompt(pack_tokens(self._encode(self.template.render(messages, template_inputs, reply=reply))), 0)

    def extend(
        self, handle: KVHandle, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN, *, reply: bool
    ) -> Prompt:
        """The prompt for a handle's messages and `messages` behind them.

        Equal to `write` of all messages, but where the tokens sampled for an answer are not what the tokenizer makes of
        its text, the sampled ones stand. A template that rewrites history, and a handle made in another template_inputs, leave
        only the common part inherited.
        """
        if not handle.segments:
            return self.write(messages, template_inputs, reply=reply)
        inherited = handle.messages
        text = self.template.render([*inherited, *messages], template_inputs, reply=reply)
        digest = template_inputs.digest
        is_alike = all(segment.inputs_digest == digest for segment in handle.segments)
        rest = self._behind(handle, inherited, text, template_inputs) if is_alike else None
        if rest is not None and (
            self._is_cut(rest) or handle.provenance_digest
        ):  # what was composed has no other tokens
            return Prompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        tokens = pack_tokens(self._encode(text))
        common = common_tokens(tokens, handle.tokens)
        if rest is not None and common < handle.num_tokens and _was_sampled(handle, common):
            return Prompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        return Prompt(tokens, common)

    def head(self, messages: Sequence[Message], template_inputs: TemplateInputs = PLAIN) -> bytes:
        """The tokens that lead a conversation of these messages: its system message, or the template's own words.

        Empty where nothing leads it, or where its end can't be told from what follows.
        """
        lead = [message for message in messages[:1] if message["role"] == "system"]
        try:
            text, behind = self.template.render([*lead, USER], template_inputs, reply=False), self._user_text
        except TemplateError:
            return b""
        if not behind or not text.endswith(behind) or not self._is_cut(behind):
            return b""
        return pack_tokens(self._encode(text[: -len(behind)]))

    @cached_property
    def _user_text(self) -> str:
        """What the template makes of `USER` behind a system message; "" where that can't be told."""
        system = {"role": "system", "content": MARK}
        alone, both = (self.template.render(told, PLAIN, reply=False) for told in ([system], [system, USER]))
        return both[len(alone) :] if both.startswith(alone) else ""

    def _is_cut(self, rest: str) -> bool:
        """Whether a text begins with a special token before which any text can be cut: what stands on either side is
        tokenised the same without the other."""
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

    def _behind(
        self, handle: KVHandle, messages: Sequence[Message], text: str, template_inputs: TemplateInputs
    ) -> str | None:
        """What of a prompt comes behind a handle's tokens, which say `messages`; None where it tells them otherwise."""
        try:
            told = self.template.render(messages, template_inputs, reply=False)
            if not text.startswith(told):
                return None
            if not handle.ends_open:
                return text[len(told) :]
            asked = self.template.render(messages[:-1], template_inputs, reply=True)
            marked_answer = {"role": "assistant", "content": MARK}
            marked = self.template.render([*messages[:-1], marked_answer], template_inputs, reply=False)
        except TemplateError:  # it can't render the handle's messages alone
            return None
        before, _, closing = marked.rpartition(MARK)
        if before.rstrip() != asked.rstrip() or not (told.startswith(before) and told.endswith(closing)):
            return None  # the question is told otherwise than when it was asked
        said = told[len(before) : len(told) - len(closing)]
        if not self._says(handle, messages[-1], said):
            return None  # the template tells the answer otherwise than it was given
        last = unpack_tokens(handle.tokens[-TOKEN_BYTES:])
        if handle.num_sampled and last[0] in self._tokenizer.all_special_ids:  # a sampled end token closes it already
            head, end, behind = closing.partition(self._decode(last))
            if end and not head.strip():
                closing = behind
        return closing + text[len(told) :]

    def _says(self, handle: KVHandle, answer: Message, told: str) -> bool:
        """Whether a template's version of an answer is what was sampled for it."""
        if set(answer) == {"role", "content"}:
            return told.strip() == str(answer["content"]).strip()
        sampled = unpack_tokens(handle.tokens[-handle.num_sampled * TOKEN_BYTES :])
        said = self._decode(sampled).strip()
        return said.startswith(told.strip()) and bool(told.strip() or not said)

    def decode_end(self, tokens: bytes) -> str:
        """The last few tokens of a prompt as text: what an answer begins in."""
        return self._decode(unpack_tokens(tokens[-NUM_END_TOKENS * TOKEN_BYTES :]))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise PromptError(f"the prompt is no text that can be tokenised: {error}") from error
        return ids


def _was_sampled(handle: KVHandle, index: int) -> bool:
    """Whether token `index` of a handle was sampled, or is one that the first sampled token melts into."""
    begin = 0
    for segment in handle.segments:
        end = begin + segment.num_tokens
        if segment.kind == "generated" and begin - 1 <= index < end:
            return True
        begin = end
    return False
