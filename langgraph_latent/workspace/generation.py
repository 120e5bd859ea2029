"""One request from messages to a handle: deliver, prefill, decode and read the answer, keep.

It knows one model, who delivers to it and where caches are kept; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.engine.scheduler import RequestSlot
from langgraph_latent.events import Decoded, Prefilled
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.segment import LatentSteps, Provenance
from langgraph_latent.handle.tokens import TOKEN_BYTES, pack_tokens, unpack_tokens
from langgraph_latent.kv.state import KVState, KVTail
from langgraph_latent.prompt.answer import AnswerPart
from langgraph_latent.router.choice import RouteDecision
from langgraph_latent.router.rates import Cost
from langgraph_latent.workspace.decoding import AnswerOptions, Decoding
from langgraph_latent.workspace.request import EMPTY_ANSWER, Delivery, Request
from langgraph_latent.workspace.services import Services


class Generation:
    """A request under way. Call `read` or exhaust `decode`, once; then the attributes are final.

    Attributes:
        num_prompt_tokens: of the whole prompt, what is inherited included.
        cache_read: prompt tokens whose keys and values were reused.
        decoding: the answer, from `decode` on.
        handle: of the prompt, then of everything up to and with the last token.
        decision: how the inherited handle's edge was served.
    """

    decoding: Decoding

    def __init__(self, services: Services, model: ResidentModel, request: Request) -> None:
        self._deliverer, self._keeper, self._models = services.deliverer, services.keeper, services.models
        self._model = model
        self._call_site = request.call_site
        self._template_inputs = request.template_inputs
        self._request = request
        self._begin(self._deliverer.deliver(model, request))

    def _begin(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self.num_prompt_tokens = len(delivery.tokens) // TOKEN_BYTES
        self.cache_read = delivery.state.num_tokens
        self.decision: RouteDecision = delivery.decision
        self.handle = self._with_prompt(self._with_system_prefix(delivery.base))

    def _with_system_prefix(self, base: KVHandle) -> KVHandle:
        """The base; where that has no tokens, with the system prefix as a segment of its own."""
        messages = self._delivery.messages
        prefix = b"" if base.tokens else self._model.prompts.system_prefix(messages, self._template_inputs)
        if not prefix or not self._delivery.tokens.startswith(prefix):
            return base
        system = [message for message in messages[:1] if message["role"] == "system"]
        return self._extended(base, "system", prefix, system)

    def _with_prompt(self, base: KVHandle) -> KVHandle:
        """A handle of the whole prompt, of which the base has the first tokens and messages."""
        delivery = self._delivery
        num_known = base.num_messages - delivery.base.num_messages
        if base.tokens == delivery.tokens and num_known == len(delivery.messages):
            return base
        return self._extended(base, "prompt", delivery.tokens[len(base.tokens) :], delivery.messages[num_known:])

    def _extended(
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
            self._model.think(last, steps, tail, slot.limits)
            self.handle = self._extended(self.handle, "latent", bytes(steps * TOKEN_BYTES), [EMPTY_ANSWER], provenance)
            self._keep(self.handle, tail.seal())
        return self.handle

    def read(self) -> KVHandle:
        """Prefill the prompt; the handle of it."""
        with self._prefilled() as (tail, _, _):
            self._keep(self.handle, tail.seal())
        return self.handle

    def decode(self, options: AnswerOptions) -> Iterator[AnswerPart]:
        """Prefill the prompt and sample an answer, yielding its parts piece by piece.

        Closing the iterator, or setting the `cancelled` of its limits, ends the decoding after the current token; what
        was sampled by then is kept.
        """
        prompt = self._delivery.tokens
        seed = hashlib.sha256(self._call_site.node.encode() + b"\0" + prompt).digest()
        self.decoding = Decoding(self._model, prompt, self._template_inputs, seed, options)
        return self._decoded(self.decoding)

    def _decoded(self, decoding: Decoding) -> Iterator[AnswerPart]:
        with self._prefilled() as (tail, logits, slot):
            assert logits is not None, "an answer always follows at least one fed token"
            try:
                yield from decoding.parts(logits, tail, slot)
            finally:
                self._finish(decoding, tail.seal())

    def _finish(self, decoding: Decoding, state: KVState) -> None:
        """Complete the handle with what was sampled, and keep it with its state."""
        if decoding.sampled:
            tokens = pack_tokens(decoding.sampled)
            self.handle = self._extended(self.handle, "generated", tokens, [decoding.answer.message])
        self._keep(self.handle, state)
        self._keeper.emit(
            Decoded(
                call_site=self._call_site,
                handle=self.handle.id,
                model=self.handle.model,
                source=self._delivery.base.source,
                num_tokens=len(decoding.sampled),
                duration_s=decoding.seconds,
                finish_reason=decoding.finish_reason,
            )
        )

    @contextmanager
    def _prefilled(self, num_left: int = 0) -> Iterator[tuple[KVTail, torch.Tensor | None, RequestSlot]]:
        """The tail after the prompt but for `num_left` tokens, the logits after it (None where nothing had to be fed),
        and the slot to go on in.

        A delivered cache that fails in use is given up for re-reading the whole prompt, where the policy allows it.
        """
        delivery = self._delivery
        with self._model.scheduler.slot(self._request.caller.limits) as slot:
            try:
                tail, logits = self._feed(delivery.missing(num_left), slot)
            except (RuntimeError, MemoryError) as error:  # out of memory among them; our own errors are neither
                if not delivery.state.num_tokens or not delivery.may_fall_back:
                    raise
                self._begin(self._deliverer.deliver_as_text(self._model, self._request, delivery, error))
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
        self._models.note_prefill(self._model, num_tokens, seconds)
        moved = self.decision.actual or Cost(0, 0.0)
        total = Cost(num_tokens, seconds + (moved.seconds or 0.0), moved.move_bytes)
        self.decision = replace(self.decision, actual=total)
        self._keeper.emit(
            Prefilled.of(
                self._delivery.base,
                self._call_site,
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
        self._keeper.restore(base, tail.seal(), self._call_site)
        return tokens[begin:]

    def _keep(self, handle: KVHandle, state: KVState) -> None:
        self._keeper.keep(handle, state, self._model.spec.dtype, self._call_site)
