"""Who does the work of one workspace, put together once. It knows what each of them needs, and nothing of requests."""

from __future__ import annotations

from typing import NamedTuple

from langgraph_latent.pool.budget import default_budget, parse_bytes
from langgraph_latent.pool.policies import EvictionPolicy
from langgraph_latent.pool.pool import CachePool
from langgraph_latent.router.router import EdgeRouter
from langgraph_latent.tracer import LatentTracer
from langgraph_latent.workspace.delivery import Deliverer
from langgraph_latent.workspace.keeper import CacheKeeper
from langgraph_latent.workspace.materialize import Materializer
from langgraph_latent.workspace.models import ModelsInUse
from langgraph_latent.workspace.routing import Routing


class Services(NamedTuple):
    """Who counts models, keeps caches, makes their tensors, decides edges and delivers; each needs those before it."""

    models: ModelsInUse
    keeper: CacheKeeper
    materializer: Materializer
    routing: Routing
    deliverer: Deliverer

    @classmethod
    def of(
        cls,
        memory: int | str | None,
        eviction: EvictionPolicy | None,
        router: EdgeRouter,
        tracer: LatentTracer,
        tenant: str,
    ) -> Services:
        """The services of a workspace; arguments as `LatentWorkspace` takes them. Raises `ConfigError`."""
        pool = CachePool(default_budget() if memory is None else parse_bytes(memory), eviction)
        models = ModelsInUse(tracer.emit)
        keeper = CacheKeeper(pool, tenant, tracer)
        materializer = Materializer(keeper, models)
        routing = Routing(router, keeper, materializer, models)
        return cls(models, keeper, materializer, routing, Deliverer(routing, keeper, materializer, models))
