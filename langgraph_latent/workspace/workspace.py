"""`LatentWorkspace`: the one owner of models in use, cache pool, router and tracer; it delivers handles to receivers.

It knows handles, models and tensors; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from langgraph_latent.engine import loader
from langgraph_latent.engine.loader import ModelKey
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import (
    CacheBudgetError,
    ClosedError,
    CodecError,
    ConfigError,
    HandleError,
    ModelMismatchError,
    PromptError,
    RouteError,
    TenantError,
    UnknownHandleError,
    UnsupportedLayerError,
)
from langgraph_latent.events import (
    CallSite,
    Composed,
    Delivered,
    Diverged,
    Event,
    Evicted,
    Exported,
    FellBack,
    Ingested,
    Loaded,
    Moved,
    Produced,
    Rebuilt,
    Refused,
    Reworded,
    Routed,
)
from langgraph_latent.handle.compose import merge, repaired, without_contained
from langgraph_latent.handle.handle import KVHandle, handles_in
from langgraph_latent.handle.provenance import Composition, LatentSteps
from langgraph_latent.handle.tokens import TOKEN_BYTES, unpack_tokens
from langgraph_latent.kv import codec
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.budget import default_budget, parse_bytes
from langgraph_latent.pool.handle_book import HandleBook
from langgraph_latent.pool.policies import EvictionPolicy
from langgraph_latent.pool.pool import CachePool, Namespace, PoolInfo
from langgraph_latent.prompt.prompt import Prompt
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.parity import parity_refusal
from langgraph_latent.router.rates import Cost, RateMeter, Rates
from langgraph_latent.router.router import (
    EdgePolicy,
    EdgeRouter,
    Explanation,
    Facts,
    Route,
    RouteDecision,
    Situation,
    by_identity,
    choose,
    facts_of,
)
from langgraph_latent.spec.compat import Compatibility, Level, compare
from langgraph_latent.spec.spec import ModelSpec
from langgraph_latent.tracer import LatentTracer
from langgraph_latent.workspace.composer import Made, biases_of, compose, think
from langgraph_latent.workspace.delivery import Delivery, Plan, Request, joined_transcript, transcript, unrouted

_default: LatentWorkspace | None = None
_default_lock = threading.Lock()
_scopes: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar(
    "latent_scopes", default=MappingProxyType({})
)
_scope_ids = itertools.count(1)
_E = TypeVar("_E", bound=Event)


class WorkspaceInfo(NamedTuple):
    """Sizes of a workspace."""

    pool: PoolInfo
    num_models: int
    num_handles: int


class LatentWorkspace:
    """Keeps KV caches for the chat models that share it.

    Args:
        memory: budget for caches, in bytes or as "4GiB"; a quarter of the machine's or accelerator's memory by default.
        router: policies per edge; by default level 0 and text are allowed everywhere.
        tracer: where events go; by default they are kept in memory.
        tenant: reuse never crosses tenants, and a handle of another tenant is refused.
        eviction: which caches go first when the budget is full; least recently used by default.

    Use it as a context manager, or call `close()`, to free caches and give models back. Safe in threads.
    """

    def __init__(
        self,
        *,
        memory: int | str | None = None,
        router: EdgeRouter | None = None,
        tracer: LatentTracer | None = None,
        tenant: str | None = None,
        eviction: EvictionPolicy | None = None,
    ) -> None:
        self.pool = CachePool(default_budget() if memory is None else parse_bytes(memory), eviction)
        self.router = router or EdgeRouter()
        self.tracer = tracer or LatentTracer()
        self.tenant = tenant or ""
        self._models: dict[ModelKey, ResidentModel] = {}
        self._model_users: Counter[ModelKey] = Counter()
        self._specs: dict[str, ModelSpec] = {}
        self._compared: dict[tuple[str, str], Compatibility] = {}
        self._twins: set[str] = set()  # weights that were loaded here more than once, maybe on several devices
        self._meters: weakref.WeakKeyDictionary[ResidentModel, RateMeter] = weakref.WeakKeyDictionary()
        self._handles = HandleBook()
        self._lock = threading.RLock()
        self._making: dict[tuple[str, bytes], threading.RLock] = {}
        self._closed = False
        self.router.attach(self)

    @classmethod
    def default(cls) -> LatentWorkspace:
        """The process's own workspace, made on first use and again after it was closed."""
        global _default
        with _default_lock:
            if _default is None or _default._closed:
                _default = cls()
            return _default

    # -- models ---------------------------------------------------------------------------------------------------

    def use_model(self, key: ModelKey, *, probe: bool = True) -> None:
        """Note one more user of a model and make it resident, probed where asked. Raises `ModelLoadError`."""
        with self._lock:
            self._check_open()
            if key not in self._models:
                self._load(key, probe=probe)
            self._model_users[key] += 1

    def _load(self, key: ModelKey, *, probe: bool) -> None:
        begin = time.perf_counter()
        model = loader.acquire(key, probe=probe)
        self._models[key] = model
        if any(spec.weights == model.spec.weights for spec in self._specs.values()):
            self._twins.add(model.spec.weights)
        self._specs.setdefault(model.spec.identity, model.spec)
        self._meters.setdefault(model, RateMeter())
        self.emit(
            Loaded(
                model=model.spec.identity,
                name=model.spec.name,
                duration_s=time.perf_counter() - begin,
                device=str(model.device),
                dtype=model.spec.dtype,
            )
        )

    def model(self, key: ModelKey) -> ResidentModel:
        """A model that `use_model` made resident. Raises `ClosedError` when the workspace was closed since."""
        if (model := self._models.get(key)) is None:
            raise ClosedError("this workspace was closed; make a new LatentWorkspace()")
        return model

    def leave_model(self, key: ModelKey) -> None:
        """Undo one `use_model`; the last user frees the weights, unless another workspace uses them."""
        with self._lock:
            if key not in self._models:
                return
            self._model_users[key] -= 1
            if not self._model_users[key]:
                del self._model_users[key], self._models[key]
                loader.release(key)

    def rates(self, model: ResidentModel) -> Rates:
        """What was measured of a model in this workspace."""
        meter = self._meters.get(model)
        return meter.rates if meter else Rates()

    def note_prefill(self, model: ResidentModel, num_tokens: int, seconds: float) -> None:
        """Take note of how long a prefill took."""
        if meter := self._meters.get(model):
            meter.add_prefill(num_tokens, seconds)

    # -- handles --------------------------------------------------------------------------------------------------

    def handle(self, reply: Any) -> KVHandle:
        """The handle of everything up to and with a reply (an AIMessage of a `ChatLatent` of this workspace, or an id).

        Raises `UnknownHandleError` for one that this workspace does not remember.
        """
        known = reply if isinstance(reply, str) else getattr(reply, "response_metadata", {}).get("kv_handle")
        if not isinstance(known, str):
            raise UnknownHandleError(
                f"this {type(reply).__name__} is no reply of a ChatLatent: it has no kv_handle. "
                "Pass the messages instead, or carry the KVHandle itself (a LatentChannel does)."
            )
        if handle := self._handles.find(known):
            return handle
        raise UnknownHandleError(
            f"this workspace does not know handle {known!r}: it belongs to another process or workspace, or was "
            "forgotten. Pass the messages instead, or carry the KVHandle itself (a LatentChannel does)."
        )

    def check(self, handle: KVHandle) -> None:
        """Raise `HandleError` for what is no sound handle, `TenantError` for another tenant's."""
        try:
            if not isinstance(handle, KVHandle):
                raise HandleError(
                    f"inherit= takes KVHandle values and replies, not {type(handle).__name__}; see KVHandle.from_dict()"
                )
            if handle.tenant != self.tenant:
                raise TenantError(f"handle {handle.id} belongs to another tenant; it can't be used in this workspace")
            handle.verify()
        except HandleError as error:
            self.emit(Refused(handle=str(getattr(handle, "id", "")), reason=str(error)))
            raise

    def deliver(self, receiver: ResidentModel, request: Request) -> Delivery:
        """Bring what is inherited to a receiver, behind one routing decision per edge.

        Raises `HandleError`, `RouteError`, `PromptError` or `CacheBudgetError`; nothing is computed or changed by then.
        """
        self._check_open()
        for handle in request.handles:
            self.check(handle)
        plan = self._planned(receiver, request)
        begin = time.perf_counter()
        try:
            state, moved = self._brought(receiver, request, plan)
        except (RuntimeError, MemoryError) as error:  # the receiver's device has no room for it
            if not plan.may_fall_back:
                raise
            self._report_failure(request, plan.lead, error)
            plan, state, moved = self._failed(receiver, request, plan, error), receiver.empty_state(), None
        if plan.lead.tokens:
            self._report_delivery(request, plan.lead, state, plan.prompt, time.perf_counter() - begin)
        if plan.prompt.num_inherited < plan.lead.num_tokens:
            plan = plan.diverged(state.num_tokens, receiver.spec.capabilities.refusal("crop"))
        decision = max(plan.edges, key=lambda edge: edge.level) if plan.edges else unrouted(state.num_tokens)
        num_missing = plan.num_tokens - state.num_tokens
        estimated = self.rates(receiver).cost(num_missing, moved.move_bytes if moved else 0)
        return Delivery(
            plan.prompt.tokens,
            state,
            base=plan.lead,
            messages=plan.told[plan.lead.num_messages :],
            decision=replace(decision, estimated=estimated, actual=moved),
            may_fall_back=plan.may_fall_back,
        )

    def _planned(self, receiver: ResidentModel, request: Request) -> Plan:
        """How each edge is served, and the prompt behind what comes as a cache."""
        spec, node = self._known_spec(receiver), request.call_site.node
        handles = self._joined(without_contained(request.handles), spec, node)
        policies = tuple(self.router.policy_for(handle, node) for handle in handles)
        edges = [
            self._route(handle, receiver, spec, policy, request, first=not index, last=index == len(handles) - 1)
            for index, (handle, policy) in enumerate(zip(handles, policies, strict=True))
        ]
        root = KVHandle.root(spec.identity, self.tenant)
        is_cache = bool(edges) and edges[0].route is Route.CACHE
        lead = handles[0] if is_cache else root
        receiver.check_vocabulary(lead)
        inherited = joined_transcript([handle.messages if handle is lead else transcript(handle) for handle in handles])
        plan = self._with_prompt(receiver, request, Plan(edges, policies, lead, (*inherited, *request.messages), root))
        if not lead.provenance_digest or plan.prompt.num_inherited == lead.num_tokens:
            return plan
        # what was composed can't be a part of what is plain
        if not policies[0].may_read:
            raise RouteError(
                f"the template tells handle {lead.id} otherwise, and the edge's policy lets nobody read anew"
            )
        num_kept, num_inherited = plan.prompt.num_inherited, lead.num_tokens
        self._emit(Diverged, request, lead, num_tokens=num_kept, num_inherited=num_inherited)
        return self._told_anew(receiver, request, plan)._replace(edges=plan.diverged(0).edges)

    def _with_prompt(self, receiver: ResidentModel, request: Request, plan: Plan) -> Plan:
        """A plan with its prompt written, which is told and checked here."""
        told, template_inputs = plan.told, request.template_inputs
        prompt = receiver.prompts.extend(
            plan.lead, told[plan.lead.num_messages :], template_inputs, reply=request.reply
        )
        if changes := receiver.prompts.template.adapt(told, template_inputs.tools).changes:
            self.emit(Reworded(call_site=request.call_site, model=plan.root.model, changes=changes))
        plan = plan._replace(prompt=prompt)
        receiver.check_length(plan.num_tokens + request.num_fed)
        self.pool.check_fits(capacity_for(plan.num_tokens) * receiver.spec.bytes_per_token)
        return plan

    def _brought(self, receiver: ResidentModel, request: Request, plan: Plan) -> tuple[KVState, Cost | None]:
        """The state that a plan's prompt goes on from, and what moving it to the receiver took."""
        may_reuse = request.reuse and not any(policy.route is Route.TEXT for policy in plan.policies)
        if not (may_reuse or plan.lead.provenance_digest) or not receiver.spec.capabilities.can("append"):
            return receiver.empty_state(), None
        found, moved = self._bring(receiver, plan, plan.num_tokens - request.num_fed, request.call_site)
        return found or receiver.empty_state(), moved

    def _failed(self, receiver: ResidentModel, request: Request, plan: Plan, error: Exception) -> Plan:
        """The plan to re-read everything after a cache failed; what was composed is told anew."""
        edges = [edge.failed(error) for edge in plan.edges[:1]] + plan.edges[1:]
        if not plan.lead.provenance_digest:
            return plan._replace(edges=edges, lead=plan.root)
        return self._told_anew(receiver, request, plan)._replace(edges=edges)

    def _told_anew(self, receiver: ResidentModel, request: Request, plan: Plan) -> Plan:
        """The plan with all that its lead says told as text."""
        told = (*transcript(plan.lead), *plan.told[plan.lead.num_messages :])
        return self._with_prompt(receiver, request, plan._replace(lead=plan.root, told=told))

    def deliver_as_text(self, receiver: ResidentModel, request: Request, delivery: Delivery) -> Delivery:
        """What a receiver starts from after a delivered cache failed in use: everything is re-read."""
        if not delivery.base.provenance_digest:
            return delivery._replace(state=receiver.empty_state())
        told = (*transcript(delivery.base), *delivery.messages)
        return self.deliver(receiver, request._replace(messages=told, handles=(), reuse=False))

    def _joined(self, handles: list[KVHandle], spec: ModelSpec, node: str) -> list[KVHandle]:
        """Several handles as one, repaired, where every edge's policy allows level 1 and the model can; else as is."""
        policies = [self.router.policy_for(handle, node) for handle in handles]
        is_allowed = all(Level.MOVED in policy.levels and policy.route is not Route.TEXT for policy in policies)
        is_own = all(handle.model == spec.identity for handle in handles)
        if not (handles and is_allowed and is_own and spec.capabilities.can("move")):
            return handles
        repair = policies[0].repair if spec.capabilities.can("batch") else None
        try:
            return [repaired(merge(handles), repair)]
        except (ConfigError, HandleError):  # too many blocks, or blocks of blocks too often
            return handles

    def explain(
        self,
        handle: KVHandle,
        receiver: Any,
        *,
        node: str = "",
        first: bool = True,
        template_inputs: TemplateInputs | None = None,
    ) -> Explanation:
        """How the edge from a handle to a receiver (a `ChatLatent` or a `ModelSpec`) in a node would be decided now.

        `template_inputs` is what the template is told beside the messages; None for what it was told when the handle was made.
        Nothing is computed, moved or emitted. Raises `HandleError` where the handle is refused.
        """
        return self.router.explain_situation(
            handle, self.situation(handle, receiver, first=first, template_inputs=template_inputs), node
        )

    def situation(
        self, handle: KVHandle, receiver: Any, *, first: bool = True, template_inputs: TemplateInputs | None = None
    ) -> Situation:
        """What an edge would be decided from now; arguments as for `explain`."""
        if isinstance(other := getattr(receiver, "workspace", None), LatentWorkspace) and other is not self:
            return other.situation(handle, receiver, first=first, template_inputs=template_inputs)
        self.check(handle)
        if isinstance(receiver, ModelSpec):
            alike = (model for model in self._models.values() if model.spec.identity == receiver.identity)
            return self._situation(handle, receiver, next(alike, None), first, template_inputs)
        if not callable(getattr(receiver, "resident", None)):
            raise ConfigError(f"a receiver is a ChatLatent or a ModelSpec, not {type(receiver).__name__}")
        model: ResidentModel = receiver.resident()
        return self._situation(handle, self._known_spec(model), model, first, template_inputs)

    def keep(self, handle: KVHandle, state: KVState, call_site: CallSite) -> None:
        """Remember a handle and put its state into the pool."""
        self._handles.remember(handle)
        self.emit(
            Produced(
                call_site=call_site,
                handle=handle.id,
                model=handle.model,
                source=handle.source,
                num_tokens=handle.num_tokens,
                nbytes=handle.nbytes,
                shape=state.shape,
                num_layers=len(state.kinds),
                dtype=self._specs[handle.model].dtype,
                checksum=state.checksum() if self.tracer.checksums else "",
            )
        )
        self.restore(handle, state, call_site)

    def restore(self, handle: KVHandle, state: KVState, call_site: CallSite) -> None:
        """Put the state of a handle, but for its pending token, into the pool."""
        tokens = handle.tokens[: state.num_tokens * TOKEN_BYTES]
        owner = _scopes.get().get(id(self)) or (_thread_owner(call_site.thread_id) if call_site.thread_id else "")
        try:
            namespace = Namespace(handle.model, self.tenant, handle.provenance_digest)
            lost = self.pool.put(namespace, tokens, state, handle.id, owner)
        except CacheBudgetError:  # it grew past the budget while it was decoded: the answer stands
            lost = [handle.id, *self.pool.drop_storage(state)]
        self._report_lost(lost, "closed" if self._closed else "budget")

    def evict(self, handle: KVHandle) -> None:
        """Let a handle's tensors go; the handle still works, its cache is rebuilt when needed."""
        self._report_lost(self.pool.drop(handle.id), "asked")

    def give_up(self, state: KVState) -> None:
        """Drop a cache that failed in use, and all that shares its storage."""
        self._report_lost(self.pool.drop_storage(state), "failed in use")

    def pin(self, handle: KVHandle, ttl_s: float | None = None) -> bool:
        """Keep a handle's tensors in memory until `unpin`, or for `ttl_s` seconds; False when they are gone already."""
        return self.pool.pin(handle.id, ttl_s)

    def unpin(self, handle: KVHandle) -> None:
        """Let a handle's tensors be evicted again."""
        self._report_lost(self.pool.unpin(handle.id), "budget")

    def release(self, thread_id: str) -> None:
        """Drop the tensors that only this LangGraph thread made and nobody pinned; call it with `delete_thread`."""
        self._report_lost(self.pool.release(_thread_owner(thread_id)), "released")

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A block at whose end the tensors made inside are dropped (unless pinned, or made outside too).

        Handles stay good. `with ws.scope(): graph.invoke(...)` leaves no cache behind.
        """
        name = f"scope:{next(_scope_ids)}"
        token = _scopes.set({**_scopes.get(), id(self): name})
        try:
            yield
        finally:
            _scopes.reset(token)
            self._report_lost(self.pool.release(name), "scope ended")

    # -- files ----------------------------------------------------------------------------------------------------

    def state_of(self, handle: KVHandle, receiver: ResidentModel) -> KVState:
        """A handle's tensors, the pending token's included, from the pool or rebuilt from its provenance.

        Raises `ModelMismatchError` for a handle of another model, and `HandleError`.
        """
        self._check_for(handle, receiver)
        return self._state(handle, handle.num_tokens, receiver, CallSite())

    def whole_state_of(self, handle: KVHandle, receiver: ResidentModel) -> KVState:
        """The same with every token in every layer, also those that a window has left behind in an ingested cache."""
        self._check_for(handle, receiver)
        return self._whole(handle, receiver, CallSite())

    def _check_for(self, handle: KVHandle, receiver: ResidentModel) -> None:
        """Raise `HandleError` where a handle is not sound, or not of the receiver's model."""
        self.check(handle)
        if handle.model != receiver.spec.identity:
            raise ModelMismatchError(
                f"handle {handle.id} belongs to model {handle.model}, not to {receiver.spec.name!r} "
                f"({receiver.spec.identity}); pass it to a chat model of the same weights"
            )
        receiver.check_vocabulary(handle)
        if not handle.tokens:
            raise HandleError("a handle of no tokens has no cache; read something first")

    def _state(self, handle: KVHandle, num_tokens: int, receiver: ResidentModel, call_site: CallSite) -> KVState:
        """The state of a handle's first `num_tokens` tokens where the receiver is, what is missing computed."""
        state = self._kept_or_made(handle, handle.tokens, num_tokens, receiver, call_site) or receiver.empty_state()
        state, _ = self._move(state, receiver, call_site)
        if missing := unpack_tokens(handle.tokens[state.num_tokens * TOKEN_BYTES : num_tokens * TOKEN_BYTES]):
            if len(missing) > handle.num_pending:
                self.emit(
                    Rebuilt(handle=handle.id, model=handle.model, num_tokens=len(missing), reason="not in the pool")
                )
            with state.append(num_tokens) as tail:
                receiver.prefill(missing, tail)
                state = tail.seal()
        return state

    def _kept_or_made(
        self, handle: KVHandle, tokens: bytes, limit: int, receiver: ResidentModel, call_site: CallSite
    ) -> KVState | None:
        """The state that covers most of packed `tokens`, which continue a handle; what is composed in it is made."""
        num_composed = min(handle.num_composed, limit)
        found = self._find(handle, tokens, limit)
        if (found and found.num_tokens >= num_composed) or not num_composed:
            return found
        key = (handle.provenance_digest, handle.tokens[: handle.num_composed * TOKEN_BYTES])
        with self._lock:
            making = self._making.setdefault(key, threading.RLock())
        with making:  # branches that need the same cache make it once
            found = self._find(handle, tokens, limit)
            if found and found.num_tokens >= num_composed:
                return found
            made = self._make(handle, receiver, call_site)
            self._making.pop(key, None)
        return made.crop(limit) if limit < made.num_tokens else made

    def _make(self, handle: KVHandle, receiver: ResidentModel, call_site: CallSite) -> KVState:
        """The state up to the last of a handle's segments that has a provenance, kept for others."""
        if refusal := facts_of(handle, receiver.spec).move_refusal:
            raise UnsupportedLayerError(f"the caches of {receiver.spec.name!r} can't be composed: {refusal}; read anew")
        receiver.check_length(handle.num_composed)
        begin = time.perf_counter()
        number = max(index for index, segment in enumerate(handle.segments) if segment.provenance)
        before, made_handle = handle.first(number), handle.first(number + 1)
        made = self._add(made_handle, before, receiver, call_site)
        state = made.state.with_biases(biases_of(made_handle, receiver))
        segment = made_handle.segments[-1]
        self.emit(
            Composed(
                call_site=call_site,
                handle=made_handle.id,
                model=handle.model,
                source=segment.source,
                num_tokens=segment.num_tokens,
                nbytes=state.nbytes,
                duration_s=time.perf_counter() - begin,
                kind=segment.kind,
                num_repaired=made.num_repaired,
            )
        )
        self.restore(made_handle, state, call_site)
        return state

    def _add(self, handle: KVHandle, before: KVHandle, receiver: ResidentModel, call_site: CallSite) -> Made:
        """What the last segment of a handle adds by its recipe to the state of what is before it."""
        segment = handle.segments[-1]
        if isinstance(segment.provenance, LatentSteps):
            if not before.tokens:
                raise HandleError(f"handle {handle.id} has latent steps behind nothing; read something first")
            start = self._state(before, before.num_tokens - 1, receiver, call_site)
            return think(segment.provenance, unpack_tokens(before.tokens)[-1], start, receiver)
        assert isinstance(segment.provenance, Composition)
        start = self._state(before, before.num_tokens, receiver, call_site)
        ids = unpack_tokens(handle.tokens[before.num_tokens * TOKEN_BYTES :])
        opaque_layers = {
            handle.id: self._whole(handle, receiver, call_site) for handle in handles_in(segment.provenance)
        }
        return compose(segment.provenance, ids, start, receiver, opaque_layers)

    def _whole(self, handle: KVHandle, receiver: ResidentModel, call_site: CallSite) -> KVState:
        """The state of a handle with every token in every layer, as moving needs it: one that was ingested may lack
        those that its windows have left, and is computed again."""
        state = self._state(handle, handle.num_tokens, receiver, call_site)
        if state.has_tokens_from(0):
            return state
        made = self._make(handle, receiver, call_site) if handle.num_composed else receiver.empty_state()
        missing = unpack_tokens(handle.tokens[made.num_tokens * TOKEN_BYTES :])
        self.emit(Rebuilt(handle=handle.id, model=handle.model, num_tokens=len(missing), reason="past its windows"))
        if not missing:
            return made
        with made.append(handle.num_tokens) as tail:
            receiver.prefill(missing, tail)
            return tail.seal()

    def export(self, handle: KVHandle, receiver: ResidentModel, path: str | Path | None) -> bytes | None:
        """Write a handle with its tensors to one file (mode 0600, whole or not at all), or return the bytes."""
        begin = time.perf_counter()
        blob = codec.encode(handle, self.state_of(handle, receiver), receiver.spec)
        if path is not None:
            codec.write_file(Path(path), blob)
        self.emit(
            Exported(
                handle=handle.id,
                model=handle.model,
                source=handle.source,
                num_tokens=handle.num_tokens,
                nbytes=len(blob),
                duration_s=time.perf_counter() - begin,
                file=str(path or ""),
            )
        )
        return blob if path is None else None

    def ingest(self, source: str | Path | bytes, receiver: ResidentModel, call_site: CallSite) -> KVHandle:
        """Verify an exported cache, then keep it. Raises `CodecError` or `TenantError`; then nothing of it was used."""
        begin = time.perf_counter()
        is_file = isinstance(source, str | Path)
        try:
            blob = codec.read_file(Path(source), receiver.spec) if isinstance(source, str | Path) else bytearray(source)
            handle, state = codec.decode(blob, receiver.spec, receiver.opaque_layers)
        except CodecError as error:
            self.emit(Refused(call_site=call_site, reason=str(error)))
            raise
        self.check(handle)
        receiver.check_vocabulary(handle)
        self._known_spec(receiver)
        state, _ = self._move(state.with_biases(biases_of(handle, receiver)), receiver, call_site)
        self.keep(handle, state, call_site)
        self.emit(
            Ingested(
                call_site=call_site,
                handle=handle.id,
                model=handle.model,
                source=handle.source,
                num_tokens=handle.num_tokens,
                nbytes=len(blob),
                duration_s=time.perf_counter() - begin,
                file=str(source) if is_file else "",
            )
        )
        return handle

    # -- the whole ------------------------------------------------------------------------------------------------

    def emit(self, event: Event) -> None:
        self.tracer.emit(event)

    def size_info(self) -> WorkspaceInfo:
        """Sizes of pool, models and remembered recipes."""
        return WorkspaceInfo(self.pool.size_info(), len(self._models), len(self._handles))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where the pool's books do not add up."""
        self.pool.check_integrity()

    def close(self) -> None:
        """Free every cache and give every model back. Later use raises `ClosedError`; closing twice is fine."""
        with self._lock:
            self._closed = True
            self._report_lost(self.pool.close(), "closed")
            self._handles.clear()
            for key in self._models:
                loader.release(key)
            self._models.clear()
            self._model_users.clear()

    def __enter__(self) -> LatentWorkspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this workspace was closed; make a new LatentWorkspace()")

    def _known_spec(self, receiver: ResidentModel) -> ModelSpec:
        """A model's spec with the adapters that are active now, kept under its identity."""
        spec = receiver.spec
        self._specs.setdefault(spec.identity, spec)
        return spec

    def _route(
        self,
        handle: KVHandle,
        receiver: ResidentModel,
        spec: ModelSpec,
        policy: EdgePolicy,
        request: Request,
        *,
        first: bool,
        last: bool,
    ) -> RouteDecision:
        situation = self._situation(handle, spec, receiver, first, request.template_inputs)
        if handle.provenance_digest and not last:
            refusal = (
                situation.facts.move_refusal or "other handles come behind it, and their edges forbid to join them"
            )
            situation = situation._replace(facts=situation.facts._replace(move_refusal=refusal))
        compatibility = situation.compatibility
        decision = choose(compatibility, policy, situation.facts)
        self._emit(
            Routed,
            request,
            handle,
            route=decision.route.value,
            level=int(decision.level),
            code=decision.code,
            reason=decision.reason,
            differences=compatibility.reasons,
        )
        return decision

    def _situation(
        self,
        handle: KVHandle,
        spec: ModelSpec,
        receiver: ResidentModel | None,
        first: bool,
        template_inputs: TemplateInputs | None,
    ) -> Situation:
        """`receiver` is None where no model of this spec is resident here."""
        sender = self._specs.get(handle.model)
        compatibility = self._compared.get((handle.model, spec.identity)) if receiver else None
        if compatibility is None:
            compatibility = compare(sender, spec) if sender else by_identity(handle.model, spec)
            if sender and receiver:
                self._compared[handle.model, spec.identity] = compatibility
        num_cached, nbytes, text_tokens = 0, 0, None
        if compatibility.level is Level.EXACT and first:
            num_cached, nbytes = self._kept(handle, spec, receiver)
            is_costly = nbytes or handle.num_tokens - num_cached > handle.num_pending
            if is_costly and receiver and template_inputs:
                text_tokens = _num_text_tokens(handle, receiver, template_inputs)
        rates = self.rates(receiver) if receiver else Rates()
        facts = facts_of(handle, spec)
        if facts.has_latent_steps and not facts.latent_steps_refusal:
            refusals = (parity_refusal(spec.identity, steps) for steps in sorted(handle.steps))
            facts = facts._replace(latent_steps_refusal=next(filter(None, refusals), ""))
        facts = facts._replace(
            cached_tokens=num_cached,
            move_bytes=nbytes,
            text_tokens=text_tokens,
            rates=rates,
            first=first,
        )
        return Situation(sender or handle.model, spec, compatibility, facts)

    def _kept(self, handle: KVHandle, spec: ModelSpec, receiver: ResidentModel | None) -> tuple[int, int]:
        """How many of a handle's tokens are in the pool, and the bytes of them that the receiver would have to move.

        Of a cache that is still to be composed, those that its blocks are taken from and that are not repaired.
        """
        if self.pool.has(handle.id) and spec.weights not in self._twins:  # the usual case needs no search
            return handle.num_tokens - handle.num_pending, 0
        found = self._find(handle, handle.tokens, handle.num_tokens)
        if found is None or found.num_tokens < handle.num_composed:
            return self._num_at_hand(handle), 0
        return found.num_tokens, self._bytes_elsewhere(found, receiver) if receiver else 0

    def _num_at_hand(self, handle: KVHandle) -> int:
        """How many of a handle's tokens would not be computed if it were composed now."""
        found = self._find(handle.first(0), handle.tokens, handle.num_plain)
        num_tokens = found.num_tokens if found else 0
        for segment in handle.segments:
            if isinstance(provenance := segment.provenance, Composition):
                at_hand = sum(block.num_tokens for block in provenance.blocks if self.pool.has(block.handle.id))
                num_tokens += int(at_hand * (1 - provenance.repair.ratio)) if provenance.repair else at_hand
        return num_tokens

    def _bring(
        self, receiver: ResidentModel, plan: Plan, limit: int, call_site: CallSite
    ) -> tuple[KVState | None, Cost | None]:
        """The state that covers most of a plan's prompt, where the receiver is, and what moving it there took.

        Whether a state from elsewhere is moved was decided with the edge; where there is none, it is decided alike.
        """
        found = self._kept_or_made(plan.lead, plan.prompt.tokens, limit, receiver, call_site)
        if found is None or not (nbytes := self._bytes_elsewhere(found, receiver)):
            return found, None
        facts = Facts(limit, found.num_tokens, nbytes, rates=self.rates(receiver))
        edge = plan.edges[0] if plan.edges else choose(Compatibility(Level.EXACT), EdgePolicy(), facts)
        is_bought = edge.estimated is not None and edge.estimated.move_bytes
        if (
            not is_bought and not plan.lead.provenance_digest
        ):  # what was composed can't be computed by reading its tokens
            return None, None
        return self._move(found, receiver, call_site)

    def _move(self, state: KVState, receiver: ResidentModel, call_site: CallSite) -> tuple[KVState, Cost | None]:
        """The state where the receiver is, and what that took; None where it is there already."""
        if not (nbytes := state.bytes_elsewhere(receiver.devices)):
            return state, None
        begin = time.perf_counter()
        state = state.to(receiver.devices)
        for tensor in {tensor.device: tensor for layer in state.layers() for tensor in layer}.values():
            tensor[..., :1].cpu()  # waits for the device
        seconds = time.perf_counter() - begin
        if meter := self._meters.get(receiver):
            meter.add_move(nbytes, seconds)
        self.emit(
            Moved(
                call_site=call_site,
                model=receiver.spec.identity,
                num_tokens=state.num_tokens,
                nbytes=nbytes,
                duration_s=seconds,
                device=str(receiver.device),
            )
        )
        return state, Cost(0, seconds, nbytes)

    def _bytes_elsewhere(self, state: KVState, receiver: ResidentModel) -> int:
        """Bytes of a kept state that are on other devices than the receiver's."""
        return state.bytes_elsewhere(receiver.devices) if receiver.spec.weights in self._twins else 0

    def _find(self, handle: KVHandle, tokens: bytes, limit: int) -> KVState | None:
        """The kept state that covers most of packed `tokens`, made as the handle's cache was."""
        return self.pool.longest_prefix(Namespace(handle.model, self.tenant, handle.provenance_digest), tokens, limit)

    def _report_delivery(
        self, request: Request, handle: KVHandle, state: KVState, prompt: Prompt, duration_s: float
    ) -> None:
        if prompt.num_inherited < handle.num_tokens:
            self._emit(Diverged, request, handle, num_tokens=prompt.num_inherited, num_inherited=handle.num_tokens)
        missing = prompt.num_inherited - state.num_tokens
        if missing > handle.num_pending:
            self._emit(Rebuilt, request, handle, num_tokens=missing, reason="not in the pool")
        self._emit(
            Delivered,
            request,
            handle,
            num_tokens=handle.num_tokens,
            nbytes=handle.nbytes,
            duration_s=duration_s,
            route=Route.CACHE.value,
            cache_read=min(state.num_tokens, prompt.num_inherited),
        )

    def _report_failure(self, request: Request, handle: KVHandle, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._emit(FellBack, request, handle, from_route=Route.CACHE.value, to_route=Route.TEXT.value, reason=reason)

    def _emit(self, event: type[_E], request: Request, handle: KVHandle, **fields: Any) -> None:
        self.emit(
            event(call_site=request.call_site, handle=handle.id, model=handle.model, source=handle.source, **fields)
        )

    def _report_lost(self, handles: Sequence[str], reason: str) -> None:
        for handle in handles:
            self.emit(Evicted(handle=handle, reason=reason))


def _thread_owner(thread_id: str) -> str:
    return f"thread:{thread_id}"


def _num_text_tokens(handle: KVHandle, receiver: ResidentModel, template_inputs: TemplateInputs) -> int | None:
    """Tokens of a handle's messages in another template_inputs than they were written in; None where it is the same."""
    if all(segment.inputs_digest == template_inputs.digest for segment in handle.segments):
        return None
    try:
        return len(receiver.prompts.write(handle.messages, template_inputs, reply=False).tokens) // TOKEN_BYTES
    except PromptError:  # they can't be told alone
        return None
