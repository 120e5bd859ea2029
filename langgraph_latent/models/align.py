"""From a model's last hidden states back to its input embeddings: what a latent step feeds. It knows two matrices.

Source: LatentMAS (arXiv 2511.20639), with its regularised least squares solved in float32.
"""

from __future__ import annotations

import torch

RIDGE = 1e-5


class Alignment:
    """Maps hidden states to embeddings of the usual length.

    Args:
        embeddings: the input embeddings, (vocab, hidden).
        head: the output embeddings, (vocab, hidden), None where there are none. Where they are the input embeddings
            themselves nothing is solved: the map would be the identity.
    """

    def __init__(self, embeddings: torch.Tensor, head: torch.Tensor | None) -> None:
        rows = embeddings.detach().float()
        self._norm = rows.norm(dim=-1).mean()
        is_tied = head is None or head is embeddings or head.data_ptr() == embeddings.data_ptr()
        self._map = None if is_tied or head is None else _solved(head.detach().float(), rows)

    def embedding(self, hidden: torch.Tensor) -> torch.Tensor:
        """What to feed after a hidden state, both (..., hidden), of its dtype; as long as embeddings are on average."""
        aligned = hidden.float() if self._map is None else hidden.float() @ self._map
        return (aligned * (self._norm / aligned.norm(dim=-1, keepdim=True).clamp(min=1e-6))).to(hidden.dtype)


def _solved(head: torch.Tensor, embeddings: torch.Tensor) -> torch.Tensor:
    """The map W with head @ W nearest to the embeddings, (hidden, hidden)."""
    gram = head.T @ head
    gram.diagonal().add_(RIDGE)
    return torch.linalg.solve(gram, head.T @ embeddings)
