"""How a request is served: each edge routed, the prompt rendered, the cache brought to the receiver, or the next safer
way taken.

It knows handles, policies and where tensors come from; not what is done with a delivery.
"""

from __future__ import annotations

import time
from dataclasses import replace

from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.events import Delivered, Diverged, FellBack, Rebuilt, Reworded
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.kv.buffer import capacity_for
from langgraph_latent.kv.state import KVState
from langgraph_latent.router.choice import Facts, choose
from langgraph_latent.router.policy import EdgePolicy, Route
from langgraph_latent.router.rates import Cost
from langgraph_latent.spec.compat import Compatibility, Level
from langgraph_latent.workspace.keeper import CacheKeeper
from langgraph_latent.workspace.materialize import Materializer
from langgraph_latent.workspace.models import ModelsInUse
from langgraph_latent.workspace.request import Delivery, Plan, Request, joined_transcript, transcript, unrouted
from langgraph_latent.workspace.routing import Routing


class Deliverer:
    """Serves requests of one workspace. Safe in threads."""

    def __init__(self, routing: Routing, keeper: CacheKeeper, materializer: Materializer, models: ModelsInUse) -> None:
        self._routing = routing
        self._keeper = keeper
        self._materializer = materializer
        self._models = models

    def deliver(self, receiver: ResidentModel, request: Request) -> Delivery:
        """Bring what is inherited to a receiver, after one routing decision per edge.

        Raises `HandleError`, `RouteError`, `PromptError` or `CacheBudgetError`; nothing is computed or changed by then.
        """
        self._models.check_open()
        for handle in request.handles:
            self._keeper.check(handle)
        plan = self._planned(receiver, request)
        request = request._replace(caller=request.caller._replace(takes_unproven=plan.takes_unproven))
        begin = time.perf_counter()
        try:
            state, moved = self._brought(receiver, request, plan)
        except (RuntimeError, MemoryError) as error:  # the receiver's device has no room for it
            if not plan.may_fall_back:
                raise
            self._report_failure(request, plan.lead, error)
            plan, state, moved = self._failed(receiver, request, plan, error), receiver.empty_state(), None
        if plan.lead.tokens:
            self._report_delivery(request, plan, state, time.perf_counter() - begin)
        if plan.prompt.num_inherited < plan.lead.num_tokens:
            plan = plan.diverged(state.num_tokens, receiver.spec.capabilities.refusal("crop"))
        decisions = [edge.decision for edge in plan.edges] or [unrouted(state.num_tokens)]
        decision = max(decisions, key=lambda each: each.level)
        if state.outside:
            decision = decision.unproven()
        num_missing = plan.num_tokens - state.num_tokens
        estimated = self._models.rates(receiver).cost(num_missing, moved.move_bytes if moved else 0)
        return Delivery(
            plan.prompt.tokens,
            state,
            base=plan.lead,
            messages=plan.transcript[plan.lead.num_messages :],
            decision=replace(decision, estimated=estimated, actual=moved),
            may_fall_back=plan.may_fall_back,
        )

    def deliver_as_text(
        self, receiver: ResidentModel, request: Request, delivery: Delivery, error: Exception
    ) -> Delivery:
        """What a receiver starts from after a delivered cache failed in use: everything is re-read."""
        self._report_failure(request, delivery.base, error)
        self._keeper.give_up(delivery.state)
        decision = delivery.decision.failed(error)
        if not delivery.base.provenance_digest:
            return delivery._replace(state=receiver.empty_state(), decision=decision)
        messages = (*transcript(delivery.base), *delivery.messages)
        again = self.deliver(receiver, request._replace(messages=messages, handles=(), reuse=False))
        return again._replace(decision=decision)

    # -- the plan -------------------------------------------------------------------------------------------------

    def _planned(self, receiver: ResidentModel, request: Request) -> Plan:
        """How each edge is served, and the prompt after what comes as a cache."""
        edges = self._routing.edges(receiver, request)
        root = KVHandle.root(receiver.spec.identity, self._keeper.tenant)
        is_cache = bool(edges) and edges[0].decision.route is Route.CACHE
        lead = edges[0].handle if is_cache else root
        receiver.check_vocabulary(lead)
        transcripts = [edge.handle.messages if edge.handle is lead else transcript(edge.handle) for edge in edges]
        messages = (*joined_transcript(transcripts), *request.messages)
        plan = self._with_prompt(receiver, request, Plan(edges, lead, messages, root))
        if not lead.provenance_digest or plan.prompt.num_inherited == lead.num_tokens:
            return plan
        edges = plan.diverged(0, "a composed cache is reused in full or not at all").edges
        num_kept, num_inherited = plan.prompt.num_inherited, lead.num_tokens
        self._keeper.emit(Diverged.of(lead, request.call_site, num_tokens=num_kept, num_inherited=num_inherited))
        return self._as_text(receiver, request, plan)._replace(edges=edges)

    def _with_prompt(self, receiver: ResidentModel, request: Request, plan: Plan) -> Plan:
        """A plan with its prompt, which is rendered and checked here."""
        prompts, inputs = receiver.prompts, request.template_inputs
        prompt = prompts.extend(plan.lead, plan.transcript[plan.lead.num_messages :], inputs, reply=request.reply)
        if changes := prompts.template.adapt(plan.transcript, inputs.tools).changes:
            self._keeper.emit(Reworded(call_site=request.call_site, model=plan.root.model, changes=changes))
        plan = plan._replace(prompt=prompt)
        receiver.check_length(plan.num_tokens + request.num_fed)
        self._keeper.pool.check_fits(capacity_for(plan.num_tokens) * receiver.spec.bytes_per_token)
        return plan

    def _failed(self, receiver: ResidentModel, request: Request, plan: Plan, error: Exception) -> Plan:
        """The plan to re-read everything after a cache failed."""
        edges = [edge._replace(decision=edge.decision.failed(error)) for edge in plan.edges[:1]] + plan.edges[1:]
        if not plan.lead.provenance_digest:
            return plan._replace(edges=edges, lead=plan.root)
        return self._as_text(receiver, request, plan)._replace(edges=edges)

    def _as_text(self, receiver: ResidentModel, request: Request, plan: Plan) -> Plan:
        """The plan with the messages of its lead rendered as text."""
        messages = (*transcript(plan.lead), *plan.transcript[plan.lead.num_messages :])
        return self._with_prompt(receiver, request, plan._replace(lead=plan.root, transcript=messages))

    # -- the cache ------------------------------------------------------------------------------------------------

    def _brought(self, receiver: ResidentModel, request: Request, plan: Plan) -> tuple[KVState, Cost | None]:
        """The state that a plan's prompt goes on from, where the receiver is, and what moving it there took.

        Whether a state on another device is moved was decided with the edge; without an edge it is decided here.
        """
        may_reuse = request.reuse and not any(edge.policy.route is Route.TEXT for edge in plan.edges)
        if not (may_reuse or plan.lead.provenance_digest) or not receiver.spec.capabilities.can("append"):
            return receiver.empty_state(), None
        limit = plan.num_tokens - request.num_fed
        found = self._materializer.longest_state(plan.lead, plan.prompt.tokens, limit, receiver, request.caller)
        if found is None:
            return receiver.empty_state(), None
        if not (nbytes := self._materializer.bytes_elsewhere(found, receiver)):
            return found, None
        facts = Facts(limit, found.num_tokens, nbytes, rates=self._models.rates(receiver))
        decision = plan.edges[0].decision if plan.edges else choose(Compatibility(Level.EXACT), EdgePolicy(), facts)
        estimated = decision.estimated
        is_worth_it = estimated is not None and estimated.move_bytes
        if not is_worth_it and not plan.lead.provenance_digest:  # a composed cache can't be made by reading its tokens
            return receiver.empty_state(), None
        return self._materializer.move(found, receiver, request.caller)

    # -- events ---------------------------------------------------------------------------------------------------

    def _report_delivery(self, request: Request, plan: Plan, state: KVState, duration_s: float) -> None:
        handle, num_inherited, call_site = plan.lead, plan.prompt.num_inherited, request.call_site
        if num_inherited < handle.num_tokens:
            self._keeper.emit(Diverged.of(handle, call_site, num_tokens=num_inherited, num_inherited=handle.num_tokens))
        missing = num_inherited - state.num_tokens
        if missing > handle.num_pending:
            self._keeper.emit(Rebuilt.of(handle, call_site, num_tokens=missing, reason="not in the pool"))
        self._keeper.emit(
            Delivered.of(
                handle,
                call_site,
                num_tokens=handle.num_tokens,
                nbytes=handle.nbytes,
                duration_s=duration_s,
                route=Route.CACHE.value,
                cache_read=min(state.num_tokens, num_inherited),
            )
        )

    def _report_failure(self, request: Request, handle: KVHandle, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        self._keeper.emit(
            FellBack.of(
                handle, request.call_site, from_route=Route.CACHE.value, to_route=Route.TEXT.value, reason=reason
            )
        )
