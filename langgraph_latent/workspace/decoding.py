"""From logits to an answer: sampling, text, reasoning, tool calls, and when to stop.

It knows one model and one prompt; not where caches are kept.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from transformers import StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.sampling import Sampler, Sampling
from langgraph_latent.engine.scheduler import RequestSlot
from langgraph_latent.errors import RequestCancelledError
from langgraph_latent.kv.state import KVTail
from langgraph_latent.prompt.answer import Answer, AnswerPart
from langgraph_latent.prompt.detokenizer import Detokenizer
from langgraph_latent.prompt.grammar import Constraint
from langgraph_latent.prompt.template import TemplateInputs


class AnswerOptions(NamedTuple):
    """How an answer is decoded.

    Attributes:
        sampling: how each token is chosen.
        constraint: what the answer must fit.
        max_calls: tool calls after which the answer ends; None for any number.
        processors, criteria, streamer: transformers' own.
    """

    sampling: Sampling
    constraint: Constraint | None = None
    max_calls: int | None = None
    processors: Sequence[LogitsProcessor] = ()
    criteria: StoppingCriteriaList | None = None
    streamer: Any = None


@contextmanager
def ended(streamer: Any) -> Iterator[None]:
    """A block after which a streamer has ended, once and whatever happens: somebody may iterate over it.

    `streamer` is transformers' own, or None.
    """
    try:
        yield
    finally:
        if streamer is not None:
            streamer.end()


class Decoding:
    """An answer under way. Exhaust `parts`, once; then the attributes are final.

    Attributes:
        sampled: sampled token ids, an end token included.
        num_reasoning_tokens: of those, the ones after which the answer was still reasoning.
        answer: what was sampled, as text, reasoning and tool calls, without stop strings.
        finish_reason: "stop", "tool_calls", "length", "cancelled" or "error".
        seconds: spent on model calls and sampling.
    """

    def __init__(
        self, model: ResidentModel, prompt: bytes, inputs: TemplateInputs, seed: bytes, options: AnswerOptions
    ) -> None:
        self.sampled: list[int] = []
        self.num_reasoning_tokens = 0
        self.answer = Answer()
        self.finish_reason = ""
        self.seconds = 0.0
        self._model = model
        self._options = options
        self._detokenizer = Detokenizer(model.tokenizer, options.sampling.stop, model.answers.marks(inputs))
        self._reader = model.answers.reader(model.prompts.decode_end(prompt), inputs, seed)
        constraint = []
        if options.constraint is not None:
            constraint.append(model.grammars.compile(options.constraint, after=self._reader.closing))
        defaults = model.model.generation_config
        self._sampler = Sampler(options.sampling, defaults, model.device, prompt, options.processors, constraint)

    def parts(self, logits: torch.Tensor, tail: KVTail, slot: RequestSlot) -> Iterator[AnswerPart]:
        """Sample the answer after a tail whose last token gave `logits`, (vocab,); its parts as they are certain.

        Closing the iterator, or setting the `cancelled` of the slot's limits, ends it after the current token.
        """
        streamer = self._options.streamer
        if streamer is not None:
            streamer.put(self._sampler.context.cpu())
        try:
            for token in self._tokens(logits, tail, slot):
                if streamer is not None:
                    streamer.put(torch.tensor([token]))
                yield from self._push(token)
                self.num_reasoning_tokens += self._reader.is_reasoning
                if self._has_ended(token):
                    self.finish_reason = "stop"
                    break
                if slot.limits.is_cancelled:
                    self.finish_reason = "cancelled"
                    break
            else:
                self.finish_reason = "length"
            yield from self._noted([*self._reader.push(self._detokenizer.flush()), *self._reader.flush()])
            if self.finish_reason == "stop" and self.answer.calls:
                self.finish_reason = "tool_calls"
        except (GeneratorExit, RequestCancelledError):
            self.finish_reason = self.finish_reason or "cancelled"
            raise
        except BaseException:
            self.finish_reason = "error"
            raise

    def _tokens(self, logits: torch.Tensor, tail: KVTail, slot: RequestSlot) -> Iterator[int]:
        """The sampled tokens, noted and timed without what their consumer does in between."""
        tokens = self._model.decode(logits, tail, self._sampler, self._options.sampling.max_tokens, slot)
        while True:
            begin = time.perf_counter()
            try:
                token = next(tokens)
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - begin
            self.sampled.append(token)
            yield token

    def _push(self, token: int) -> Iterator[AnswerPart]:
        text = "" if token in self._model.end_tokens else self._detokenizer.push(token)
        return self._noted(self._reader.push(text))

    def _has_ended(self, token: int) -> bool:
        criteria, max_calls = self._options.criteria, self._options.max_calls
        is_stopped = criteria is not None and bool(criteria(self._sampler.context, self._sampler.scores).all())
        has_all_calls = max_calls is not None and len(self.answer.calls) >= max_calls
        return token in self._model.end_tokens or self._detokenizer.stopped or is_stopped or has_all_calls

    def _noted(self, parts: Iterable[AnswerPart]) -> Iterator[AnswerPart]:
        """The parts, added to the answer, without what comes after its last call."""
        max_calls = self._options.max_calls
        for part in parts:
            if max_calls is None or len(self.answer.calls) < max_calls:
                self.answer.add(part)
                yield part
