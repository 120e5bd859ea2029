"""`explain`: a decision's whole reasoning as text, by the functions that decide. It knows no workspace, no tensors."""

from __future__ import annotations

from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.router.choice import (
    OPTIONS,
    Facts,
    RouteDecision,
    ServingOption,
    Situation,
    choose,
    choose_option,
    is_cheaper,
)
from langgraph_latent.router.policy import EdgePolicy
from langgraph_latent.router.router import EdgeRouter
from langgraph_latent.spec.spec import ModelSpec


class Explanation(str):
    """A text that a notebook shows as it is, and the decision it explains (None where there is no route)."""

    decision: RouteDecision | None = None

    def __repr__(self) -> str:
        return str(self)


def explain(router: EdgeRouter, handle: KVHandle, situation: Situation, node: str = "") -> Explanation:
    """How a router decides the edge from a handle to a receiver in a node."""
    sender, receiver, compatibility, facts = situation
    policy, pattern = router.policy_for(handle, node), router.match(handle.source, node)
    asked, facts = facts, facts.under(policy)
    situation = situation._replace(facts=facts)
    taken, code, reason = choose_option(compatibility, policy, facts)
    level = f"level {int(compatibility.level)} {compatibility.level.name}"
    lines = [
        ("edge", f"{handle.source!r} to {node!r}"),
        ("sender", _model(sender)),
        ("receiver", _model(receiver)),
        ("models", f"{level}: {'the same model' if not compatibility.differences else 'they differ'}"),
        *(("", line) for line in (*compatibility.reasons, *compatibility.notes)),
        ("policy", f"of {pattern}" if pattern else "the router's default"),
        ("", str(policy)),
        ("handle", f"{handle.id}, {facts.num_tokens:,} tokens, {facts.cached_tokens:,} of them in the pool"),
        ("", f"{facts.move_bytes:,} bytes to move, {'first' if facts.first else 'after another handle'}"),
        ("rates", str(facts.rates)),
        *((option.name, _verdict(option, taken, situation, policy)) for option in OPTIONS),
        ("decision", _promise(taken, facts) if taken else "refused"),
        ("", f"{code}: {reason}"),
    ]
    explanation = Explanation("\n".join(f"{name:<10}{text}" for name, text in lines))
    if taken is not None:
        explanation.decision = choose(compatibility, policy, asked)
    return explanation


def _model(spec: ModelSpec | str) -> str:
    if isinstance(spec, str):
        return f"an unknown model, {spec}"
    return f"{spec.name} ({spec.architecture}), {spec.identity}"


def _verdict(option: ServingOption, taken: ServingOption | None, situation: Situation, policy: EdgePolicy) -> str:
    """What an option promises and costs, and whether and why it is taken."""
    facts = situation.facts
    verdict = "taken"
    if refusal := option.refusal(situation.compatibility, policy, facts):
        verdict = f"can't be taken: {refusal}"
    elif taken is not None and option is not taken:
        is_dearer = is_cheaper(taken, option, facts)
        verdict = f"possible, but {'dearer' if is_dearer else 'not clearly cheaper'} than {taken.name}"
    return f"{_promise(option, facts)}; {option.cost(facts)}; {verdict}"


def _promise(option: ServingOption, facts: Facts) -> str:
    level = option.level_of(facts)
    return f"{option.route.value}, level {int(level)} {level.name}"
