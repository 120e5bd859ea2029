"""What a composed handle means for its route: which edges have a say, and what its receiver must be able to do.

It knows handles, not policies.
"""

from __future__ import annotations

from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.segment import Composition


def needs_packed_attention(handle: KVHandle) -> bool:
    """Whether a handle's cache is made by packed attention: something in it is repaired, or not seen in full."""
    return any(
        composition.repair is not None or composition.is_weighted
        for each in (handle, *handle.source_handles)
        for composition in each.compositions
    )


def parts_of(handle: KVHandle) -> list[KVHandle]:
    """The handles that a handle was composed of: its source handles, and what blocks were appended to.

    System prompts are left out: they come from no edge.
    """
    leads = [
        each.first(number)
        for each in (*handle.source_handles, handle)
        for number, segment in enumerate(each.segments)
        if isinstance(segment.provenance, Composition)
    ]
    return [*handle.source_handles, *(lead for lead in leads if lead.segments and lead.segments[-1].kind != "system")]
