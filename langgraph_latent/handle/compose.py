"""Handles made of others: merged, or parts of them after a system prompt of one's own. It knows no tensors.

The result is a handle like any other. Its cache is made where it is first needed, and only on edges whose policy allows
level 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from langgraph_latent import public
from langgraph_latent.errors import ConfigError, HandleError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.repair import Repair
from langgraph_latent.handle.segment import Composition, tokens_of
from langgraph_latent.handle.selection import WHOLE, Excerpt, Selection, excerpt_if_any, excerpt_of
from langgraph_latent.handle.tokens import TOKEN_BYTES

MAX_BLOCKS = 4096
"""Blocks in one composition."""


@public
def merge(handles: Sequence[KVHandle]) -> KVHandle:
    """One handle of several: the first one as it is, then what is new in each other one, in the given order.

    What all share from the start is kept once. Of system prompts only the first handle's is kept; a handle of a system
    prompt alone adds nothing. A single handle is returned as it is.

    Raises `HandleError` for handles of several models or tenants, and `ConfigError` for none or too many blocks.
    """
    if not isinstance(handles, list | tuple) or not handles:
        raise ConfigError("there is nothing to merge; pass a list of at least one handle")
    handles = [KVHandle.given(handle) for handle in handles]
    _check_alike(handles)
    lead, *others = without_contained(handles) or handles[:1]
    num_shared = _shared_tokens([lead, *others])
    return composed(lead, [excerpt_if_any(other, WHOLE, num_shared) for other in others])


def compose_after(system_prefix: KVHandle, handles: Sequence[KVHandle], selections: Sequence[Selection]) -> KVHandle:
    """Selected parts of handles, one selection each, moved to stand after a system prefix of the reader's own.

    What all handles share from the start is taken once. The first one is not moved but continued where it begins with
    that very prefix and everything after it is taken.

    Raises what `merge` raises.
    """
    if not handles:
        raise ConfigError("there is nothing to compose; pass at least one handle")
    _check_alike([system_prefix, *handles])
    num_shared = _shared_tokens(handles)
    pairs = [*zip(handles, selections, strict=True)]
    if selections[0] == WHOLE and _begins_with(handles[0], system_prefix):
        return composed(handles[0], [_new_in(*pair, num_shared) for pair in pairs[1:]])
    (first, taken), *others = pairs
    # Of what is shared, the first selection may leave out what another one takes.
    begins = [num_shared if selection == taken or taken == WHOLE else 0 for _, selection in others]
    later = [_new_in(*pair, begin) for pair, begin in zip(others, begins, strict=True)]
    return composed(system_prefix, [excerpt_of(first, taken), *later])


def composed(base: KVHandle, excerpts: Sequence[Excerpt]) -> KVHandle:
    """A base with excerpts of other handles moved to its end; the base itself where they are empty.

    Raises `ConfigError` for too many blocks.
    """
    blocks = [block for excerpt in excerpts for block in excerpt.blocks]
    if not blocks:
        return base
    if len(blocks) > MAX_BLOCKS:
        raise ConfigError(f"{len(blocks):,} blocks are more than {MAX_BLOCKS:,}; select fewer and longer spans")
    last = blocks[-1].handle
    return base.extend(
        "moved",
        last.source,
        tokens_of(blocks),
        [message for excerpt in excerpts for message in excerpt.messages],
        bytes_per_token=max(block.handle.nbytes // block.handle.num_tokens for block in blocks),
        inputs_digest=last.segments[-1].inputs_digest,
        provenance=Composition(tuple(blocks)),
    )


def repaired(handle: KVHandle, repair: Repair | None) -> KVHandle:
    """A handle with a repair for its last segment, if that is composed and has none; else the handle as it is."""
    last = handle.segments[-1] if handle.segments else None
    if repair is None or last is None or not isinstance(last.provenance, Composition) or last.provenance.repair:
        return handle
    before = handle.first(len(handle.segments) - 1)
    return before.extend(
        last.kind,
        last.source,
        handle.tokens[len(before.tokens) :],
        last.messages,
        bytes_per_token=handle.nbytes // handle.num_tokens,
        inputs_digest=last.inputs_digest,
        provenance=replace(last.provenance, repair=repair),
    )


def system_prefix_of(handle: KVHandle) -> KVHandle:
    """The handle of a handle's leading system prompt alone, of no tokens where it has none."""
    leading = itertools.takewhile(lambda segment: segment.kind == "system", handle.segments)
    return handle.first(len(list(leading)))


def without_contained(handles: Sequence[KVHandle]) -> list[KVHandle]:
    """The handles without empty ones, duplicates and those that another one continues."""
    return [
        handle
        for index, handle in enumerate(handles)
        if handle.tokens
        and not any(
            _continues(other, handle) and (other.num_tokens > handle.num_tokens or at < index)
            for at, other in enumerate(handles)
            if at != index
        )
    ]


def _continues(other: KVHandle, handle: KVHandle) -> bool:
    """Whether another handle's cache begins with a handle's."""
    is_alike = other.model == handle.model and other.tokens.startswith(handle.tokens)
    return is_alike and (
        other.provenance_digest == handle.provenance_digest
        or (not handle.provenance_digest and other.num_plain >= handle.num_tokens)
    )


def _new_in(handle: KVHandle, selection: Selection, begin: int) -> Excerpt:
    """What a selection takes from `begin` on, maybe nothing. Raises `ConfigError` where it takes nothing at all."""
    return excerpt_if_any(handle, selection, begin) if excerpt_of(handle, selection).blocks else Excerpt([], [])


def _begins_with(handle: KVHandle, system_prefix: KVHandle) -> bool:
    """Whether a handle's system prompt is the prefix, token for token."""
    system = [*itertools.takewhile(lambda span: span.kind == "system", handle.spans)]
    return handle.tokens[: (system[-1].end if system else 0) * TOKEN_BYTES] == system_prefix.tokens


def _check_alike(handles: Sequence[KVHandle]) -> None:
    lead = handles[0]
    for other in handles:
        if not isinstance(other, KVHandle):
            raise HandleError(f"{other!r} is not a KVHandle; `workspace.handle(reply)` gives a reply's")
        if (other.model, other.tenant) != (lead.model, lead.tenant):
            raise HandleError(
                f"handles {lead.id} and {other.id} are of different models or tenants; merge those of one"
            )


def _shared_tokens(handles: Sequence[KVHandle]) -> int:
    """Number of tokens of the leading segments that all handles share."""
    columns = zip(*(handle.segments for handle in handles), strict=False)
    shared = itertools.takewhile(lambda column: len({segment.digest for segment in column}) == 1, columns)
    return sum(column[0].num_tokens for column in shared)
