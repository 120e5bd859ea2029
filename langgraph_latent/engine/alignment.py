"""From a model's last hidden states back to its input embeddings: what a latent step feeds. It knows two matrices.

Source: LatentMAS (arXiv 2511.20639), with its regularised least squares solved in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

RIDGE = 1e-5
CHUNK_TOKENS = 8192


class Alignment:
    """Maps hidden states to embeddings of the usual length.

    Args:
        embed: from token ids, (tokens,), to their input embeddings, (tokens, hidden).
        vocab_size: how many tokens there are.
        head: the output embeddings, (vocab, hidden). None where they are the input embeddings, or there are none: then
            nothing is solved, the map would be the identity.
    """

    @torch.no_grad()
    def __init__(
        self, embed: Callable[[torch.Tensor], torch.Tensor], vocab_size: int, head: torch.Tensor | None
    ) -> None:
        device = next(embed.parameters()).device if isinstance(embed, torch.nn.Module) else None
        length, gram, cross = 0.0, torch.zeros(()), torch.zeros(())
        for begin in range(0, vocab_size, CHUNK_TOKENS):
            rows = embed(torch.arange(begin, min(begin + CHUNK_TOKENS, vocab_size), device=device)).float()
            length += float(rows.norm(dim=-1).sum())
            if head is not None:
                part = head[begin : begin + len(rows)].float()
                gram, cross = gram.to(part) + part.T @ part, cross.to(part) + part.T @ rows.to(part)
        self._norm = length / vocab_size
        self._map = None
        if head is not None:
            gram.diagonal().add_(RIDGE)
            self._map = torch.linalg.solve(gram, cross)

    def embedding(self, hidden: torch.Tensor) -> torch.Tensor:
        """What to feed after a hidden state, both (..., hidden), of its dtype; as long as embeddings are on average."""
        aligned = hidden.float() if self._map is None else hidden.float() @ self._map
        return (aligned * (self._norm / aligned.norm(dim=-1, keepdim=True).clamp(min=1e-6))).to(hidden.dtype)
