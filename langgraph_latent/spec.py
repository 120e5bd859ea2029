"""What a model is: geometry, weights, tokenizer, numerics, as plain values with one digest.

A spec is read off a loaded model by `models/resident.py`; this module knows no torch and no files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class LayerSpec:
    """One cache layer: `kind` is "full" or "sliding"; `window` in tokens, 0 where there is none."""

    kind: str
    window: int
    kv_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelSpec:
    """Identity of a resident model. Two specs with equal `identity` may share KV caches bit for bit.

    Attributes:
        name: folder or hub id, for people; not part of the identity.
        architecture: model class, for example "LlamaForCausalLM".
        layers: per cache layer, from the shapes of real tensors.
        rope: rope parameters as canonical JSON, or "" where there are none.
        config: SHA-256 of every config field that shapes what the model computes.
        weights: SHA-256 over every tensor's name, dtype, shape and bytes, the same however the files are sharded.
        tokenizer, template: SHA-256 of the tokenizer's vocabulary and rules, and of the chat template.
        adapters: names and digests of active LoRA adapters.
        dtype: of the cache, for example "float32".
        max_positions: longest sequence the model takes, 0 where it names none.
        bytes_per_token: of keys and values over all layers.
    """

    name: str
    architecture: str
    hidden_size: int
    vocab_size: int
    layers: tuple[LayerSpec, ...]
    rope: str
    config: str
    weights: str
    tokenizer: str
    template: str
    adapters: tuple[str, ...]
    dtype: str
    quantization: str
    attention: str
    max_positions: int
    bytes_per_token: int
    schema: int = SCHEMA_VERSION

    @cached_property
    def identity(self) -> str:
        """Digest of everything but the name, 32 hex digits."""
        content = asdict(self)
        del content["name"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
