"""One request from messages to a handle: deliver, prefill, decode, keep.

It knows the workspace and the model; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from threading import Event as Flag
from types import TracebackType
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
        handle: of everything up to and with the last token.
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
        self.handle = self._delivery.base

    def read(self) -> KVHandle:
        """Prefill the prompt; the handle of it."""
        with _Prefill(self) as (tail, _):
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
        with _Prefill(self) as (tail, logits):
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

    def _is_stopped(self, criteria: StoppingCriteriaList | None) -> bool:
        if not criteria:
            return False
        ids = torch.tensor([[*self.prompt_ids, *self.sampled]], device=self._model.device)
        return bool(criteria(ids, None).all())

    def _keep(self, state: KVState) -> None:
        """Make the handle and hand it with its state to the workspace."""
        base, node, size = self._delivery.base, self._origin.node, self._model.spec.bytes_per_token
        new_tokens = self._delivery.tokens[len(base.tokens) :]
        handle = base.extend("prompt", node, new_tokens, self._delivery.messages, size)
        if self.sampled:
            answer = {"role": "assistant", "content": self.text}
            handle = handle.extend("generated", node, pack_tokens(self.sampled), [answer], size)
        self.handle = handle
        self._workspace.keep(handle, state, self._origin)


class _Prefill(AbstractContextManager[tuple[KVTail, "torch.Tensor | None"]]):
    """The tail behind a turn's prompt, and the logits after it (None where nothing had to be fed).

    A delivered cache that fails in use is given up for re-reading the whole prompt, where the edge's policy allows it.
    """

    def __init__(self, turn: Turn) -> None:
        self._turn = turn

    def __enter__(self) -> tuple[KVTail, torch.Tensor | None]:
        turn, delivery = self._turn, self._turn._delivery
        try:
            return self._feed(delivery.state, delivery.missing)
        except (RuntimeError, MemoryError) as error:  # out of memory among them; our own errors are neither
            if not delivery.state.num_tokens or not delivery.may_fall_back:
                raise
            turn._workspace.emit(
                FellBack(
                    origin=turn._origin,
                    handle=delivery.base.id,
                    model=delivery.base.model,
                    source=delivery.base.source,
                    from_route=Route.CACHE.value,
                    to_route=Route.TEXT.value,
                    reason=f"{type(error).__name__}: {error}",
                )
            )
            turn._workspace.give_up(delivery.state)
            turn.cache_read, turn.decision = 0, RouteDecision.failed(turn.decision, error)
        return self._feed(turn._model.empty_state(), delivery.tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._tail.close()

    def _feed(self, state: KVState, tokens: bytes) -> tuple[KVTail, torch.Tensor | None]:
        turn = self._turn
        begin = time.perf_counter()
        self._tail = state.append(len(turn.prompt_ids))
        try:
            logits = turn._model.prefill(unpack_tokens(tokens), self._tail) if tokens else None
        except BaseException:
            self._tail.close()
            raise
        cost = Cost(len(tokens) // TOKEN_BYTES, time.perf_counter() - begin)
        turn.decision = turn.decision.with_cost(actual=cost)
        turn._workspace.emit(
            Prefilled(
                origin=turn._origin,
                handle=turn._delivery.base.id,
                model=turn._delivery.base.model,
                num_tokens=cost.prefill_tokens,
                cache_read=turn.cache_read,
                duration_s=cost.seconds,
            )
        )
        return self._tail, logits
