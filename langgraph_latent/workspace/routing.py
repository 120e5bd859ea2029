"""How each edge of a request is decided: what is known of a handle and its receiver, and the router's answer to it.

It knows specs, policies and what is in the pool; not how a decision is carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import ConfigError, HandleError, PromptError
from langgraph_latent.events import Routed
from langgraph_latent.handle.compose import merge, repaired, without_contained
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.choice import Situation, by_identity, choose, facts_of
from langgraph_latent.router.parity import parity_refusal
from langgraph_latent.router.policy import Route
from langgraph_latent.router.rates import Rates
from langgraph_latent.router.router import EdgeRouter
from langgraph_latent.spec.compat import Level, compare
from langgraph_latent.spec.spec import ModelSpec
from langgraph_latent.workspace.keeper import CacheKeeper
from langgraph_latent.workspace.materialize import Materializer
from langgraph_latent.workspace.models import ModelsInUse
from langgraph_latent.workspace.request import Edge, Request


class Routing:
    """Decides the edges of one workspace's requests."""

    def __init__(
        self, router: EdgeRouter, keeper: CacheKeeper, materializer: Materializer, models: ModelsInUse
    ) -> None:
        self._router = router
        self._keeper = keeper
        self._materializer = materializer
        self._models = models

    def edges(self, receiver: ResidentModel, request: Request) -> list[Edge]:
        """The edges by which a request inherits, joined where all of them allow it. Raises `RouteError`."""
        spec, node = self._models.note(receiver), request.call_site.node
        handles = self._joined(without_contained(request.handles), spec, node)
        return [
            self._edge(handle, receiver, request, first=not index, last=index == len(handles) - 1)
            for index, handle in enumerate(handles)
        ]

    def situation_for(
        self, handle: KVHandle, receiver: Any, *, first: bool, template_inputs: TemplateInputs | None
    ) -> Situation:
        """`situation` for a `ModelSpec` or a chat model, which is loaded. Raises `ConfigError` for anything else."""
        if isinstance(receiver, ModelSpec):
            spec, model = receiver, self._models.find(receiver.identity)
        elif callable(getattr(receiver, "resident", None)):
            model = receiver.resident()
            spec = self._models.note(model)
        else:
            raise ConfigError(f"a receiver is a ChatLatent or a ModelSpec, not {type(receiver).__name__}")
        return self.situation(handle, spec, model, first=first, template_inputs=template_inputs)

    def situation(
        self,
        handle: KVHandle,
        spec: ModelSpec,
        receiver: ResidentModel | None,
        *,
        first: bool,
        template_inputs: TemplateInputs | None,
    ) -> Situation:
        """What the edge from a handle to a model is decided from now; `receiver` is None where none is in memory."""
        sender = self._models.spec(handle.model)
        if sender is None:
            compatibility = by_identity(handle.model, spec)
        else:  # a spec that is not a model's in use may have other notes than the one with its identity
            compatibility = self._models.compatibility(sender, spec) if receiver else compare(sender, spec)
        facts = facts_of(handle, spec)._replace(
            first=first, rates=self._models.rates(receiver) if receiver else Rates()
        )
        if compatibility.level is Level.EXACT and first:
            num_cached, move_bytes, num_unproven = self._materializer.availability(handle, spec, receiver)
            facts = facts._replace(cached_tokens=num_cached, move_bytes=move_bytes, unproven_tokens=num_unproven)
            is_costly = move_bytes or handle.num_tokens - num_cached > handle.num_pending
            if is_costly and receiver and template_inputs:
                facts = facts._replace(text_tokens=_num_text_tokens(handle, receiver, template_inputs))
        if facts.has_latent_steps and not facts.latent_steps_refusal:
            all_steps = {span.end - span.begin for span in handle.spans if span.kind == "latent"}
            refusals = (parity_refusal(spec.identity, steps) for steps in sorted(all_steps))
            facts = facts._replace(latent_steps_refusal=next(filter(None, refusals), ""))
        return Situation(sender or handle.model, spec, compatibility, facts)

    def _joined(self, handles: Sequence[KVHandle], spec: ModelSpec, node: str) -> Sequence[KVHandle]:
        """Several handles as one, repaired, where every edge's policy allows level 1 and the model can; else as is."""
        policies = [self._router.policy_for(handle, node) for handle in handles]
        is_allowed = all(Level.MOVED in policy.levels and policy.route is not Route.TEXT for policy in policies)
        is_own = all(handle.model == spec.identity for handle in handles)
        if not (handles and is_allowed and is_own and spec.capabilities.can("move")):
            return handles
        repair = policies[0].repair if spec.capabilities.can("batch") else None
        try:
            return [repaired(merge(handles), repair)]
        except (ConfigError, HandleError):  # too many blocks, or blocks of blocks too often
            return handles

    def _edge(self, handle: KVHandle, receiver: ResidentModel, request: Request, *, first: bool, last: bool) -> Edge:
        policy = self._router.policy_for(handle, request.call_site.node)
        inputs = request.template_inputs
        situation = self.situation(handle, receiver.spec, receiver, first=first, template_inputs=inputs)
        facts, compatibility = situation.facts, situation.compatibility
        if handle.provenance_digest and not last:
            refusal = facts.move_refusal or "other handles come after it, and their edges forbid to join them"
            facts = facts._replace(move_refusal=refusal)
        decision = choose(compatibility, policy, facts)
        self._keeper.emit(
            Routed.of(
                handle,
                request.call_site,
                route=decision.route.value,
                level=int(decision.level),
                code=decision.code,
                reason=decision.reason,
                differences=compatibility.reasons,
            )
        )
        return Edge(handle, policy, decision)


def _num_text_tokens(handle: KVHandle, receiver: ResidentModel, inputs: TemplateInputs) -> int | None:
    """Tokens of a handle's messages under other template inputs than they were written with; None for the same."""
    if all(segment.inputs_digest == inputs.digest for segment in handle.segments):
        return None
    try:
        return len(receiver.prompts.write(handle.messages, inputs, reply=False).tokens) // TOKEN_BYTES
    except PromptError:  # they can't be rendered alone
        return None
