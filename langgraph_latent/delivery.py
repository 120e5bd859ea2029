"""What a chat model asks of a workspace and what it gets, and how several handles become one conversation. Pure.

It knows handles, states and decisions; not where they are kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from langgraph_latent.compat import Level
from langgraph_latent.events import Origin
from langgraph_latent.handle import KVHandle, Message
from langgraph_latent.kv.state import KVState
from langgraph_latent.models.template import Framing
from langgraph_latent.router import Route, RouteDecision


class Request(NamedTuple):
    """What a chat model asks for: new messages behind inherited handles, in a framing; with `reply`, up to where an
    answer begins."""

    messages: Sequence[Message]
    framing: Framing
    handles: Sequence[KVHandle]
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


def told_by(handles: Sequence[KVHandle]) -> tuple[Message, ...]:
    """The messages of several handles in order; what a later one shares with the first from the start is told once."""
    told: list[Message] = list(handles[0].messages) if handles else []
    for handle in handles[1:]:
        pairs = zip(handle.messages, handles[0].messages, strict=False)
        shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        told += handle.messages[shared:]
    return tuple(told)


def without_thoughts(messages: Sequence[Message]) -> tuple[Message, ...]:
    """The messages without those that stand for latent steps: these say nothing as text."""
    return tuple(each for each in messages if each["role"] != "assistant" or each["content"] or each.get("tool_calls"))


def unrouted(cache_read: int) -> RouteDecision:
    """How a request that inherits nothing was served."""
    if cache_read:
        return RouteDecision(Route.CACHE, Level.EXACT, "prefix", f"{cache_read} leading tokens were in the pool")
    return RouteDecision(Route.TEXT, Level.TEXT, "nothing_inherited", "nothing was inherited, nothing was in the pool")
