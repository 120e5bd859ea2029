"""Which tokens of a cache matter, read off its keys and values alone: what is kept where there is no room for all.

It knows states and scores; not handles, models or text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from langgraph_latent.checks import check_whole_number, is_whole_number
from langgraph_latent.errors import ConfigError, UnsupportedLayerError
from langgraph_latent.kv.state import KVState

SINKS, WINDOW = 4, 32
"""First and last tokens that are kept whatever they score: attention leans on the first ones (StreamingLLM, arXiv
2309.17453), and whoever goes on needs the last ones."""
MAX_SPANS = 1024
"""Runs of tokens in one answer; where there would be more, scores are averaged over neighbours first."""


Scorer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""How much each token of one layer matters, higher is kept.

Called with keys, after RoPE, and values, each (batch, kv_heads, seq, head_dim); returns (batch, kv_heads, seq), finite.
"""


def key_norm(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Keys of a low L2 norm get attention, so the score is minus the norm (arXiv 2406.11430).

    No score that needs the cache alone was clearly better. Share of the context's effect that is kept at 75/50/25 % of
    the tokens with SmolLM2-135M, ten passages of 70 to 274 tokens, 4 sinks and a window of 32, measured as by
    `importance.effect_kept`: key norm .98/.89/.33, value norm over key norm .97/.91/.31, value norm .96/.81/.25, keys
    unlike their mean (KeyDiff, arXiv 2504.15364) .96/.85/.27, leverage of values .97/.86/.21, random tokens
    .89/.77/.23, the last tokens .90/.78/.27.
    """
    return -keys.norm(dim=-1)


def budget_spans(
    state: KVState, k: int, scorer: Scorer = key_norm, sinks: int = SINKS, window: int = WINDOW
) -> tuple[tuple[int, int], ...]:
    """The `k` tokens of a state that are kept, as spans (begin, end), ascending and apart.

    The first `sinks` tokens are kept, then the last `window`, as far as the budget goes; of those between, the ones
    that score highest on average over heads and layers, each layer brought to mean 0 and deviation 1. Equal scores:
    the earlier one.

    Raises `ConfigError` for an impossible budget and for a scorer that returns something else, `UnsupportedLayerError`
    for a state whose layers do not keep a key of every token.
    """
    check_budget(k, sinks, window)
    if not state.has_tokens_from(0):
        raise UnsupportedLayerError(
            "not every layer of this cache keeps a key for each of its tokens, so none can be dropped; pass all of it"
        )
    num_tokens = state.num_tokens
    if k >= num_tokens:
        return ((0, num_tokens),) if num_tokens else ()
    scores = _scores(state, scorer)
    spans, width = _spans(_best(scores, k, sinks, window)), 1
    while len(spans) > MAX_SPANS:
        width = 2 * width + 1
        spans = _spans(_best(_smoothed(scores, width), k, sinks, window))
    return spans


def check_budget(k: int, sinks: int, window: int) -> None:
    """Raise `ConfigError` for a budget that is not a whole number of tokens, or is below one."""
    if not is_whole_number(k, 1):
        raise ConfigError(f"a budget of {k!r} tokens is impossible; it is a whole number, 1 or above")
    for name, value in (("sinks", sinks), ("window", window)):
        check_whole_number(name, value, unit="tokens")


def _scores(state: KVState, scorer: Scorer) -> torch.Tensor:
    """Every token's score, (tokens,), float32, on the CPU."""
    total = torch.zeros(state.num_tokens)
    for kind, store in zip(state.kinds, state.buffer.layers, strict=True):
        if kind.has_tokens:
            keys, values = store.view(0, state.num_tokens)
            scores = scorer(keys, values).float()
            if scores.shape != keys.shape[:3] or not scores.isfinite().all():
                raise ConfigError(
                    f"the scorer returned {tuple(scores.shape)}; it must return finite scores of shape "
                    f"{tuple(keys.shape[:3])}, (batch, kv_heads, seq)"
                )
            total += _standard(scores.mean(dim=(0, 1)).cpu())
    return total


def _standard(scores: torch.Tensor) -> torch.Tensor:
    """Brought to mean 0 and deviation 1; all 0 where they are equal."""
    apart = scores - scores.mean()
    return apart / apart.square().mean().sqrt().clamp_min(torch.finfo(scores.dtype).tiny)


def _smoothed(scores: torch.Tensor, width: int) -> torch.Tensor:
    """The mean over `width` neighbours, an odd number."""
    return torch.nn.functional.avg_pool1d(
        scores[None], width, stride=1, padding=width // 2, count_include_pad=False
    ).squeeze(0)


def _best(scores: torch.Tensor, k: int, sinks: int, window: int) -> list[int]:
    """Indices of the tokens kept, ascending."""
    num_tokens = len(scores)
    first, last = range(min(sinks, num_tokens)), range(num_tokens - 1, max(num_tokens - window, 0) - 1, -1)
    others = scores.argsort(descending=True, stable=True).tolist()
    return sorted(list(dict.fromkeys([*first, *last, *others]))[:k])


def _spans(indices: list[int]) -> tuple[tuple[int, int], ...]:
    spans: list[tuple[int, int]] = []
    for index in indices:
        begin = spans.pop()[0] if spans and spans[-1][1] == index else index
        spans.append((begin, index + 1))
    return tuple(spans)
