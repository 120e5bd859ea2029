"""The codes of routing decisions, for programs that read `kv_route` or a trace. It knows names, not how one is decided.

| code | means | what you can do |
|---|---|---|
| `same_model` | the sender's cache is continued, or computed again where it is gone | nothing |
| `composed` | a cache of moved blocks is continued (level 1) | forbid level 1 on the edge to have it re-read |
| `unproven` | the cache came from outside, unsigned: continued at level 1, else re-read | sign it, or allow level 1 |
| `cheaper` | another way of serving is clearly faster, by measured rates | force a route |
| `prefix` | nothing was inherited, leading tokens of the prompt were in the pool | nothing |
| `nothing_inherited` | nothing was inherited, nothing was in the pool | pass `inherit=` |
| `forced` | the edge's policy forces text | take `route=` out of the policy |
| `not_allowed` | the policy does not allow the cache's level | add the level to `allow=` |
| `other_model` | sender and receiver are different models | use one model, or pass the messages |
| `not_first` | another handle comes before it, and one cache can't be appended to another | allow level 1 |
| `not_appendable` | nothing can be appended to caches of this model | use another model |
| `not_movable` | this model, or another edge, does not let the blocks be moved | inherit one handle |
| `no_latent_steps` | the handle has latent steps and the edge takes none | `latent_steps=True`, and measure parity |
| `too_long` | the handle has more tokens than the policy takes; no route is left | pass a summary, raise the limit |
| `diverged` | the template rewrites what is inherited; from half of it on, what stays is a cache edge | equal tools |
| `failed` | the cache could not be used and its messages are re-read | read the reason; the trace has the error |
"""

from __future__ import annotations

from typing import Literal, TypeAlias

DecisionCode: TypeAlias = Literal[
    "same_model",
    "composed",
    "unproven",
    "cheaper",
    "prefix",
    "nothing_inherited",
    "forced",
    "not_allowed",
    "other_model",
    "not_first",
    "not_appendable",
    "not_movable",
    "no_latent_steps",
    "too_long",
    "diverged",
    "failed",
]
