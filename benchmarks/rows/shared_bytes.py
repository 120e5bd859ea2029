"""Bytes that a chain of 4 agents on one context holds, and copies of the prefix that it makes."""

from __future__ import annotations

import itertools

from benchmarks.bench import QUESTIONS, Bench, user
from benchmarks.harness import Figure, Result, at_most
from benchmarks.rows.decode import storage
from langgraph_latent import ChatLatent, KVHandle, LatentWorkspace
from langgraph_latent.handle.tokens import TOKEN_BYTES
from langgraph_latent.kv.state import KVState

CONTEXT = 1024
WRITTEN = 16


def run(bench: Bench) -> Result:
    """Counted, not timed, so once is enough; in a workspace of its own, whose pool holds nothing else."""
    result = Result("cache bytes of a chain of 4 agents on one context")
    bench.ticker.expect(1)
    with LatentWorkspace() as workspace:
        chat = ChatLatent(model=bench.name, workspace=workspace)
        states = [_state(bench, workspace, handle) for handle in _chain(bench, chat, workspace)]
        used = workspace.size_info().pool.used_bytes
        workspace.check_integrity()
    token = bench.model.spec.bytes_per_token
    sizes = {id(state.buffer): state.num_tokens * token for state in states}  # of each storage, its longest state
    one = states[-1].num_tokens * token
    places = [storage(state) for state in states]
    copies = sum(now != then for then, now in itertools.pairwise(places))
    result.figures = [
        Figure("bytes, against one cache of the final length", "of", (sum(sizes.values()) / one,), at_most(1.1)),
        Figure("bytes with spare capacity", "of", (used / one,), at_most(1.25)),
        Figure("copies of the prefix", "count", (copies,), at_most(0)),
        Figure(
            "bytes, were each agent to hold a copy", "of", (sum(state.num_tokens for state in states) * token / one,)
        ),
    ]
    result.samples = {"bytes of one cache": [one], "bytes in use": [used]}
    result.checks["the whole chain lies in one storage"] = len(sizes) == 1
    result.notes["tokens"] = [state.num_tokens for state in states]
    bench.ticker.step()
    return result


def _chain(bench: Bench, chat: ChatLatent, workspace: LatentWorkspace) -> list[KVHandle]:
    """One agent reads the context, three more answer, each after the one before."""
    handles = [chat.read([*bench.context(bench.settings.context(CONTEXT), seed=6_000_000), user(QUESTIONS[0])])]
    for question in QUESTIONS[1:]:
        reply = chat.invoke([user(question)], inherit=handles[-1], max_tokens=bench.settings.written(WRITTEN))
        handles.append(workspace.handle(reply))
    return handles


def _state(bench: Bench, workspace: LatentWorkspace, handle: KVHandle) -> KVState:
    """The state that the pool keeps for a handle, which lacks a last token that was sampled but not fed yet."""
    pending = int(handle.segments[-1].kind == "generated")
    length = len(handle.tokens) // TOKEN_BYTES - pending
    state = workspace.pool.longest_prefix(bench.namespace, handle.tokens, length)
    assert state is not None
    assert state.num_tokens == length, "the pool keeps every agent's state"
    return state
