"""`LatentWorkspace`: the one owner of models in use, kept caches, router and tracer.

It holds who does the work and forwards to them; it knows neither LangChain's messages nor LangGraph.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from langgraph_latent import public
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import UnknownHandleError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.kv.state import KVState
from langgraph_latent.pool.policies import EvictionPolicy
from langgraph_latent.pool.pool import CachePool, PoolInfo
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.explain import Explanation, explain
from langgraph_latent.router.router import EdgeRouter
from langgraph_latent.tracer import LatentTracer
from langgraph_latent.workspace.models import ModelsInUse
from langgraph_latent.workspace.services import Services

_default: LatentWorkspace | None = None
_default_lock = threading.Lock()


class WorkspaceInfo(NamedTuple):
    """Sizes of a workspace."""

    pool: PoolInfo
    num_models: int
    num_handles: int


@public
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
        self.router = router or EdgeRouter()
        self.tracer = tracer or LatentTracer()
        self.tenant = tenant or ""
        self.services = Services.of(memory, eviction, self.router, self.tracer, self.tenant)
        self._is_closed = False

    @classmethod
    def default(cls) -> LatentWorkspace:
        """The process's own workspace, made on first use and again after it was closed."""
        global _default
        with _default_lock:
            if _default is None or _default._is_closed:
                _default = cls()
            return _default

    @property
    def models(self) -> ModelsInUse:
        """The models that this workspace uses."""
        return self.services.models

    @property
    def pool(self) -> CachePool:
        """Where tensors are kept."""
        return self.services.keeper.pool

    # -- handles --------------------------------------------------------------------------------------------------

    def handle(self, reply: Any) -> KVHandle:
        """The handle of everything up to and with a reply (an AIMessage of a `ChatLatent` of this workspace, or an id).

        Raises `UnknownHandleError` for one that this workspace does not remember.
        """
        handle_id = reply if isinstance(reply, str) else getattr(reply, "response_metadata", {}).get("kv_handle")
        if not isinstance(handle_id, str):
            raise UnknownHandleError(
                f"this {type(reply).__name__} is not a reply of a ChatLatent: it has no kv_handle. "
                "Pass the messages instead, or carry the KVHandle itself (a LatentChannel does)."
            )
        if handle := self.services.keeper.handles.find(handle_id):
            return handle
        raise UnknownHandleError(
            f"this workspace does not know handle {handle_id!r}: it belongs to another process or workspace, or was "
            "forgotten. Pass the messages instead, or carry the KVHandle itself (a LatentChannel does)."
        )

    def check(self, handle: KVHandle) -> None:
        """Raise `HandleError` for what is not a sound handle, `TenantError` for another tenant's."""
        self.services.keeper.check(KVHandle.given(handle))

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

        `template_inputs` are what the template is given beside the messages; None for those that the handle was made
        with. Nothing is computed, moved or emitted. Raises `HandleError` where the handle is refused.
        """
        if isinstance(other := getattr(receiver, "workspace", None), LatentWorkspace) and other is not self:
            return other.explain(handle, receiver, node=node, first=first, template_inputs=template_inputs)
        handle = KVHandle.given(handle)
        self.check(handle)
        situation = self.services.routing.situation_for(handle, receiver, first=first, template_inputs=template_inputs)
        return explain(self.router, handle, situation, node)

    # -- tensors --------------------------------------------------------------------------------------------------

    def evict(self, handle: KVHandle) -> None:
        """Let a handle's tensors go; the handle still works, its cache is rebuilt when needed."""
        self.services.keeper.evict(KVHandle.given(handle))

    def pin(self, handle: KVHandle, ttl_s: float | None = None) -> bool:
        """Keep a handle's tensors in memory until `unpin`, or for `ttl_s` seconds; False when they are gone already."""
        return self.pool.pin(KVHandle.given(handle).id, ttl_s)

    def unpin(self, handle: KVHandle) -> None:
        """Let a handle's tensors be evicted again."""
        self.services.keeper.unpin(KVHandle.given(handle))

    def release(self, thread_id: str) -> None:
        """Drop the tensors that only this LangGraph thread made and nobody pinned; call it with `delete_thread`."""
        self.services.keeper.release(thread_id)

    def scope(self) -> AbstractContextManager[None]:
        """A block at whose end the tensors made inside are dropped (unless pinned, or made outside too).

        Handles stay good. `with ws.scope(): graph.invoke(...)` leaves no cache behind.
        """
        return self.services.keeper.scope()

    def state_of(self, handle: KVHandle, model: ResidentModel) -> KVState:
        """A handle's tensors, the pending token's included, from the pool or rebuilt from its provenance.

        Raises `ModelMismatchError` for a handle of another model, and `HandleError`.
        """
        return self.services.materializer.state_of(KVHandle.given(handle), model)

    # -- the whole ------------------------------------------------------------------------------------------------

    def size_info(self) -> WorkspaceInfo:
        """Sizes of pool, models and remembered handles."""
        return WorkspaceInfo(self.pool.size_info(), len(self.models), len(self.services.keeper.handles))

    def check_integrity(self) -> None:
        """Raise `IntegrityError` where the pool's books do not add up."""
        self.pool.check_integrity()

    def close(self) -> None:
        """Free every cache and give every model back. Later use raises `ClosedError`; closing twice is fine."""
        self._is_closed = True
        self.services.keeper.close()
        self.models.close()

    def __enter__(self) -> LatentWorkspace:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
