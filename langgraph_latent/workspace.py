"""`LatentWorkspace`: the one owner of models in use, cache pool, router and tracer; it delivers handles to receivers.

It knows handles, models and tensors; not LangChain's messages and not LangGraph.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from langgraph_latent.compat import Compatibility, Difference, Level, compare
from langgraph_latent.errors import (
    CacheBudgetError,
    ClosedError,
    CodecError,
    ConfigError,
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
    Routed,
)
from langgraph_latent.handle import TOKEN_BYTES, KVHandle, Message
from langgraph_latent.kv import codec
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.state import KVState
from langgraph_latent.models import resident
from langgraph_latent.models.prompt import Prompt
from langgraph_latent.models.resident import ModelKey, ResidentModel
from langgraph_latent.pool.pool import CachePool, Namespace, PoolInfo
from langgraph_latent.pool.recipes import RecipeBook
from langgraph_latent.router import Cost, EdgeRouter, Route, RouteDecision
from langgraph_latent.spec import ModelSpec
from langgraph_latent.tracer import LatentTracer

_default: LatentWorkspace | None = None
_default_lock = threading.Lock()
_scope: contextvars.ContextVar[str] = contextvars.ContextVar("latent_scope", default="")
_scope_ids = itertools.count(1)
_E = TypeVar("_E", bound=Event)


class Request(NamedTuple):
    """What a chat model asks for: new messages behind inherited handles; with `reply`, up to where an answer begins."""

    messages: Sequence[Message]
    inherited: Sequence[KVHandle]
    reply: bool
    reuse: bool
    origin: Origin


class Delivery(NamedTuple):
    """What a receiver starts from: the prompt's packed tokens, a state that covers a prefix of them, the handle to
    extend (its tokens are a prefix of the prompt) with the messages that are new to it, and how its edge was served.
    `may_fall_back` is False where a policy wants failures raised."""

    tokens: bytes
    state: KVState
    base: KVHandle
    messages: tuple[Message, ...]
    decision: RouteDecision
    may_fall_back: bool

    @property
    def missing(self) -> bytes:
        """The prompt's tokens that are not in the state."""
        return self.tokens[self.state.num_tokens * TOKEN_BYTES :]


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

    Use it as a context manager, or call `close()`, to free caches and give models back. Safe in threads.
    """

    def __init__(
        self,
        *,
        memory: int | str | None = None,
        router: EdgeRouter | None = None,
        tracer: LatentTracer | None = None,
        tenant: str | None = None,
    ) -> None:
        self.pool = CachePool(_default_budget() if memory is None else parse_bytes(memory))
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
        self._check_open()
        with self._lock:
            self._model_users[key] += 1
            if self._model_users[key] > 1:
                return
            begin = time.perf_counter()
            try:
                model = resident.acquire(key)
            except BaseException:
                del self._model_users[key]
                raise
            self._models[key] = model
            self._specs[model.spec.identity] = model.spec
            self.emit(
                Loaded(
                    model=model.spec.identity,
                    source=model.spec.name,
                    duration_s=time.perf_counter() - begin,
                    device=str(model.device),
                    dtype=model.spec.dtype,
                )
            )

    def model(self, key: ModelKey) -> ResidentModel:
        """A model that `use_model` made resident. Raises `ClosedError` when the workspace was closed since."""
        self._check_open()
        return self._models[key]

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
        known = str(reply if isinstance(reply, str) else getattr(reply, "response_metadata", {}).get("kv_handle"))
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
                    f"inherit= takes KVHandle values, not {type(handle).__name__}; see KVHandle.from_dict()"
                )
            if handle.tenant != self.tenant:
                raise TenantError(f"handle {handle.id} belongs to another tenant; it can't be used in this workspace")
            handle.verify()
        except HandleError as error:
            self.emit(Refused(handle=str(getattr(handle, "id", "")), success=False, reason=str(error)))
            raise

    def deliver(self, receiver: ResidentModel, request: Request) -> Delivery:
        """Bring what is inherited to a receiver, behind one routing decision per edge.

        Raises `HandleError`, `RouteError`, `PromptError` or `CacheBudgetError`; nothing is computed or changed by then.
        """
        self._check_open()
        begin = time.perf_counter()
        for handle in request.inherited:
            self.check(handle)
        handles = _without_contained(request.inherited)
        edges = [self._route(handle, receiver, request, first=not index) for index, handle in enumerate(handles)]
        root = KVHandle.root(receiver.spec.identity, self.tenant)
        inherited = handles[0] if edges and edges[0].route is Route.CACHE else root
        told = (*_told(handles), *request.messages)
        prompt = receiver.prompts.extend(inherited, told[len(inherited.messages) :], reply=request.reply)
        base = inherited if prompt.inherited == inherited.num_tokens else root
        num_tokens = len(prompt.tokens) // TOKEN_BYTES
        receiver.check_length(num_tokens + request.reply)
        self.pool.check_fits(capacity_for(num_tokens) * receiver.spec.bytes_per_token)
        may_reuse = request.reuse and not any(edge.code == "forced" for edge in edges)
        state = self._find(receiver, prompt.tokens, num_tokens - request.reply) if may_reuse else None
        state = state or receiver.empty_state()
        if inherited is not root:
            self._report_delivery(request, inherited, state, prompt, time.perf_counter() - begin)
        decision = max(edges, key=lambda edge: edge.level, default=_unrouted(state.num_tokens))
        decision = decision.with_cost(estimated=Cost(num_tokens - state.num_tokens))
        policies = [self.router.policy(handle.source, request.origin.node) for handle in handles]
        may_fall_back = all(policy.may_fall_back for policy in policies)
        return Delivery(prompt.tokens, state, base, told[len(base.messages) :], decision, may_fall_back)

    def keep(self, handle: KVHandle, state: KVState, origin: Origin) -> None:
        """Remember a handle and put its state into the pool."""
        self._recipes.remember(handle)
        tokens = handle.tokens[: state.num_tokens * TOKEN_BYTES]
        owner = _scope.get() or _thread_owner(origin.thread_id)
        try:
            lost = self.pool.put(Namespace(handle.model, self.tenant), tokens, state, handle.id, owner)
        except CacheBudgetError as error:  # it grew past the budget while it was decoded: the answer stands
            self._report_lost([handle.id, *self.pool.drop_storage(state)], str(error))
            return
        self._report_lost(lost, "budget")
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
        token = _scope.set(name)
        try:
            yield
        finally:
            _scope.reset(token)
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
        state = self._find(receiver, handle.tokens, handle.num_tokens) or receiver.empty_state()
        if missing := handle.token_ids[state.num_tokens :]:
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
                target=str(path or "bytes"),
            )
        )
        return blob if path is None else None

    def ingest(self, source: str | Path | bytes, receiver: ResidentModel, origin: Origin) -> KVHandle:
        """Verify an exported cache, then keep it. Raises `CodecError` or `TenantError`; then nothing of it was used."""
        begin = time.perf_counter()
        target = "bytes" if isinstance(source, bytes | bytearray | memoryview) else str(source)
        try:
            blob = bytearray(source) if target == "bytes" else _read_file(Path(target))  # type: ignore[arg-type]
            handle, state = codec.decode(blob, receiver.spec)
            state = state.to(receiver.devices)
        except CodecError as error:
            self.emit(Refused(origin=origin, success=False, reason=str(error)))
            raise
        self.check(handle)
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
                target=target,
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
            self._report_lost(self.pool.clear(), "closed")
            self._recipes.clear()
            for key in list(self._models):
                self._model_users[key] = 1
                self.leave_model(key)

    def __enter__(self) -> LatentWorkspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this workspace was closed; make a new LatentWorkspace()")

    def _route(self, handle: KVHandle, receiver: ResidentModel, request: Request, *, first: bool) -> RouteDecision:
        if sender := self._specs.get(handle.model):
            compatibility = compare(sender, receiver.spec)
        else:  # only its digest came with the handle
            compatibility = Compatibility(Level.TEXT, (Difference("identity", handle.model, receiver.spec.identity),))
        decision = self.router.decide(handle.source, request.origin.node, compatibility, first=first)
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
        if prompt.inherited < handle.num_tokens:
            self._emit(Diverged, request, handle, num_tokens=prompt.inherited, inherited=handle.num_tokens)
        pending = 1 if handle.segments[-1].kind == "generated" else 0
        missing = prompt.inherited - state.num_tokens
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
            cache_read=min(state.num_tokens, prompt.inherited),
        )

    def _emit(self, event: type[_E], request: Request, handle: KVHandle, **fields: Any) -> None:
        self.emit(event(origin=request.origin, handle=handle.id, model=handle.model, source=handle.source, **fields))

    def _report_lost(self, handles: Sequence[str], reason: str) -> None:
        for handle in handles:
            self.emit(Evicted(handle=handle, reason=reason))


def parse_bytes(size: int | str) -> int:
    """Bytes from an int or from text such as "512MiB", "4GiB", "2 GB". Raises `ConfigError`."""
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", str(size), re.IGNORECASE)
    if not isinstance(size, str) or not match or not float(match[1]):
        raise ConfigError(f"memory={size!r} is no size; pass bytes or text such as '512MiB' or '4GiB'")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** "_kmgt".index(prefix.lower() or "_"))


def _default_budget() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.mem_get_info()[1] // 4)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4


def _read_file(path: Path) -> bytearray:
    try:
        with path.open("rb") as file:
            blob = bytearray(os.fstat(file.fileno()).st_size)
            return blob[: file.readinto(blob)]
    except OSError as error:
        raise CodecError(f"the cache file {str(path)!r} can't be read: {error}") from error


def _thread_owner(thread_id: str) -> str:
    return f"thread:{thread_id}" if thread_id else ""


def _without_contained(handles: Sequence[KVHandle]) -> list[KVHandle]:
    """The handles without doubles and without those that another one continues."""
    return [
        handle
        for index, handle in enumerate(handles)
        if not any(
            other.model == handle.model
            and other.tokens.startswith(handle.tokens)
            and (len(other.tokens) > len(handle.tokens) or at < index)
            for at, other in enumerate(handles)
            if at != index
        )
    ]


def _told(handles: Sequence[KVHandle]) -> tuple[Message, ...]:
    """The messages of several handles in order; what a later one shares with the first from the start is told once."""
    told: list[Message] = list(handles[0].messages) if handles else []
    for handle in handles[1:]:
        pairs = zip(handle.messages, handles[0].messages, strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        told += handle.messages[shared:]
    return tuple(told)


def _unrouted(cache_read: int) -> RouteDecision:
    """How a request that inherits nothing was served."""
    if cache_read:
        return RouteDecision(Route.CACHE, Level.EXACT, "prefix", f"{cache_read} leading tokens were in the pool")
    return RouteDecision(Route.TEXT, Level.TEXT, "nothing_inherited", "nothing was inherited, nothing was in the pool")
