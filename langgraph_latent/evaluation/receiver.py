"""What one receiver predicts after a cache or after text, by teacher forcing: the answer is given, not sampled.

It knows a model, its states and handles. It knows nothing of tasks or of figures over many of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from langgraph_latent.chat_model import ChatLatent
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, ModelMismatchError, TemplateError, UnsupportedLayerError
from langgraph_latent.evaluation.metrics import Measured, Score
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens
from langgraph_latent.kv.state import KVState
from langgraph_latent.messages import BaseMessage, plain_message
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.choice import facts_of
from langgraph_latent.workspace.request import transcript
from langgraph_latent.workspace.workspace import LatentWorkspace

Question = str | Sequence[BaseMessage | Message]
"""A text, or messages: LangChain's, or plain ones with `role` and `content`."""


class Start(NamedTuple):
    """A state, and the prompt's token ids that come after it, one at least."""

    state: KVState
    ids: list[int]


def prefilled(model: ResidentModel, ids: Sequence[int], room: int = 0) -> KVState:
    """The state of tokens that are read from the first one, with room for as many more."""
    with model.empty_state().append(len(ids) + room) as tail:
        if ids:
            model.prefill(ids, tail)
        return tail.seal()


def predict(model: ResidentModel, start: Start, answer: Sequence[int] = ()) -> torch.Tensor:
    """Log-probabilities where each of an answer's tokens is predicted, (answer, vocab), float64; one model call.

    Without an answer, of the token that comes first: (1, vocab).
    """
    with start.state.append(start.state.num_tokens + len(start.ids) + len(answer)) as tail:
        logits = model.logits([*start.ids, *answer[:-1]], tail)
    return logits[-max(1, len(answer)) :].cpu().double().log_softmax(dim=-1)


class Receiver:
    """A chat model's predictions, after handles and after text."""

    def __init__(self, chat: ChatLatent) -> None:
        self._model = chat.resident()
        self._template_inputs = TemplateInputs((), chat.template_options)
        self.workspace = chat.workspace or LatentWorkspace.default()

    def answer_ids(self, answer: str | None) -> list[int]:
        """The answer's token ids; none where no answer is given."""
        if answer is None:
            return []
        ids: list[int] = self._model.tokenizer.encode(answer, add_special_tokens=False)
        if not ids:
            raise ConfigError("the answer is empty; give one with some text, or None to compare the next token alone")
        return ids

    def write(self, messages: Sequence[Message]) -> bytes:
        """Messages as packed tokens, up to where an answer begins."""
        return self._model.prompts.write(messages, self._template_inputs, reply=True).tokens

    def full_text(self, handle: KVHandle, asked: Sequence[Message]) -> bytes:
        """The packed tokens of a handle's text and a question, in order."""
        if handle.has_latent_steps:
            return self.write([*transcript(handle), *asked])
        return self._model.prompts.extend(handle, asked, self._template_inputs, reply=True).tokens

    def after_text(self, tokens: bytes) -> Start:
        """All of a prompt but its last token, read from the first one."""
        *before, last = unpack_tokens(tokens)
        return Start(prefilled(self._model, before, room=1), [last])

    def after(self, handle: KVHandle, asked: Sequence[Message]) -> Start:
        """A handle's cache, and the tokens of a question after it."""
        self.workspace.check(handle)
        spec = self._model.spec
        if handle.model != spec.identity:
            raise ModelMismatchError(f"handle {handle.id} is of another model than {spec.name!r}; its text can be read")
        facts = facts_of(handle, spec)
        refusal = facts.append_refusal or facts.move_refusal or (facts.has_latent_steps and facts.latent_steps_refusal)
        if refusal:
            raise UnsupportedLayerError(f"{spec.name!r} can't go on in this cache: {refusal}; hand over text")
        prompt = self._model.prompts.extend(handle, asked, self._template_inputs, reply=True)
        num_kept, num_tokens = prompt.num_inherited, handle.num_tokens
        state = self.workspace.state_of(handle, self._model)
        ids = unpack_tokens(prompt.tokens[num_kept * TOKEN_BYTES :])
        may_crop = spec.capabilities.can("crop") and state.can_crop(num_kept) and num_kept >= handle.num_composed
        if not ids or (num_kept < num_tokens and not may_crop):
            raise TemplateError(
                f"the template rewrites what is handed over: {num_kept} of {num_tokens} tokens stay, of a cache that "
                "can't be cropped to them; hand over text"
            )
        return Start(state.crop(num_kept), ids)

    def predict(self, start: Start, answer: Sequence[int]) -> torch.Tensor:
        """What `predict` gives with this receiver's model."""
        return predict(self._model, start, answer)

    def decode(self, start: Start, max_tokens: int) -> str:
        """Text of up to `max_tokens` likeliest tokens; an end token ends it, and so does the model's length."""
        decoded, ids = list[int](), start.ids
        if self._model.max_positions:
            max_tokens = min(max_tokens, self._model.max_positions - start.state.num_tokens - len(ids))
        with start.state.append(start.state.num_tokens + len(ids) + max_tokens) as tail:
            while len(decoded) < max_tokens:
                token = int(self._model.logits(ids, tail)[-1].argmax())
                if token in self._model.end_tokens:
                    break
                decoded, ids = [*decoded, token], [token]
        return str(self._model.tokenizer.decode(decoded, skip_special_tokens=True))


def measure(chat: ChatLatent, handle: KVHandle, question: Question, answer: str | None = None) -> Measured:
    """What a receiver predicts after a handle and a question, against the same after the full text.

    The full text is the handle's very tokens read one after another, be they moved or not; of a handle with latent
    steps it is its messages without them. `answer` follows the prompt at once, without an end token.

    Raises `UnsupportedLayerError` for a model that can't make the handle's cache or go on in it, `TemplateError` for a
    template that renders the handle otherwise when a question follows, `ConfigError` for an empty answer, `HandleError`
    (`ModelMismatchError` for another model's), and `PromptError` for what is too long or not text.
    """
    receiver = Receiver(chat)
    ids, asked = receiver.answer_ids(answer), _messages(question)
    latent = receiver.predict(receiver.after(handle, asked), ids)
    text = receiver.predict(receiver.after_text(receiver.full_text(handle, asked)), ids)
    return Measured.of(text, latent, ids)


def score(chat: ChatLatent, handle: KVHandle, question: Question, answer: str) -> Score:
    """How likely an answer is after a handle and a question. Raises what `measure` raises."""
    receiver = Receiver(chat)
    ids = receiver.answer_ids(answer)
    return Score.of(receiver.predict(receiver.after(handle, _messages(question)), ids), ids)


def decode(chat: ChatLatent, handle: KVHandle, question: Question, max_tokens: int = 64) -> str:
    """The answer by argmax after a handle and a question, special tokens left out. Raises what `measure` raises."""
    receiver = Receiver(chat)
    return receiver.decode(receiver.after(handle, _messages(question)), max_tokens)


def _messages(question: Question) -> list[Message]:
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    return [dict(each) if isinstance(each, Mapping) else plain_message(each) for each in question]
