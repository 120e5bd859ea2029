"""Tokens of one cache appended to another: keys re-rotated to their new positions, values as they are.

It knows states and rotations; not which model, handle or text they are of.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from langgraph_latent.kv.rope import Rotations
from langgraph_latent.kv.state import KVState, KVTail


class Piece(NamedTuple):
    """Tokens of a state, by position, (tokens,), ascending; the state must keep a key and value for each of them."""

    state: KVState
    positions: torch.Tensor

    @classmethod
    def of(cls, state: KVState) -> Piece:
        """All tokens of a state."""
        return cls(state, torch.arange(state.num_tokens))


def moved_after(start: KVState, pieces: Sequence[Piece], rotations: Rotations) -> KVState:
    """A state of `start`'s tokens and, moved after them, those of the pieces, one after the other."""
    with start.append(start.num_tokens + sum(len(piece.positions) for piece in pieces)) as tail:
        append_moved(tail, pieces, rotations)
        return tail.seal()


def append_moved(tail: KVTail, pieces: Sequence[Piece], rotations: Rotations) -> None:
    """Append the tokens of the pieces, moved. Raises `RuntimeError` where a piece's tokens are gone."""
    for state, positions in pieces:
        if not state.has_tokens_from(int(positions[0])):
            raise RuntimeError("the state does not keep all of these tokens: its windows have moved past them")
        deltas = torch.arange(tail.num_tokens, tail.num_tokens + len(positions)) - positions
        for layer, store, kind, turns in zip(tail.layers, state.buffer.layers, state.kinds, rotations, strict=True):
            if kind.has_tokens:
                begin = int(positions[0])
                at = (positions - begin).to(_device(store.keys))
                taken = [part.index_select(2, at) for part in store.view(begin, int(positions[-1]) + 1)]
                pairs = zip(taken, turns, strict=True)
                layer.update(*(part if turn is None else turn.shift(part, deltas) for part, turn in pairs))
        tail.fed(len(positions))


def _device(tensor: torch.Tensor | None) -> torch.device:
    assert tensor is not None, "a layer that was never written has no tokens"
    return tensor.device
