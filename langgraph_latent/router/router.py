"""`EdgeRouter`: policies by edge. It knows which policy counts, not what is decided from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from langgraph_latent import public
from langgraph_latent.errors import ConfigError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.router.composed import parts_of
from langgraph_latent.router.policy import EdgePolicy, Route


@public
class EdgeRouter:
    """Policies by edge, an edge being (handle's source node, receiving node).

    `EdgeRouter({("reader", "router"): EdgePolicy(...)}, default=EdgePolicy())`; "*" on one side matches any node.
    """

    def __init__(
        self, policies: Mapping[tuple[str, str], EdgePolicy] | None = None, default: EdgePolicy | None = None
    ) -> None:
        self.policies = dict(policies or {})
        self.default = default or EdgePolicy()
        for edge, policy in self.policies.items():
            if not (isinstance(edge, tuple) and len(edge) == 2 and isinstance(policy, EdgePolicy)):
                raise ConfigError(
                    f"a policy maps (source node, receiving node) to an EdgePolicy, not {edge!r} to {policy!r}"
                )

    def policy(self, source: str, node: str) -> EdgePolicy:
        """The policy of an edge: its own, else that of ("*", node), (source, "*") or ("*", "*"), else the default."""
        edge = self.match(source, node)
        return self.default if edge is None else self.policies[edge]

    def policy_for(self, handle: KVHandle, node: str) -> EdgePolicy:
        """The policy of a handle's edge; it allows nothing that the edge of one of its parts forbids."""
        policy = self.policy(handle.source, node)
        for part in parts_of(handle):
            other = self.policy(part.source, node)
            policy = replace(
                policy,
                allow=policy.allow & other.levels,
                route=Route.TEXT if other.route is Route.TEXT else policy.route,
                judge=policy.judge or other.judge,
                on_failure="raise" if "raise" in (policy.on_failure, other.on_failure) else "fall_back",
                max_context_tokens=min(
                    filter(None, (policy.max_context_tokens, other.max_context_tokens)), default=None
                ),
                latent_steps=policy.latent_steps and (other.latent_steps or not part.has_latent_steps),
            )
        return policy

    def match(self, source: str, node: str) -> tuple[str, str] | None:
        """The key of `policies` that counts for an edge; None where it is the default."""
        for edge in ((source, node), ("*", node), (source, "*"), ("*", "*")):
            if edge in self.policies:
                return edge
        return None
