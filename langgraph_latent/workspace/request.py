"""A request, the plan to serve it and what is delivered for it; several handles as one conversation. Pure.

It knows handles, states and decisions; not where they are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from langgraph_latent.engine.limits import NO_LIMITS, Limits
from langgraph_latent.errors import RouteError
from langgraph_latent.events import NOWHERE, CallSite
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.message import Message
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.state import KVState
from langgraph_latent.prompt.prompt import RenderedPrompt
from langgraph_latent.prompt.template import TemplateInputs
from langgraph_latent.router.choice import RouteDecision
from langgraph_latent.router.policy import EdgePolicy, Route
from langgraph_latent.spec.compat import Level

EMPTY_ANSWER: Message = {"role": "assistant", "content": ""}
"""Stands for latent steps, which have no text."""


class Caller(NamedTuple):
    """Who waits for work: where in a graph it is asked for, and what the caller puts up with.

    `takes_unproven` says whether tensors that came from outside and are not proven may be used.
    """

    call_site: CallSite = NOWHERE
    limits: Limits = NO_LIMITS
    takes_unproven: bool = False


NOBODY = Caller()
"""Of work that no request waits for."""


class Request(NamedTuple):
    """What a chat model asks for.

    Attributes:
        messages: new ones, after those of the inherited handles.
        template_inputs: what the template is given beside the messages.
        handles: what is inherited.
        reply: whether the prompt goes on to where an answer begins.
        reuse: whether kept caches may be used.
        caller: who waits for it.
    """

    messages: Sequence[Message]
    template_inputs: TemplateInputs
    handles: Sequence[KVHandle]
    reply: bool
    reuse: bool
    caller: Caller = NOBODY

    @property
    def call_site(self) -> CallSite:
        """Where in a graph it is asked for."""
        return self.caller.call_site

    @property
    def num_fed(self) -> int:
        """How many tokens must be fed: an answer's first token follows the logits of one that is."""
        return 1 if self.reply else 0


class Edge(NamedTuple):
    """A handle on its way into a request, what its edge may do and how it is served."""

    handle: KVHandle
    policy: EdgePolicy
    decision: RouteDecision


class Plan(NamedTuple):
    """How a request is to be served.

    Attributes:
        edges: one per handle.
        lead: the handle whose cache is continued; `root` where there is none.
        transcript: all messages, those of the lead included.
        root: the handle of no tokens.
        prompt: of the lead and the messages after it.
    """

    edges: list[Edge]
    lead: KVHandle
    transcript: tuple[Message, ...]
    root: KVHandle
    prompt: RenderedPrompt = RenderedPrompt(b"", 0)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.tokens) // TOKEN_BYTES

    @property
    def may_fall_back(self) -> bool:
        """Whether a failing cache may be replaced by re-reading."""
        return all(edge.policy.may_fall_back for edge in self.edges)

    @property
    def takes_unproven(self) -> bool:
        """Whether tensors that came from outside and are not proven may be used: no more than level 1 is promised."""
        return bool(self.edges) and all(Level.MOVED in edge.policy.levels for edge in self.edges)

    def diverged(self, num_cached: int, crop_refusal: str = "") -> Plan:
        """The plan where the prompt keeps only the first tokens of the lead.

        Of these, so many are cached; the others are read, or computed again for the cache where text is forbidden.
        Raises `RouteError` where the rest is too little for a cache edge, or can't be one alone (`crop_refusal`).
        """
        num_kept, num_inherited = self.prompt.num_inherited, self.lead.num_tokens
        first, *others = self.edges
        num_reused = num_kept if not (first.policy.may_read or crop_refusal) else min(num_kept, num_cached)
        decision = first.decision.diverged(num_kept, num_reused, num_inherited, crop_refusal)
        if decision.route is Route.TEXT and not first.policy.may_read:
            raise RouteError(
                f"no route: {decision.reason}, so handle {self.lead.id} would be re-read as text, and "
                f"{first.policy.text_refusal}. Allow Level.TEXT, or inherit under the tools and template options with "
                "which it was made."
            )
        return self._replace(edges=[first._replace(decision=decision), *others], lead=self.root)


class Delivery(NamedTuple):
    """What a receiver starts from.

    Attributes:
        tokens: the prompt's, packed.
        state: covers a prefix of the tokens.
        base: the handle to extend; its tokens are a prefix of the prompt.
        messages: of the prompt, those that the base does not have.
        decision: how the edge was served.
        may_fall_back: False where a policy wants failures raised.
    """

    tokens: bytes
    state: KVState
    base: KVHandle
    messages: tuple[Message, ...]
    decision: RouteDecision
    may_fall_back: bool

    def missing(self, num_left: int = 0) -> bytes:
        """The prompt's tokens that are not in the state, but for the last `num_left`."""
        return self.tokens[self.state.num_tokens * TOKEN_BYTES : len(self.tokens) - num_left * TOKEN_BYTES]


def joined_transcript(conversations: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    """Several conversations in order; what a later one shares with the first from the start is kept once."""
    joined: list[Message] = list(conversations[0]) if conversations else []
    for messages in conversations[1:]:
        pairs = zip(messages, conversations[0], strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        joined += messages[shared:]
    return tuple(joined)


def transcript(handle: KVHandle) -> tuple[Message, ...]:
    """A handle's messages without those that stand for latent steps: as text these are empty."""
    if not handle.has_latent_steps:
        return handle.messages
    return tuple(message for message in handle.messages if message != EMPTY_ANSWER)


def unrouted(cache_read: int) -> RouteDecision:
    """How a request that inherits nothing was served."""
    if cache_read:
        return RouteDecision(Route.CACHE, Level.EXACT, "prefix", f"{cache_read} leading tokens were in the pool")
    return RouteDecision(Route.TEXT, Level.TEXT, "nothing_inherited", "nothing was inherited, nothing was in the pool")
