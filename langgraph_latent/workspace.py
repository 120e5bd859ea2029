"""`LatentWorkspace`: the one owner of models in use, cache pool, router and tracer; it delivers handles to receivers.

It knows handles, models and tensors; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from langgraph_latent.compat import Compatibility, Difference, Level, compare
from langgraph_latent.delivery import Delivery, Request, told_by, unrouted, without_contained
from langgraph_latent.errors import (
    CacheBudgetError,
    ClosedError,
    CodecError,
    HandleError,
    ModelMismatchError,
    TenantError,
    UnknownHandleError,
)
from langgraph_latent.events import (
    Delivered,
    Diverged,
    Event,
    Evicted,
    Exported,
    Ingested,
    Loaded,
    Origin,
    Produced,
    Rebuilt,
    Refused,
    Reworded,
    Routed,
)
from langgraph_latent.handle import TOKEN_BYTES, KVHandle, unpack_tokens
from langgraph_latent.kv import codec
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.state import KVState
from langgraph_latent.models import resident
from langgraph_latent.models.prompt import Prompt
from langgraph_latent.models.resident import ModelKey, ResidentModel
from langgraph_latent.pool.budget import default_budget, parse_bytes
from langgraph_latent.pool.policies import EvictionPolicy
from langgraph_latent.pool.pool import CachePool, Namespace, PoolInfo
from langgraph_latent.pool.recipes import RecipeBook
from langgraph_latent.router import Cost, EdgePolicy, EdgeRouter, Route, RouteDecision, choose
from langgraph_latent.spec import ModelSpec
from langgraph_latent.tracer import LatentTracer

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
    num_recipes: int


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
        self._recipes = RecipeBook()
        self._lock = threading.RLock()
        self._closed = False

    @classmethod
    def default(cls) -> LatentWorkspace:
        """The process's own workspace, made on first use and again after it was closed."""
        global _default
        with _default_lock:
            if _default is None or _default._closed:
                _default = cls()
            return _default

    # -- models ---------------------------------------------------------------------------------------------------

    def use_model(self, key: ModelKey) -> None:
        """Note one more user of a model and make it resident. Raises `ModelLoadError`."""
        with self._lock:
            self._check_open()
            if key not in self._models:
                self._load(key)
            self._model_users[key] += 1

    def _load(self, key: ModelKey) -> None:
        begin = time.perf_counter()
        model = resident.acquire(key)
        self._models[key] = model
        self._specs[model.spec.identity] = model.spec
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
                resident.release(key)

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
        if handle := self._recipes.find(known):
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
        begin = time.perf_counter()
        for handle in request.handles:
            self.check(handle)
        handles = without_contained(request.handles)
        policies = [self.router.policy(handle.source, request.origin.node) for handle in handles]
        edges = [
            self._route(handle, receiver, policy, request, is_first=not index)
            for index, (handle, policy) in enumerate(zip(handles, policies, strict=True))
        ]
        root = KVHandle.root(receiver.spec.identity, self.tenant)
        lead = handles[0] if edges and edges[0].route is Route.CACHE else root
        receiver.check_vocabulary(lead)
        told = (*told_by(handles), *request.messages)
        prompt = receiver.prompts.extend(lead, told[len(lead.messages) :], request.framing, reply=request.reply)
        if changes := receiver.prompts.template.adapt(told, request.framing.tools).changes:
            self.emit(Reworded(origin=request.origin, model=receiver.spec.identity, changes=changes))
        num_tokens = len(prompt.tokens) // TOKEN_BYTES
        num_fed = 1 if request.reply else 0  # an answer's first token follows the logits of a token that is fed
        receiver.check_length(num_tokens + num_fed)
        self.pool.check_fits(capacity_for(num_tokens) * receiver.spec.bytes_per_token)
        may_reuse = request.reuse and not any(policy.route is Route.TEXT for policy in policies)
        found = self._find(receiver, prompt.tokens, num_tokens - num_fed) if may_reuse else None
        state = found or receiver.empty_state()
        if lead is not root:
            self._report_delivery(request, lead, state, prompt, time.perf_counter() - begin)
        if prompt.num_inherited < lead.num_tokens:
            edges[0] = edges[0].diverged(min(prompt.num_inherited, state.num_tokens), lead.num_tokens)
            lead = root
        decision = max(edges, key=lambda edge: edge.level, default=unrouted(state.num_tokens))
        return Delivery(
            prompt.tokens,
            state,
            base=lead,
            messages=told[len(lead.messages) :],
            decision=replace(decision, estimated=Cost(num_tokens - state.num_tokens)),
            may_fall_back=all(policy.may_fall_back for policy in policies),
        )

    def keep(self, handle: KVHandle, state: KVState, origin: Origin) -> None:
        """Remember a handle and put its state into the pool."""
        self._recipes.remember(handle)
        self.emit(
            Produced(
                origin=origin,
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
        tokens = handle.tokens[: state.num_tokens * TOKEN_BYTES]
        owner = _scopes.get().get(id(self)) or (_thread_owner(origin.thread_id) if origin.thread_id else "")
        try:
            lost = self.pool.put(Namespace(handle.model, self.tenant), tokens, state, handle.id, owner)
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
        """A handle's tensors, the pending token's included, from the pool or rebuilt from its recipe.

        Raises `ModelMismatchError` for a handle of another model, and `HandleError`.
        """
        self.check(handle)
        if handle.model != receiver.spec.identity:
            raise ModelMismatchError(
                f"handle {handle.id} belongs to model {handle.model}, not to {receiver.spec.name!r} "
                f"({receiver.spec.identity}); pass it to a chat model of the same weights"
            )
        receiver.check_vocabulary(handle)
        if not handle.tokens:
            raise HandleError("a handle of no tokens has no cache; read something first")
        state = self._find(receiver, handle.tokens, handle.num_tokens) or receiver.empty_state()
        if missing := unpack_tokens(handle.tokens[state.num_tokens * TOKEN_BYTES :]):
            self.emit(Rebuilt(handle=handle.id, model=handle.model, num_tokens=len(missing), reason="not in the pool"))
            with state.append(handle.num_tokens) as tail:
                receiver.prefill(missing, tail)
                state = tail.seal()
        return state

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

    def ingest(self, source: str | Path | bytes, receiver: ResidentModel, origin: Origin) -> KVHandle:
        """Verify an exported cache, then keep it. Raises `CodecError` or `TenantError`; then nothing of it was used."""
        begin = time.perf_counter()
        is_file = isinstance(source, str | Path)
        try:
            blob = codec.read_file(Path(source), receiver.spec) if isinstance(source, str | Path) else bytearray(source)
            handle, state = codec.decode(blob, receiver.spec)
            state = state.to(receiver.devices)
        except CodecError as error:
            self.emit(Refused(origin=origin, reason=str(error)))
            raise
        self.check(handle)
        receiver.check_vocabulary(handle)
        self.keep(handle, state, origin)
        self.emit(
            Ingested(
                origin=origin,
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
        return WorkspaceInfo(self.pool.size_info(), len(self._models), len(self._recipes))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where the pool's books do not add up."""
        self.pool.check_integrity()

    def close(self) -> None:
        """Free every cache and give every model back. Later use raises `ClosedError`; closing twice is fine."""
        with self._lock:
            self._closed = True
            self._report_lost(self.pool.close(), "closed")
            self._recipes.clear()
            for key in self._models:
                resident.release(key)
            self._models.clear()
            self._model_users.clear()

    def __enter__(self) -> LatentWorkspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this workspace was closed; make a new LatentWorkspace()")

    def _route(
        self, handle: KVHandle, receiver: ResidentModel, policy: EdgePolicy, request: Request, *, is_first: bool
    ) -> RouteDecision:
        if sender := self._specs.get(handle.model):
            compatibility = compare(sender, receiver.spec)
        else:  # only its digest came with the handle
            compatibility = Compatibility(Level.TEXT, (Difference("identity", handle.model, receiver.spec.identity),))
        decision = choose(compatibility, policy, first=is_first)
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

    def _find(self, receiver: ResidentModel, tokens: bytes, limit: int) -> KVState | None:
        return self.pool.longest_prefix(Namespace(receiver.spec.identity, self.tenant), tokens, limit)

    def _report_delivery(
        self, request: Request, handle: KVHandle, state: KVState, prompt: Prompt, duration_s: float
    ) -> None:
        if prompt.num_inherited < handle.num_tokens:
            self._emit(Diverged, request, handle, num_tokens=prompt.num_inherited, num_inherited=handle.num_tokens)
        pending = 1 if handle.segments[-1].kind == "generated" else 0
        missing = prompt.num_inherited - state.num_tokens
        if missing > pending:
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

    def _emit(self, event: type[_E], request: Request, handle: KVHandle, **fields: Any) -> None:
        self.emit(event(origin=request.origin, handle=handle.id, model=handle.model, source=handle.source, **fields))

    def _report_lost(self, handles: Sequence[str], reason: str) -> None:
        for handle in handles:
            self.emit(Evicted(handle=handle, reason=reason))


def _thread_owner(thread_id: str) -> str:
    return f"thread:{thread_id}"
