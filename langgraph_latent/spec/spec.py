"""What a model is: geometry, weights, tokenizer, numerics, as plain values with one digest.

A spec is read off a loaded model by `engine/identity.py`; this module knows no torch and no files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

from langgraph_latent import public

SCHEMA_VERSION = 4
"""Of the fields of a spec."""
IDENTITY_FORM = 4
"""Of the digest by which checkpoints name models. It stays when a release adds what is not a part of the identity."""


@dataclass(frozen=True)
class StateTensor:
    """A tensor of an opaque layer; -1 in its shape is a dimension that grows with the tokens."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        sizes = " x ".join("n" if size < 0 else str(size) for size in self.shape)
        return f"{self.name} {sizes} {self.dtype}"


@dataclass(frozen=True)
class LayerSpec:
    """One cache layer.

    Attributes:
        kind: "full", "sliding" or "chunked" attention; "none" where a layer keeps nothing; else the kind of an opaque
            layer, for example "linear".
        window: in tokens, 0 where there is none.
        kv_heads, key_dim, value_dim: of keys and values; 0 where a layer has none of its own.
        tensors: of an opaque layer.
    """

    kind: str
    window: int = 0
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    tensors: tuple[StateTensor, ...] = ()

    def __str__(self) -> str:
        """For example "full, 3 x 64" or "sliding 4096, 3 x 64 and 32": heads, channels of keys and of values."""
        values = f" and {self.value_dim}" if self.value_dim != self.key_dim else ""
        heads = [f"{self.kv_heads} x {self.key_dim}{values}"] if self.kv_heads else []
        return ", ".join([f"{self.kind} {self.window}" if self.window else self.kind, *heads, *map(str, self.tensors)])


@dataclass(frozen=True)
class Capabilities:
    """What can be done with a model's caches, as a probe on its weights found out. Not a part of its identity.

    Attributes:
        refusals: for each of "append", "batch", "crop", "move" and "think" that can't be done, the reason.
        positions: where positions come from, for people, for example "rope, half-split, 64 of 64 channels".
        is_probed: False where the probe was skipped; then only what the layer kinds prove is promised.
    """

    refusals: tuple[tuple[str, str], ...] = ()
    positions: str = ""
    is_probed: bool = False

    def refusal(self, capability: str) -> str:
        """Why a capability is missing; "" where it is there."""
        return dict(self.refusals).get(capability, "")

    def can(self, capability: str) -> bool:
        return not self.refusal(capability)


CAPABILITIES = ("append", "crop", "move", "think", "batch")
"""append: tokens after an inherited cache; crop: keep a prefix of it; move: put it at another position; think: accept
embeddings in place of token ids; batch: several requests in one model call."""


NO_IDENTITY = ("name", "capabilities", "sketch", "config_fields", "schema")
"""Fields of a spec that follow from the others, are for people, or say what wrote it and not what the model is."""


@dataclass(frozen=True)
@public
class ModelSpec:
    """Identity of a resident model. Two specs with equal `identity` may share KV caches bit for bit.

    Attributes:
        name: folder or hub id, for people; not part of the identity.
        architecture: model class, for example "LlamaForCausalLM".
        layers: per cache layer, from the shapes of real tensors.
        rope: rope parameters as canonical JSON, or "" where there are none.
        config: SHA-256 of every config field that shapes what the model computes.
        weights: SHA-256 over every tensor's name, dtype, shape and bytes, the same however the files are sharded.
        tokenizer, template: SHA-256 of the tokenizer's vocabulary, merges and added tokens, and of the chat template.
        adapters: names and digests of active LoRA adapters.
        dtype: of the cache, for example "float32".
        max_positions: longest sequence the model takes, 0 where it names none.
        bytes_per_token: of keys and values over all layers.
        capabilities: what can be done with its caches; not part of the identity.
        sketch: SHA-256 over samples of the weights as bfloat16, equal for copies in other precisions; "" where it was
            not taken. Not part of the identity.
        config_fields: what `config` is the digest of, as canonical JSON; "" where it is not at hand. Not part of the
            identity.

        schema: version of these fields. Not part of the identity: a release makes no model a stranger.

    Where a spec was read off files that don't tell, weights, tokenizer, template and attention are "": unknown.
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
    capabilities: Capabilities = Capabilities()
    sketch: str = ""
    config_fields: str = ""
    schema: int = SCHEMA_VERSION

    @cached_property
    def identity(self) -> str:
        """Digest of everything but `NO_IDENTITY`, 32 hex digits."""
        content = {name: value for name, value in asdict(self).items() if name not in NO_IDENTITY}
        content["schema"] = IDENTITY_FORM
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
