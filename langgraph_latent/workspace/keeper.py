"""What a workspace keeps: handles that are remembered, and their states in the pool, for one tenant.

It knows handles, states and who owns them; not models, not routes.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from langgraph_latent.errors import CacheBudgetError, HandleError, TenantError
from langgraph_latent.events import CallSite, Event, Evicted, Produced, Refused
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.handle_book import HandleBook
from langgraph_latent.pool.pool import CachePool, Namespace
from langgraph_latent.tracer import LatentTracer

_scopes: contextvars.ContextVar[Mapping[int, str]] = contextvars.ContextVar(
    "latent_scopes", default=MappingProxyType({})
)
_scope_ids = itertools.count(1)


class CacheKeeper:
    """Puts states into a pool and finds them again, with an event for each. Safe in threads."""

    def __init__(self, pool: CachePool, tenant: str, tracer: LatentTracer) -> None:
        self.pool = pool
        self.tenant = tenant
        self.handles = HandleBook()
        self._tracer = tracer
        self._is_closed = False

    def emit(self, event: Event) -> None:
        self._tracer.emit(event)

    def check(self, handle: KVHandle) -> None:
        """Raise `HandleError` for what is not a sound handle, `TenantError` for another tenant's."""
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

    def keep(self, handle: KVHandle, state: KVState, dtype: str, call_site: CallSite) -> None:
        """Remember a handle and put its state into the pool; `dtype` is that of its model."""
        self.handles.remember(handle)
        self.emit(
            Produced.of(
                handle,
                call_site,
                num_tokens=handle.num_tokens,
                nbytes=handle.nbytes,
                shape=state.shape,
                num_layers=len(state.kinds),
                dtype=dtype,
                checksum=state.checksum() if self._tracer.checksums else "",
            )
        )
        self.restore(handle, state, call_site)

    def restore(self, handle: KVHandle, state: KVState, call_site: CallSite) -> None:
        """Put the state of a handle, but for its pending token, into the pool."""
        tokens = handle.tokens[: state.num_tokens * TOKEN_BYTES]
        owner = _scopes.get().get(id(self)) or (_thread_owner(call_site.thread_id) if call_site.thread_id else "")
        try:
            namespace = self._namespace(handle)._replace(outside=state.outside)
            lost = self.pool.put(namespace, tokens, state, handle.id, owner)
        except CacheBudgetError:  # it grew past the budget while it was decoded: the answer stands
            lost = [handle.id, *self.pool.drop_storage(state)]
        self._report_lost(lost, "closed" if self._is_closed else "budget")

    def find(self, handle: KVHandle, tokens: bytes, limit: int) -> KVState | None:
        """The kept state that covers most of the first `limit` packed `tokens`, made as the handle's cache was.

        All of it was computed here, or is proven.
        """
        return self.pool.longest_prefix(self._namespace(handle), tokens, limit)

    def find_unproven(self, handle: KVHandle, tokens: bytes, limit: int) -> KVState | None:
        """The same among what came from outside with this very handle; None where it has no such tensors."""
        namespace = self.pool.namespace_of(handle.id)
        if namespace is None or not namespace.outside:
            return None
        return self.pool.longest_prefix(namespace, tokens, limit)

    def is_proven(self, handle: KVHandle) -> bool:
        """Whether a handle's tensors are kept, and were computed here or are proven."""
        namespace = self.pool.namespace_of(handle.id)
        return namespace is not None and not namespace.outside

    def _namespace(self, handle: KVHandle) -> Namespace:
        return Namespace(handle.model, self.tenant, handle.provenance_digest)

    def evict(self, handle: KVHandle) -> None:
        """Let a handle's tensors go."""
        self._report_lost(self.pool.drop(handle.id), "asked")

    def give_up(self, state: KVState) -> None:
        """Drop a cache that failed in use, and all that shares its storage."""
        self._report_lost(self.pool.drop_storage(state), "failed in use")

    def unpin(self, handle: KVHandle) -> None:
        """Let a handle's tensors be evicted again."""
        self._report_lost(self.pool.unpin(handle.id), "budget")

    def release(self, thread_id: str) -> None:
        """Drop the tensors that only this LangGraph thread made and nobody pinned."""
        self._report_lost(self.pool.release(_thread_owner(thread_id)), "released")

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """A block at whose end the tensors made inside are dropped (unless pinned, or made outside too)."""
        name = f"scope:{next(_scope_ids)}"
        token = _scopes.set({**_scopes.get(), id(self): name})
        try:
            yield
        finally:
            _scopes.reset(token)
            self._report_lost(self.pool.release(name), "scope ended")

    def close(self) -> None:
        """Forget everything, and keep nothing from now on."""
        self._is_closed = True
        self._report_lost(self.pool.close(), "closed")
        self.handles.clear()

    def _report_lost(self, handles: Sequence[str], reason: str) -> None:
        for handle in handles:
            self.emit(Evicted(handle=handle, reason=reason))


def _thread_owner(thread_id: str) -> str:
    return f"thread:{thread_id}"
