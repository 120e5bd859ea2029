"""One request from messages to a handle: deliver, prefill, decode, keep.

It knows the workspace and the model; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event as Flag
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.logits_process import LogitsProcessor

from langgraph_latent.events import Decoded, FellBack, Prefilled
from langgraph_latent.handle import TOKEN_BYTES, KVHandle, pack_tokens, unpack_tokens
from langgraph_latent.kv.state import KVState, KVTail
from langgraph_latent.models.prompt import Detokenizer
from langgraph_latent.models.resident import ResidentModel
from langgraph_latent.models.sampling import Sampler, Sampling
from langgraph_latent.router import Cost, Route, RouteDecision
from langgraph_latent.workspace import LatentWorkspace, Request


class Turn:
    """A request under way. Call `read` or exhaust `decode`, once; then the attributes are final.

    Attributes:
        prompt_ids: the whole prompt, inherited tokens included.
        sampled: sampled token ids, an end token included.
        text: what was sampled, as text, without stop strings.
        finish_reason: "stop", "length" or "cancelled".
        cache_read: prompt tokens whose keys and values were reused.
        handle: of the prompt, then of everything up to and with the last token.
        decision: how the inherited handle's edge was served.
    """

    def __init__(self, workspace: LatentWorkspace, model: ResidentModel, request: Request) -> None:
        self._workspace = workspace
        self._model = model
        self._origin = request.origin
        self._delivery = workspace.deliver(model, request)
        self.prompt_ids = unpack_tokens(self._delivery.tokens)
        self.cache_read = self._delivery.state.num_tokens
        self.decision: RouteDecision = self._delivery.decision
        self.sampled: list[int] = []
        self.text = ""
        self.finish_reason = ""
        base, node = self._delivery.base, request.origin.node
        new_tokens = self._delivery.tokens[len(base.tokens) :]
        self.handle = base.extend("prompt", node, new_tokens, self._delivery.messages, model.spec.bytes_per_token)

    def read(self) -> KVHandle:
        """Prefill the prompt; the handle of it."""
        with self._prefilled() as (tail, _):
            self._keep(tail.seal())
        return self.handle

    def decode(
        self,
        sampling: Sampling,
        *,
        processors: Sequence[LogitsProcessor] = (),
        criteria: StoppingCriteriaList | None = None,
        streamer: Any = None,
        cancelled: Flag | None = None,
    ) -> Iterator[str]:
        """Prefill the prompt and sample an answer, yielding its text piece by piece.

        `processors`, `criteria` and `streamer` are transformers' own. Setting `cancelled`, or closing the iterator,
        ends the decoding after the current token; what was sampled by then is kept.
        """
        detokenizer = Detokenizer(self._model.tokenizer, sampling.stop)
        sampler = Sampler(sampling, self._model.model.generation_config, self._model.device, processors)
        with self._prefilled() as (tail, logits):
            assert logits is not None, "an answer always follows at least one fed token"
            tokens = self._model.decode(self.prompt_ids, logits, tail, sampler, sampling.max_tokens)
            self.finish_reason, seconds = "cancelled", 0.0
            begin = time.perf_counter()
            try:
                for token in tokens:
                    seconds += time.perf_counter() - begin
                    self.sampled.append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    is_end = token in self._model.end_tokens
                    piece = detokenizer.flush() if is_end else detokenizer.push(token)
                    if piece:
                        yield piece
                    if is_end or detokenizer.stopped or self._is_stopped(criteria):
                        self.finish_reason = "stop"
                        break
                    if cancelled is not None and cancelled.is_set():
                        break
                    begin = time.perf_counter()
                else:
                    self.finish_reason = "length"
                if rest := detokenizer.flush():
                    yield rest
            finally:
                if streamer is not None:
                    streamer.end()
                self.text = detokenizer.text
                self._keep(tail.seal())
                self._workspace.emit(
                    Decoded(
                        origin=self._origin,
                        handle=self.handle.id,
                        model=self.handle.model,
                        num_tokens=len(self.sampled),
                        duration_s=seconds,
                        finish_reason=self.finish_reason,
                    )
                )

    @contextmanager
    def _prefilled(self) -> Iterator[tuple[KVTail, torch.Tensor | None]]:
        """The tail behind the prompt, and the logits after it (None where nothing had to be fed).

        A delivered cache that fails in use is given up for re-reading the whole prompt, where the policy allows it.
        """
        delivery = self._delivery
        try:
            tail, logits = self._feed(delivery.state, delivery.missing)
        except (RuntimeError, MemoryError) as error:  # out of memory among them; our own errors are neither
            if not delivery.state.num_tokens or not delivery.may_fall_back:
                raise
            self._fall_back(error)
            tail, logits = self._feed(self._model.empty_state(), delivery.tokens)
        with tail:
            yield tail, logits

    def _feed(self, state: KVState, tokens: bytes) -> tuple[KVTail, torch.Tensor | None]:
        begin = time.perf_counter()
        tail = state.append(len(self.prompt_ids))
        try:
            logits = self._model.prefill(unpack_tokens(tokens), tail) if tokens else None
        except BaseException:
            tail.close()
            raise
        cost = Cost(len(tokens) // TOKEN_BYTES, time.perf_counter() - begin)
        self.decision = self.decision.with_cost(actual=cost)
        base = self._delivery.base
        self._workspace.emit(
            Prefilled(
                origin=self._origin,
                handle=base.id,
                model=base.model,
                source=base.source,
                num_tokens=cost.prefill_tokens,
                cache_read=self.cache_read,
                duration_s=cost.seconds,
            )
        )
        return tail, logits

    def _fall_back(self, error: Exception) -> None:
        base = self._delivery.base
        self._workspace.emit(
            FellBack(
                origin=self._origin,
                handle=base.id,
                model=base.model,
                source=base.source,
                from_route=Route.CACHE.value,
                to_route=Route.TEXT.value,
                reason=f"{type(error).__name__}: {error}",
            )
        )
        self._workspace.give_up(self._delivery.state)
        self.cache_read, self.decision = 0, RouteDecision.failed(self.decision, error)

    def _is_stopped(self, criteria: StoppingCriteriaList | None) -> bool:
        if not criteria:
            return False
        ids = torch.tensor([[*self.prompt_ids, *self.sampled]], device=self._model.device)
        return bool(criteria(ids, None).all())

    def _keep(self, state: KVState) -> None:
        """Complete the handle and give it with its state to the workspace."""
        if self.sampled:
            answer = {"role": "assistant", "content": self.text}
            size = self._model.spec.bytes_per_token
            tokens = pack_tokens(self.sampled)
            self.handle = self.handle.extend("generated", self._origin.node, tokens, [answer], size)
        self._workspace.keep(self.handle, state, self._origin)
