"""Makes the part of a cache that a recipe describes: blocks moved, repaired and weighted, or latent steps.

It knows recipes, states and one model; not where states are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from langgraph_latent.errors import HandleError
from langgraph_latent.handle import KVHandle
from langgraph_latent.kv.compose import Piece, append_moved
from langgraph_latent.kv.repair import EARLY_LAYER, first_of_blocks, most_deviating
from langgraph_latent.kv.state import KVState
from langgraph_latent.models.resident import ResidentModel
from langgraph_latent.recipe import Block, Composition, Repair, Thought

Origins = Callable[[KVHandle], KVState]
"""The state of a handle that blocks come from."""


class Made(NamedTuple):
    """A state with what a recipe adds, and how many tokens of it were computed anew."""

    state: KVState
    num_repaired: int


def compose(recipe: Composition, ids: Sequence[int], start: KVState, model: ResidentModel, origins: Origins) -> Made:
    """`start` and behind it the blocks of a recipe, whose token ids are `ids`.

    Raises `HandleError` for layers that the model does not have.
    """
    begin = start.num_tokens
    pieces = _pieces(recipe.blocks, origins)
    with start.append(begin + len(ids)) as tail:
        append_moved(tail, pieces, model.rotations)
        chosen = _chosen(recipe, ids, start, tail.seal(), model) if recipe.repair else []
        if chosen:
            model.rewrite([ids[index] for index in chosen], [begin + index for index in chosen], tail)
        state = tail.seal()
    if recipe.is_weighted or start.biases:
        state = state.with_biases(_biases(recipe.blocks, start, len(model.kinds), model.device))
    return Made(state, len(chosen))


def think(recipe: Thought, last: int, start: KVState, model: ResidentModel) -> Made:
    """`start`, and behind it the token `last` and latent steps."""
    with start.append(start.num_tokens + 1 + recipe.steps) as tail:
        model.think(last, recipe.steps, tail)
        return Made(tail.seal(), 0)


def biases_of(handle: KVHandle, num_layers: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a handle's recipes add to the scores of its tokens, by layer; () for nothing."""
    recipes = [segment.recipe for segment in handle.segments]
    if not any(isinstance(recipe, Composition) and recipe.is_weighted for recipe in recipes):
        return ()
    return tuple(
        torch.cat(
            [
                part.to(device)
                for segment in handle.segments
                for part in (
                    [_bias(block, layer) for block in segment.recipe.blocks]
                    if isinstance(segment.recipe, Composition)
                    else [torch.zeros(segment.num_tokens)]
                )
            ]
        )
        for layer in range(num_layers)
    )


def _pieces(blocks: Sequence[Block], origins: Origins) -> list[Piece]:
    """The blocks as pieces of states; neighbours of one handle in one piece."""
    pieces: list[Piece] = []
    last: KVHandle | None = None
    for block in blocks:
        positions = torch.arange(block.begin, block.end)
        if last is not None and block.handle.id == last.id and block.begin > int(pieces[-1].positions[-1]):
            pieces[-1] = pieces[-1]._replace(positions=torch.cat([pieces[-1].positions, positions]))
        else:
            pieces.append(Piece(origins(block.handle), positions))
        last = block.handle
    return pieces


def _chosen(recipe: Composition, ids: Sequence[int], start: KVState, moved: KVState, model: ResidentModel) -> list[int]:
    """Indices of the tokens that are computed anew; latent steps, which have no token ids, never are."""
    assert recipe.repair is not None
    chosen = _wanted(recipe.repair, recipe.blocks, ids, start, moved, model)
    latent = set(_latent(recipe.blocks)) if recipe.has_thoughts else ()
    return [index for index in chosen if index not in latent]


def _wanted(
    repair: Repair, blocks: Sequence[Block], ids: Sequence[int], start: KVState, moved: KVState, model: ResidentModel
) -> list[int]:
    if repair.ratio == 1:
        return list(range(len(ids)))
    if repair.strategy == "boundary":
        return [int(index) for index in first_of_blocks([block.num_tokens for block in blocks], repair.ratio)]
    layer = [index for index, kind in enumerate(model.kinds) if kind.has_tokens][EARLY_LAYER]
    after = model.early_values(ids, start, layer)
    _, before = moved.buffer.layers[layer].view(start.num_tokens, moved.num_tokens)
    return [int(index) for index in most_deviating(before, after, repair.ratio)]


def _latent(blocks: Sequence[Block]) -> list[int]:
    found, at = list[int](), 0
    for block in blocks:
        for span in block.handle.spans:
            if span.kind == "latent":
                first, last = max(span.begin, block.begin), min(span.end, block.end)
                found += range(at + first - block.begin, at + last - block.begin)
        at += block.num_tokens
    return found


def _biases(blocks: Sequence[Block], start: KVState, num_layers: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """Per layer, what is added to the scores of the start's tokens and of the blocks'."""
    last = max((block.layers[-1] for block in blocks if block.layers), default=0)
    if last >= num_layers:
        raise HandleError(f"a block names layer {last}, but the model's layers are 0 to {num_layers - 1}")
    biases = []
    for layer in range(num_layers):
        before = start.biases[layer] if start.biases else torch.zeros(0, device=device)
        head = torch.nn.functional.pad(before[: start.num_tokens], (0, max(0, start.num_tokens - len(before))))
        biases.append(torch.cat([head, *(_bias(block, layer).to(device) for block in blocks)]))
    return tuple(biases)


def _bias(block: Block, layer: int) -> torch.Tensor:
    is_seen = block.layers is None or layer in block.layers
    return torch.full((block.num_tokens,), block.weight if is_seen else 0.0).log()
