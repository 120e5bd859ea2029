"""The part of a cache that a provenance describes: blocks moved, repaired and weighted, or latent steps.

It knows provenances, states and one model; not where states are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from langgraph_latent.engine.limits import Limits
from langgraph_latent.engine.model import ResidentModel
from langgraph_latent.errors import HandleError
from langgraph_latent.handle.handle import KVHandle
from langgraph_latent.handle.segment import Block, Composition, LatentSteps, Segment
from langgraph_latent.kv.move import Piece, append_moved
from langgraph_latent.kv.repair import EARLY_LAYER, first_of_blocks, most_deviating
from langgraph_latent.kv.state import KVState

SourceStates = Mapping[str, KVState]
"""The states of the handles that blocks come from, by id."""


class Assembled(NamedTuple):
    """A state with what a provenance adds, and how many tokens of it were recomputed."""

    state: KVState
    num_repaired: int


def append_blocks(
    provenance: Composition,
    ids: Sequence[int],
    start: KVState,
    model: ResidentModel,
    sources: SourceStates,
    limits: Limits,
) -> Assembled:
    """`start` with the blocks of a composition appended; `ids` are their token ids. Weights are left to `biases_of`."""
    begin = start.num_tokens
    pieces = _pieces(provenance.blocks, sources)
    with start.append(begin + len(ids)) as tail:
        append_moved(tail, pieces, model.rotations)
        chosen = _chosen(provenance, ids, start, tail.seal(), model, limits) if provenance.repair else []
        if chosen:
            model.recompute([ids[index] for index in chosen], [begin + index for index in chosen], tail, limits)
        outside = [each for piece in pieces for each in piece.state.outside]
        return Assembled(tail.seal().with_outside(outside), len(chosen))


def append_latent_steps(
    provenance: LatentSteps, last: int, start: KVState, model: ResidentModel, limits: Limits
) -> Assembled:
    """`start` with the token `last` and latent steps appended."""
    with start.append(start.num_tokens + 1 + provenance.steps) as tail:
        model.think(last, provenance.steps, tail, limits)
        return Assembled(tail.seal(), 0)


def _pieces(blocks: Sequence[Block], sources: SourceStates) -> list[Piece]:
    """The blocks as pieces of states; neighbours of one handle in one piece."""
    pieces: list[Piece] = []
    last: KVHandle | None = None
    for block in blocks:
        positions = torch.arange(block.begin, block.end)
        if last is not None and block.handle.id == last.id and block.begin > int(pieces[-1].positions[-1]):
            pieces[-1] = pieces[-1]._replace(positions=torch.cat([pieces[-1].positions, positions]))
        else:
            pieces.append(Piece(sources[block.handle.id], positions))
        last = block.handle
    return pieces


def _chosen(
    provenance: Composition,
    ids: Sequence[int],
    start: KVState,
    moved: KVState,
    model: ResidentModel,
    limits: Limits,
) -> list[int]:
    """Indices of the tokens that are recomputed; latent steps, which have no token ids, never are."""
    assert provenance.repair is not None
    latent = set(_latent(provenance.blocks))
    usable = [index for index in range(len(ids)) if index not in latent]
    repair = provenance.repair
    if repair.ratio == 1:
        return usable
    if repair.strategy == "boundary":
        first = first_of_blocks([block.num_tokens for block in provenance.blocks], repair.ratio)
        return sorted(set(first.tolist()).difference(latent))
    layer = [index for index, kind in enumerate(model.kinds) if kind.has_tokens][: EARLY_LAYER + 1][-1]
    after = model.early_values(ids, start, layer, limits)
    _, before = moved.buffer.layers[layer].view(start.num_tokens, moved.num_tokens)
    chosen = most_deviating(before[:, :, usable], after[:, :, usable], repair.ratio)
    return [usable[index] for index in chosen.tolist()]


def _latent(blocks: Sequence[Block]) -> list[int]:
    """Indices of the tokens of blocks that are latent steps."""
    found, at = list[int](), 0
    for block in blocks:
        for span in block.handle.spans:
            if span.kind == "latent":
                first, last = max(span.begin, block.begin), min(span.end, block.end)
                found += range(at + first - block.begin, at + last - block.begin)
        at += block.num_tokens
    return found


def biases_of(handle: KVHandle, model: ResidentModel) -> tuple[torch.Tensor, ...]:
    """Per layer, what is added to the scores of a handle's tokens; () where all of them count in full.

    Raises `HandleError` for layers that the model does not have.
    """
    compositions = handle.compositions
    if not any(composition.is_weighted for composition in compositions):
        return ()
    blocks = [block for composition in compositions for block in composition.blocks]
    last = max((block.layers[-1] for block in blocks if block.layers), default=0)
    if last >= len(model.kinds):
        raise HandleError(f"a block names layer {last}, but the model's layers are 0 to {len(model.kinds) - 1}")
    return tuple(
        torch.cat([_bias(segment, layer) for segment in handle.segments]).to(model.device)
        for layer in range(len(model.kinds))
    )


def _bias(segment: Segment, layer: int) -> torch.Tensor:
    if not isinstance(segment.provenance, Composition):
        return torch.zeros(segment.num_tokens)
    return torch.cat([_block_bias(block, layer) for block in segment.provenance.blocks])


def _block_bias(block: Block, layer: int) -> torch.Tensor:
    is_seen = block.layers is None or layer in block.layers
    return torch.full((block.num_tokens,), block.weight if is_seen else 0.0).log()
