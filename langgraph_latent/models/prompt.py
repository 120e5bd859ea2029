"""From messages to token ids and back, by the model's own template and tokenizer. It knows no tensors and no caches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jinja2.exceptions import TemplateError as JinjaError
from transformers import PreTrainedTokenizerBase

from langgraph_latent.errors import PromptError, TemplateError
from langgraph_latent.handle import TOKEN_BYTES, KVHandle, Message, common_tokens, pack_tokens, unpack_tokens

# What a tokenizer writes for bytes that are no whole character yet.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# Stands for an answer in a probe of the template, so that what comes behind it can be told apart.
MARK = "\N{OBJECT REPLACEMENT CHARACTER}answer\N{OBJECT REPLACEMENT CHARACTER}"


class Prompt(NamedTuple):
    """A rendered prompt: packed token ids, of which the first `num_inherited` are those of a given handle."""

    tokens: bytes
    num_inherited: int


class PromptWriter:
    """Renders messages for one model."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        self._tokenizer = tokenizer
        self._name = name
        self._cuts: dict[int, bool] = {}

    def write(self, messages: Sequence[Message], *, reply: bool) -> Prompt:
        """The prompt for `messages`; with `reply` it ends where the assistant's answer begins.

        Raises `PromptError` where there is nothing to read and `TemplateError` where the template refuses.
        """
        return Prompt(pack_tokens(self._encode(self._render(messages, reply))), 0)

    def extend(self, handle: KVHandle, messages: Sequence[Message], *, reply: bool) -> Prompt:
        """The prompt for a handle's messages and `messages` behind them.

        Equal to `write` of all messages, but where the tokens sampled for an answer are not what the tokenizer makes of
        its text, the sampled ones stand. A template that rewrites history leaves only the common part inherited.
        """
        if not handle.segments:
            return self.write(messages, reply=reply)
        inherited = handle.messages
        text = self._render([*inherited, *messages], reply)
        rest = self._behind(handle, inherited, text)
        if rest is not None and self._is_cut(rest):
            return Prompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        tokens = pack_tokens(self._encode(text))
        common = common_tokens(tokens, handle.tokens)
        if rest is not None and common < handle.num_tokens and _was_sampled(handle, common):
            return Prompt(handle.tokens + pack_tokens(self._encode(rest)), handle.num_tokens)
        return Prompt(tokens, common)

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

    def _behind(self, handle: KVHandle, messages: Sequence[Message], text: str) -> str | None:
        """What of a prompt comes behind a handle's tokens, which say `messages`; None where it tells them otherwise."""
        try:
            told = self._render(messages, reply=False)
            if not text.startswith(told):
                return None
            if handle.segments[-1].kind != "generated":
                return text[len(told) :]
            asked = self._render(messages[:-1], reply=True)
            marked = self._render([*messages[:-1], {**messages[-1], "content": MARK}], reply=False)
        except TemplateError:  # it can't render the handle's messages alone
            return None
        before, _, closing = marked.rpartition(MARK)
        if before.rstrip() != asked.rstrip() or not (told.startswith(before) and told.endswith(closing)):
            return None  # the question is told otherwise than when it was asked
        said = told[len(before) : len(told) - len(closing)]
        if said.strip() != str(messages[-1]["content"]).strip():
            return None  # the template tells the answer otherwise than it was given
        last = unpack_tokens(handle.tokens[-TOKEN_BYTES:])
        if last[0] in self._tokenizer.all_special_ids:  # a sampled end token closes it already
            head, end, behind = closing.partition(self._decode(last))
            if end and not head.strip():
                closing = behind
        return closing + text[len(told) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _encode(self, text: str) -> list[int]:
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        except (UnicodeError, TypeError) as error:
            raise PromptError(f"the prompt is no text that can be tokenised: {error}") from error
        return ids

    def _render(self, messages: Sequence[Message], reply: bool) -> str:
        if not self._tokenizer.chat_template:
            raise TemplateError(
                f"{self._name!r} has no chat template; pass an instruction-tuned model, or save a chat_template.jinja "
                "in its folder"
            )
        try:
            text: Any = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=reply)
        except (JinjaError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise TemplateError(
                f"the chat template of {self._name!r} refuses these messages (roles: {roles}): {error}"
            ) from error
        if not text:
            raise TemplateError(f"the chat template of {self._name!r} renders nothing for these messages")
        return str(text)


def _was_sampled(handle: KVHandle, index: int) -> bool:
    """Whether token `index` of a handle was sampled, or is one that the first sampled token melts into."""
    begin = 0
    for segment in handle.segments:
        end = begin + segment.num_tokens
        if segment.kind == "generated" and begin - 1 <= index < end:
            return True
        begin = end
    return False


class Detokenizer:
    """Text from sampled tokens, as early as it is certain: no half characters, nothing that may begin a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._decoded = ""
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Add a token; the text that became certain. Sets `stopped` where a stop string is complete."""
        self._ids.append(token)
        self._decoded = str(
            self._tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
        found = [at for at in (self._decoded.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._decoded, self.stopped = self._decoded[: min(found)], True
            return self.flush()
        return self._send(len(self._decoded) - self._uncertain())

    def flush(self) -> str:
        """What is left when no more tokens come."""
        return self._send(len(self._decoded))

    def _send(self, end: int) -> str:
        piece = self._decoded[len(self.text) : end]
        self.text += piece
        return piece

    def _uncertain(self) -> int:
        """Length of the tail that a next token could still change or turn into a stop string."""
        whole = self._decoded.rstrip(UNFINISHED)
        starts = (n for stop in self._stop for n in range(1, len(stop)) if whole.endswith(stop[:n]))
        return len(self._decoded) - len(whole) + max(starts, default=0)
