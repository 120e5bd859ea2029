"""One request from messages to a handle: deliver, prefill, decode and read the answer, keep.

It knows the workspace and the model; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.sampling import Sampler, Sampling
from langgraph_latent.engine.scheduler import Limits, RequestSlot
from langgraph_latent.errors import RequestCancelledError
from langgraph_latent.events import Decoded, FellBack, Prefilled
from langgraph_latent.handle.handle import KVHandle, Message
from langgraph_latent.handle.provenance import LatentSteps, Provenance
from langgraph_latent.handle.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens
from langgraph_latent.kv.state import KVState, KVTail
from langgraph_latent.prompt.answer import Answer, Part
from langgraph_latent.prompt.grammar import Constraint
from langgraph_latent.prompt.prompt import Detokenizer
from langgraph_latent.router.rates import Cost
from langgraph_latent.router.router import Route, RouteDecision
from langgraph_latent.workspace.delivery import EMPTY_ANSWER, Delivery, Request
from langgraph_latent.workspace.workspace import LatentWorkspace


class Generation:
    """A request under way. Call `read` or exhaust `decode`, once; then the attributes are final.

    Attributes:
        num_prompt_tokens: of the whole prompt, what is inherited included.
        cache_read: prompt tokens whose keys and values were reused.
        sampled: sampled token ids, an end token included.
        num_reasoning_tokens: of those, the ones after which the answer was still thinking aloud.
        answer: what was sampled, as text, reasoning and tool calls, without stop strings.
        finish_reason: "stop", "tool_calls", "length", "cancelled" or "error".
        handle: of the prompt, then of everything up to and with the last token.
        decision: how the inherited handle's edge was served.
    """

    def __init__(
        self, workspace: LatentWorkspace, model: ResidentModel, request: Request, limits: Limits | None = None
    ) -> None:
        self._workspace = workspace
        self._model = model
        self._limits = limits or Limits()
        self._call_site = request.call_site
        self._template_inputs = request.template_inputs
        self._request = request
        self.sampled: list[int] = []
        self.num_reasoning_tokens = 0
        self.answer = Answer()
        self.finish_reason = ""
        self._begin(workspace.deliver(model, request))

    def _begin(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.num_prompt_tokens = len(delivery.tokens) // TOKEN_BYTES
        self.cache_read = delivery.state.num_tokens
        self.decision: RouteDecision = delivery.decision
        self.handle = self._with_prompt(self._with_head(delivery.base))

    def _with_head(self, base: KVHandle) -> KVHandle:
        """The base; where that is of no tokens, with what leads the conversation as a segment of its own."""
        messages = self._delivery.messages
        head = b"" if base.tokens else self._model.prompts.head(messages, self._template_inputs)
        if not head or not self._delivery.tokens.startswith(head):
            return base
        system = [message for message in messages[:1] if message["role"] == "system"]
        return self._with(base, "system", head, system)

    def _with_prompt(self, base: KVHandle) -> KVHandle:
        """A handle of the whole prompt, of which the base has the first tokens and messages."""
        delivery = self._delivery
        num_told = base.num_messages - delivery.base.num_messages
        if base.tokens == delivery.tokens and num_told == len(delivery.messages):
            return base
        return self._with(base, "prompt", delivery.tokens[len(base.tokens) :], delivery.messages[num_told:])

    def _with(
        self,
        base: KVHandle,
        kind: str,
        tokens: bytes,
        messages: Sequence[Message],
        provenance: Provenance | None = None,
    ) -> KVHandle:
        node, size = self._call_site.node, self._model.spec.bytes_per_token
        return base.extend(
            kind, node, tokens, messages, size, inputs_digest=self._template_inputs.digest, provenance=provenance
        )

    def think(self, steps: int) -> KVHandle:
        """Prefill the prompt, which ends where an answer begins, and take latent steps there; the handle of it all."""
        self._model.check_length(self.num_prompt_tokens + steps)
        provenance = LatentSteps(steps)
        with self._prefilled(num_left=1) as (tail, _, slot):
            (last,) = unpack_tokens(self._delivery.tokens[-TOKEN_BYTES:])
            self._model.think(last, steps, tail, slot.check)
            self.handle = self._with(self.handle, "latent", bytes(steps * TOKEN_BYTES), [EMPTY_ANSWER], provenance)
            self._workspace.keep(self.handle, tail.seal(), self._call_site)
        return self.handle

    def read(self) -> KVHandle:
        """Prefill the prompt; the handle of it."""
        with self._prefilled() as (tail, _, _):
            self._workspace.keep(self.handle, tail.seal(), self._call_site)
        return self.handle

    def decode(
        self,
        sampling: Sampling,
        *,
        constraint: Constraint | None = None,
        max_calls: int | None = None,
        processors: Sequence[LogitsProcessor] = (),
        criteria: StoppingCriteriaList | None = None,
        streamer: Any = None,
    ) -> Iterator[Part]:
        """Prefill the prompt and sample an answer, yielding its parts piece by piece.

        `processors`, `criteria` and `streamer` are transformers' own. Closing the iterator, or setting the `cancelled`
        of its limits, ends the decoding after the current token; what was sampled by then is kept. So does tool call
        number `max_calls`.
        """
        model, prompt = self._model, self._delivery.tokens
        detokenizer = Detokenizer(model.tokenizer, sampling.stop, model.answers.marks(self._template_inputs))
        seed = hashlib.sha256(self._call_site.node.encode() + b"\0" + prompt).digest()
        reader = model.answers.reader(model.prompts.decode_end(prompt), self._template_inputs, seed)
        if constraint is not None:
            processors = [*processors, model.grammars.compile(constraint, after=reader.closing)]
        sampler = Sampler(sampling, model.model.generation_config, model.device, prompt, processors)
        with self._prefilled() as (tail, logits, slot):
            assert logits is not None, "an answer always follows at least one fed token"
            tokens = _Timed(model.decode(logits, tail, sampler, sampling.max_tokens, slot))
            if streamer is not None:
                streamer.put(sampler.context.cpu())
            try:
                for token in tokens:
                    self.sampled.append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    is_end = token in model.end_tokens
                    yield from self._noted(reader.push("" if is_end else detokenizer.push(token)), max_calls)
                    self.num_reasoning_tokens += reader.is_reasoning
                    is_stopped = criteria is not None and bool(criteria(sampler.context, sampler.scores).all())
                    has_all_calls = max_calls is not None and len(self.answer.calls) >= max_calls
                    if is_end or detokenizer.stopped or is_stopped or has_all_calls:
                        self.finish_reason = "stop"
                        break
                    if self._limits.is_cancelled:
                        self.finish_reason = "cancelled"
                        break
                else:
                    self.finish_reason = "length"
                yield from self._noted([*reader.push(detokenizer.flush()), *reader.flush()], max_calls)
                if self.finish_reason == "stop" and self.answer.calls:
                    self.finish_reason = "tool_calls"
            except (GeneratorExit, RequestCancelledError):
                self.finish_reason = self.finish_reason or "cancelled"
                raise
            except BaseException:
                self.finish_reason = "error"
                raise
            finally:
                if streamer is not None:
                    streamer.end()
                self._finish(tail.seal(), tokens.seconds)

    def _noted(self, parts: Iterable[Part], max_calls: int | None) -> Iterator[Part]:
        """The parts, added to the answer, without what comes behind its last call."""
        for part in parts:
            if max_calls is None or len(self.answer.calls) < max_calls:
                self.answer.add(part)
                yield part

    def _finish(self, state: KVState, seconds: float) -> None:
        """Complete the handle with what was sampled, and give it with its state to the workspace."""
        if self.sampled:
            self.handle = self._with(self.handle, "generated", pack_tokens(self.sampled), [self.answer.message])
        self._workspace.keep(self.handle, state, self._call_site)
        self._workspace.emit(
            Decoded(
                call_site=self._call_site,
                handle=self.handle.id,
                model=self.handle.model,
                source=self._delivery.base.source,
                num_tokens=len(self.sampled),
                duration_s=seconds,
                finish_reason=self.finish_reason,
            )
        )

    @contextmanager
    def _prefilled(self, num_left: int = 0) -> Iterator[tuple[KVTail, torch.Tensor | None, RequestSlot]]:
        """The tail behind the prompt but for `num_left` tokens, the logits after it (None where nothing had to be fed),
        and the slot to go on in.

        A delivered cache that fails in use is given up for re-reading the whole prompt, where the policy allows it.
        """
        delivery = self._delivery
        with self._model.scheduler.slot(self._limits) as slot:
            try:
                tail, logits = self._feed(delivery.missing(num_left), slot)
            except (RuntimeError, MemoryError) as error:  # out of memory among them; our own errors are neither
                if not delivery.state.num_tokens or not delivery.may_fall_back:
                    raise
                self._fall_back(error)
                tail, logits = self._feed(self._delivery.missing(num_left), slot)
            with tail:
                yield tail, logits, slot

    def _feed(self, tokens: bytes, slot: RequestSlot) -> tuple[KVTail, torch.Tensor | None]:
        begin = time.perf_counter()
        tail = self._delivery.state.append(self.num_prompt_tokens)
        try:
            tokens_left = self._rebuild_base(tokens, tail, slot)
            logits = self._model.prefill(unpack_tokens(tokens_left), tail, slot) if tokens_left else None
        except BaseException:
            tail.close()
            raise
        num_tokens, seconds = len(tokens) // TOKEN_BYTES, time.perf_counter() - begin
        self._workspace.note_prefill(self._model, num_tokens, seconds)
        moved = self.decision.actual or Cost(0, 0.0)
        total = Cost(num_tokens, seconds + (moved.seconds or 0.0), moved.move_bytes)
        self.decision = replace(self.decision, actual=total)
        base = self._delivery.base
        self._workspace.emit(
            Prefilled(
                call_site=self._call_site,
                handle=base.id,
                model=base.model,
                source=base.source,
                num_tokens=num_tokens,
                cache_read=self.cache_read,
                duration_s=seconds,
            )
        )
        return tail, logits

    def _rebuild_base(self, tokens: bytes, tail: KVTail, slot: RequestSlot) -> bytes:
        """Feed and keep what is missing of the base on its own, for others that go on from it; the tokens left.

        Only where it can't be cropped out of the longer cache that this request leaves.
        """
        base = self._delivery.base
        num_missing = base.num_tokens - base.num_pending - tail.num_tokens
        begin = num_missing * TOKEN_BYTES
        if self._model.spec.capabilities.can("crop") or not 0 < begin < len(tokens):
            return tokens
        self._model.prefill(unpack_tokens(tokens[:begin]), tail, slot)
        self._workspace.restore(base, tail.seal(), self._call_site)
        return tokens[begin:]

    def _fall_back(self, error: Exception) -> None:
        base = self._delivery.base
        self._workspace.emit(
            FellBack(
                call_site=self._call_site,
                handle=base.id,
                model=base.model,
                source=base.source,
                from_route=Route.CACHE.value,
                to_route=Route.TEXT.value,
                reason=f"{type(error).__name__}: {error}",
            )
        )
        self._workspace.give_up(self._delivery.state)
        decision = self.decision.failed(error)
        self._begin(self._workspace.deliver_as_text(self._model, self._request, self._delivery))
        self.decision = decision


class _Timed:
    """An iterator that adds up the `seconds` its source took, without those of its consumer."""

    def __init__(self, source: Iterator[int]) -> None:
        self._source = source
        self.seconds = 0.0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        begin = time.perf_counter()
        try:
            return next(self._source)
        finally:
            self.seconds += time.perf_counter() - begin
