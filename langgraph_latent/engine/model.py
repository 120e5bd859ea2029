"""One Hugging Face model and its tokenizer, loaded once per process, and the calls that run it.

A `ResidentModel` prefills and decodes over `KVState`s. It knows nothing of who keeps them, of messages or of graphs.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from langgraph_latent.disk_cache import DiskCache
from langgraph_latent.engine import cpu_thread
from langgraph_latent.engine.alignment import Alignment
from langgraph_latent.engine.attention import STOCK, use_packed_attention
from langgraph_latent.engine.findings import FINDINGS_FILE, VERSION, Findings, unprobed
from langgraph_latent.engine.identity import spec_of
from langgraph_latent.engine.limits import NO_LIMITS, Limits
from langgraph_latent.engine.lora import AdapterWatch
from langgraph_latent.engine.probe import Probe
from langgraph_latent.engine.sampling import Sampler, end_tokens
from langgraph_latent.engine.scheduler import ALONE_CHUNK_TOKENS, MAX_BATCH, NewTokens, RequestSlot, Scheduler
from langgraph_latent.errors import ContextLengthError, HandleError, UnsupportedLayerError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.kv.batching import ValuesReached, early_cache, packed_cache, repair_cache
from langgraph_latent.kv.layers import empty_layers, layer_kinds
from langgraph_latent.kv.rope import Rotations, frequencies, rotations_of
from langgraph_latent.kv.state import KVState, KVTail
from langgraph_latent.prompt.answer import AnswerReaders
from langgraph_latent.prompt.grammar import GrammarCompiler
from langgraph_latent.prompt.prompt import PromptWriter
from langgraph_latent.prompt.tool_calls import format_of
from langgraph_latent.spec.config import config_digest, max_positions_of, rope_of, text_config
from langgraph_latent.spec.digest import Digests
from langgraph_latent.spec.spec import ModelSpec

PROBE_WINDOW = 256
"""Sliding windows, and what is compressed at once, up to this many tokens are filled by the probe."""
SHORT = 3
"""Tokens of a run beside the probe: what is larger after the probe grows with the tokens."""


class ResidentModel:
    """A model in memory. One forward runs at a time; every method is safe in threads.

    Attributes:
        kinds: its cache layers.
        prompts: renders messages for it.
        devices: where each cache layer lives; None for one that keeps nothing.
        findings: what the probe found out about its caches.
        opaque_layers: the opaque cache layers, as they are after a few tokens; None for the others.
        answers: reads what was sampled.
        scheduler: lets concurrent requests share model calls.
        end_tokens: token ids that end an answer.
        cache_argument: the name under which the installed forward takes a cache.
        takes_mask, takes_positions: whether its forward takes an attention mask, and position ids.
        gives_positions: whether it is always given position ids.
        max_positions: the longest sequence over which a cache stays valid; 0 where the model names none.
        has_packed_attention: whether its attention may be given several sequences side by side.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        name: str,
        weights: str,
        *,
        sketch: str = "",
        probe: bool = True,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.kinds = layer_kinds(model.config)
        self._empty_layers = empty_layers(model.config)
        self.prompts = PromptWriter(tokenizer, name)
        self._lock = threading.RLock()
        _models.add(self)
        attention = str(model.config.get_text_config()._attn_implementation)
        # models that keep more than keys and values choose by the attention's name what they compute
        self.has_packed_attention = all(
            kind.name in ("full", "sliding") for kind in self.kinds
        ) and use_packed_attention(model)
        self.end_tokens = end_tokens(model.generation_config, tokenizer.eos_token_id)
        self.answers = AnswerReaders(tokenizer, self.end_tokens)
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters
        if not {self.cache_argument, "kwargs"} & parameters.keys():
            raise UnsupportedLayerError(
                f"{name!r} ({type(model).__name__}) takes no cache; use a text edge for this model"
            )
        self.takes_mask, self.takes_positions, self.gives_positions = True, "position_ids" in parameters, False
        self.max_positions = max_positions_of(text_config(model.config))
        states, self.findings = self._probed(name, weights, attention, is_wanted=probe)
        state = states[-1]
        self.devices = [next((tensor.device for tensor in tensors), None) for tensors in state.layers()]
        self.opaque_layers = state.opaque_layers
        self.scheduler = self._new_scheduler()
        self._adapters = AdapterWatch(model)
        self._specs: dict[tuple[str, ...], ModelSpec] = {
            (): spec_of(model, tokenizer, states, name, Digests(weights, sketch), attention, self.findings.capabilities)
        }

    def _new_scheduler(self) -> Scheduler:
        """It does not keep the model alive: the model holds it, and weights are freed with their last user."""
        model = weakref.ref(self)

        def call(batch: Sequence[NewTokens]) -> torch.Tensor:
            return _alive(model()).forward(batch)

        def start(work: Callable[[], None]) -> None:
            if _alive(model()).is_called_elsewhere:
                cpu_thread.submit(work)
            else:
                work()

        return Scheduler(call, MAX_BATCH if self.findings.capabilities.can("batch") else 1, start)

    @property
    def is_called_elsewhere(self) -> bool:
        """Whether a model call of this thread runs in the compute thread: on a CPU, and for the main thread, which can
        be interrupted."""
        return self.device.type == "cpu" or threading.current_thread() is threading.main_thread()

    def _probed(self, name: str, weights: str, attention: str, *, is_wanted: bool) -> tuple[list[KVState], Findings]:
        """States of a few tokens, the longest last, and what is known of the model: stored before or found out now.

        There is one state where all layers are attention, else two, which show what grows with the tokens.
        """
        ids = self._probe_ids()
        probe = Probe(self, ids, name)
        key, stored = self._findings_key(weights, attention), DiskCache(FINDINGS_FILE)
        findings = None
        with contextlib.suppress(KeyError, TypeError, ValueError):
            findings = Findings.from_dict(stored.get(key)).checked(len(self.kinds), frequencies(self.model))
        if findings is None and is_wanted:
            findings = probe.findings()
            stored.put(key, findings.to_dict())
        findings = findings or unprobed(self.kinds)
        self.takes_mask, self.gives_positions = findings.takes_mask, findings.gives_positions
        states = [probe.written()]
        if any(states[0].opaque_layers):
            with self.empty_state().append() as tail:
                self.run(ids[:SHORT], tail)
                states.insert(0, tail.seal())
        return states, findings

    def _findings_key(self, weights: str, attention: str) -> str:
        """What findings are stored under: everything that they follow from."""
        version = (VERSION, transformers.__version__, torch.__version__, self.device.type, attention)
        config = text_config(self.model.config)
        shape = (config_digest(config), rope_of(config), self.kinds, self.max_positions, self.model.dtype)
        return hashlib.sha256(repr((version, weights, shape)).encode()).hexdigest()

    def _probe_ids(self) -> list[int]:
        """Tokens for a probe, more than a small window holds or a layer compresses at once; more for opaque layers."""
        opaque_layers = [layer for layer in self.empty_state().opaque_layers if layer]
        sizes = [kind.window for kind in self.kinds] + [
            getattr(layer, "compress_rate", None) or 0 for layer in opaque_layers
        ]
        vocab_size = self.model.config.get_text_config().vocab_size
        num_tokens = max(size if size <= PROBE_WINDOW else 0 for size in sizes) + (24 if opaque_layers else 12)
        return [index % vocab_size for index in range(3, 3 + num_tokens)]

    @property
    def spec(self) -> ModelSpec:
        """The model's identity, with the LoRA adapters that are active now."""
        adapters = self._adapters.active()
        if adapters not in self._specs:
            self._specs[adapters] = replace(self._specs[()], adapters=adapters)
        return self._specs[adapters]

    @cached_property
    def rotations(self) -> Rotations:
        """Per layer, how its keys and its values carry positions; None where they carry none."""
        return rotations_of(self.findings.rotations, frequencies(self.model))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def empty_state(self) -> KVState:
        return KVState.empty(self.kinds, self._empty_layers)

    def check_length(self, num_tokens: int) -> None:
        """Raise `ContextLengthError` where a sequence of `num_tokens` is longer than the model takes."""
        if self.max_positions and num_tokens > self.max_positions:
            raise ContextLengthError(
                f"the prompt has {num_tokens} tokens, but {self.spec.name!r} takes at most {self.spec.max_positions}; "
                "shorten the messages, inherit less, or use a model with a longer context"
            )

    def check_vocabulary(self, handle: KVHandle) -> None:
        """Raise `HandleError` where a handle holds a token id that the model does not have."""
        if handle.largest_token >= self.spec.vocab_size:
            raise HandleError(
                f"handle {handle.id} holds token id {handle.largest_token}, but {self.spec.name!r} has "
                f"{self.spec.vocab_size} tokens; the handle was not made for it"
            )

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Makes constraints for answers."""
        return GrammarCompiler(self.tokenizer, self.end_tokens, format_of(*self.prompts.template.call_frame))

    def prefill(self, ids: Sequence[int], tail: KVTail, slot: RequestSlot | None = None) -> torch.Tensor:
        """Append `ids` to a tail, in chunks; the logits after the last one, shape (vocab,).

        `slot` is that of the request this belongs to; without one it is a request of its own.

        Returns when the device is done, so that its time and its errors are this call's.
        Raises `ContextLengthError` before anything is computed where the sequence would be longer than the model takes.
        """
        self.check_length(tail.num_tokens + len(ids))
        begin = 0
        with self._in(slot) as slot:
            while begin < len(ids):
                end = begin + self._chunk(tail, slot)
                logits = slot.feed(ids[begin:end], tail)
                begin = end
        logits[0].item()
        return logits

    def logits(self, ids: Sequence[int], tail: KVTail) -> torch.Tensor:
        """Append `ids` to a tail in one call, as a request of its own; the logits after each of them, (ids, vocab).

        Raises `ContextLengthError` where the sequence would be longer than the model takes.
        """
        self.check_length(tail.num_tokens + len(ids))
        if self.findings.is_stepwise and tail.num_tokens:
            return torch.stack([self.run([token], tail) for token in ids])
        everywhere = range(len(ids))
        return self._run_packed([(ids, tail)], everywhere) if tail.is_biased else self._run_one(ids, tail, everywhere)

    def _chunk(self, tail: KVTail, slot: RequestSlot) -> int:
        """How many tokens the next call may be given."""
        if not self.findings.is_stepwise:
            return slot.chunk_tokens
        return 1 if tail.num_tokens else sys.maxsize

    def decode(
        self, logits: torch.Tensor, tail: KVTail, sampler: Sampler, limit: int, slot: RequestSlot | None = None
    ) -> Iterator[int]:
        """Sample up to `limit` tokens after a tail; `logits` follow its last token. End tokens do not end it.

        The last token yielded is not in the cache: it is the pending one, fed by whoever goes on.
        """
        if self.max_positions:
            limit = min(limit, self.max_positions - tail.num_tokens)
        with self._in(slot) as slot:
            for remaining in range(limit, 0, -1):
                token = sampler.pick(logits)
                yield token
                if remaining > 1:
                    logits = slot.feed([token], tail)

    def _in(self, slot: RequestSlot | None) -> AbstractContextManager[RequestSlot]:
        return nullcontext(slot) if slot is not None else self.scheduler.slot()

    def forward(self, batch: Sequence[NewTokens]) -> torch.Tensor:
        """One model call on the new tokens of several sequences; logits after the last of each, (sequences, vocab)."""
        if len(batch) == 1 and not batch[0].tail.is_biased:
            return self.run(*batch[0])[None]
        return self.run_packed(batch)

    def stock(self, ids: Sequence[int], num_last: int = 1) -> torch.Tensor:
        """Logits after each of the last ids, (num_last, vocab), by plain transformers: its own attention, no cache."""

        def plainly() -> torch.Tensor:
            wanted = list(range(len(ids) - num_last, len(ids)))
            with self._lock:
                if self.has_packed_attention:
                    self.model.set_attn_implementation(STOCK)
                try:
                    return self._run_here(ModelCall(None, ids, wanted, {"use_cache": False}))
                finally:
                    if self.has_packed_attention:
                        use_packed_attention(self.model)

        return cpu_thread.run(plainly) if self.is_called_elsewhere else plainly()

    def run(self, ids: Sequence[int], tail: KVTail, **arguments: Any) -> torch.Tensor:
        """One model call on one sequence's new tokens; logits after the last, (vocab,). `arguments` go to its forward.

        With a mask over the whole length, as transformers itself runs one sequence.
        """
        return self._run_one(ids, tail, [len(ids) - 1], **arguments)[0]

    def _run_one(self, ids: Sequence[int], tail: KVTail, wanted: Sequence[int], **arguments: Any) -> torch.Tensor:
        """The same, with the logits at the `wanted` indices, (wanted, vocab)."""
        if self.takes_mask and "attention_mask" not in arguments:
            length = tail.num_tokens + len(ids)
            arguments["attention_mask"] = torch.ones((1, length), dtype=torch.long, device=self.device)
        if self.gives_positions and "position_ids" not in arguments:
            arguments["position_ids"] = torch.arange(tail.num_tokens, tail.num_tokens + len(ids), device=self.device)[
                None
            ]
        return self._run(ModelCall(tail.cache, ids, wanted, arguments, [(tail, len(ids))]))

    def run_packed(self, batch: Sequence[tuple[Sequence[int], KVTail]]) -> torch.Tensor:
        """One model call on a packed batch; logits after the last token of each sequence, (sequences, vocab).

        Each is at its own positions; `packed_attention` keeps them apart.
        """
        return self._run_packed(batch, [end - 1 for end in itertools.accumulate(len(ids) for ids, _ in batch)])

    def _run_packed(self, batch: Sequence[tuple[Sequence[int], KVTail]], wanted: Sequence[int]) -> torch.Tensor:
        """The same, with the logits at the `wanted` indices of all tokens, (wanted, vocab)."""
        sizes = [len(ids) for ids, _ in batch]
        positions = [at for ids, tail in batch for at in range(tail.num_tokens, tail.num_tokens + len(ids))]
        ids = [token for ids, _ in batch for token in ids]
        cache = packed_cache([tail for _, tail in batch], sizes)
        writes = [(tail, size) for size, (_, tail) in zip(sizes, batch, strict=True)]
        return self._run_at(cache, ids, positions, wanted, writes)

    def recompute(self, ids: Sequence[int], positions: Sequence[int], tail: KVTail, limits: Limits = NO_LIMITS) -> None:
        """Compute tokens of a tail again at their positions, ascending: each sees all before it.

        It costs about their share of a prefill. Only for a model that `has_packed_attention`.
        """
        for begin in range(0, len(ids), ALONE_CHUNK_TOKENS):
            new, at = ids[begin : begin + ALONE_CHUNK_TOKENS], positions[begin : begin + ALONE_CHUNK_TOKENS]
            cache = repair_cache(tail, torch.tensor(at, device=self.device))
            self._run_at(cache, new, at, [], [(tail, 0)], limits)

    def early_values(self, ids: Sequence[int], state: KVState, layer: int, limits: Limits = NO_LIMITS) -> torch.Tensor:
        """A layer's values of `ids` appended to a state, (1, kv_heads, ids, head_dim); layers above are not run."""
        found = []
        with state.append(state.num_tokens + len(ids)) as tail:
            for begin in range(0, len(ids), ALONE_CHUNK_TOKENS):
                new = ids[begin : begin + ALONE_CHUNK_TOKENS]
                found.append(self._early_values(new, state.num_tokens + begin, tail, layer, limits))
        return torch.cat(found, 2)

    def _early_values(self, ids: Sequence[int], at: int, tail: KVTail, layer: int, limits: Limits) -> torch.Tensor:
        cache = early_cache(tail, len(ids), layer)
        try:
            self._run_at(cache, ids, range(at, at + len(ids)), [], [(tail, 0)], limits)
        except ValuesReached as reached:
            return reached.values
        raise UnsupportedLayerError(f"{self.spec.name!r} does not use layer {layer} of its cache")

    def _run_at(
        self,
        cache: Any,
        ids: Sequence[int],
        positions: Sequence[int],
        wanted: Sequence[int],
        writes: Sequence[tuple[KVTail, int]],
        limits: Limits = NO_LIMITS,
        **arguments: Any,
    ) -> torch.Tensor:
        """A model call in which the cache's layers decide what attends to what; logits at the `wanted` indices."""
        arguments["position_ids"] = torch.tensor([positions], device=self.device)
        everything = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)  # 4-d: taken as it is
        return self._run(ModelCall(cache, ids, wanted, {**arguments, "attention_mask": everything}, writes, limits))

    def think(self, last: int, steps: int, tail: KVTail, limits: Limits = NO_LIMITS) -> None:
        """Feed a token and then `steps` latent ones: each the last hidden state before it, aligned, as an embedding.

        Raises what `limits.check` raises.

        Source: LatentMAS (arXiv 2511.20639). Only for a model that can "think".
        """
        hidden = self._hidden(tail, limits, input_ids=torch.tensor([[last]], device=self.device))
        for _ in range(steps):
            hidden = self._hidden(tail, limits, input_ids=None, inputs_embeds=self._alignment.embedding(hidden))

    def _hidden(self, tail: KVTail, limits: Limits, **inputs: Any) -> torch.Tensor:
        """The last hidden state after one token, (1, 1, hidden)."""
        states: list[torch.Tensor] = []
        options: dict[str, Any] = {**inputs, "output_hidden_states": True, "keep": states.append}
        limits.check()
        if tail.is_biased:
            self._run_at(packed_cache([tail], [1]), [0], [tail.num_tokens], [0], [(tail, 1)], limits, **options)
        else:
            self.run([0], tail, **options)
        return states[0]

    @cached_property
    def _alignment(self) -> Alignment:
        """From hidden states to what the embedding module gives, which may be more than its weight."""
        embeddings: Any = self.model.get_input_embeddings()
        head: Any = self.model.get_output_embeddings()
        is_tied = head is None or head.weight.data_ptr() == embeddings.weight.data_ptr()
        return Alignment(embeddings, len(embeddings.weight), None if is_tied else head.weight)

    def _run(self, call: ModelCall) -> torch.Tensor:
        if self.is_called_elsewhere:
            return cpu_thread.run(lambda: self._run_here(call), call.limits)
        return self._run_here(call)

    @torch.no_grad()
    def _run_here(self, call: ModelCall) -> torch.Tensor:
        """Logits at the wanted indices, (wanted, vocab)."""
        at = torch.tensor(call.wanted, dtype=torch.long)  # on the CPU: it indexes a tensor of any device
        arguments = {"input_ids": torch.tensor([call.ids], device=self.device), "use_cache": True, **call.arguments}
        keep = arguments.pop("keep", None)
        arguments[self.cache_argument] = call.cache
        if self._keeps_logits:
            arguments["logits_to_keep"] = at
        with contextlib.ExitStack() as claims:
            for tail, _ in call.writes:
                claims.enter_context(tail.claim)
            with self._lock:
                output = self.model(**arguments)
            for tail, num_tokens in call.writes:
                tail.fed(num_tokens)
        if keep is not None:
            keep(output.hidden_states[-1])
        logits: torch.Tensor = output.logits[0]
        return logits if self._keeps_logits else logits[at]


class ModelCall(NamedTuple):
    """One forward over the new tokens of one sequence or several.

    Attributes:
        cache: transformers' `Cache`.
        ids: the new tokens; `arguments` may replace them.
        wanted: indices of the tokens after which logits are wanted.
        arguments: further ones of the forward; "keep" is called with the last hidden states.
        writes: the tails that are written to, and by how many tokens each grows.
        limits: of whoever waits for it.
    """

    cache: Any
    ids: Sequence[int]
    wanted: Sequence[int]
    arguments: Mapping[str, Any]
    writes: Sequence[tuple[KVTail, int]] = ()
    limits: Limits = NO_LIMITS


_models: weakref.WeakSet[ResidentModel] = weakref.WeakSet()


def _unlock_all() -> None:
    """In a forked process: whoever held a lock there was a thread of its parent."""
    for model in _models:
        model._lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock_all)


def _alive(model: ResidentModel | None) -> ResidentModel:
    assert model is not None, "a request holds its model"
    return model
