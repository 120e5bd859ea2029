"""A loaded model's identity: its `ModelSpec`, read off real tensors, its config and its tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from langgraph_latent.kv.layers import LayerKind
from langgraph_latent.kv.state import KVState
from langgraph_latent.spec.config import config_digest, max_positions_of, quantization_of, rope_of, text_config
from langgraph_latent.spec.digest import Digests
from langgraph_latent.spec.spec import Capabilities, LayerSpec, ModelSpec, StateTensor
from langgraph_latent.spec.tokenizer import template_digest, tokenizer_digest


def spec_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    states: Sequence[KVState],
    name: str,
    content: Digests,
    attention: str,
    capabilities: Capabilities,
) -> ModelSpec:
    """Read the identity off a loaded model; `states` are those of short runs."""
    state, config = states[-1], text_config(model.config)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    quantization = model.config.to_dict().get("quantization_config") or {}
    return ModelSpec(
        name=name,
        architecture=type(model).__name__,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=tuple(
            _layer_spec(kind, *(each.tensors(index) for each in states)) for index, kind in enumerate(state.kinds)
        ),
        rope=rope_of(config),
        config=config_digest(config),
        weights=content.weights,
        sketch=content.sketch,
        tokenizer=tokenizer_digest(words),
        template=template_digest(tokenizer.chat_template),
        adapters=(),
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=quantization_of(quantization),
        attention=attention,
        max_positions=max_positions_of(config),
        bytes_per_token=sum(
            tensor[0, :, 0].nbytes
            for kind, tensors in zip(state.kinds, state.layers(), strict=True)
            if kind.has_tokens
            for tensor in tensors
        ),
        capabilities=capabilities,
    )


def _layer_spec(kind: LayerKind, *runs: Mapping[str, torch.Tensor]) -> LayerSpec:
    """A layer's shapes, from runs of different lengths; a dimension that differs, or is still empty, is -1."""
    tensors = runs[-1]
    if kind.has_tokens:
        keys, values = tensors["keys"], tensors["values"]
        return LayerSpec(kind.name, kind.window, keys.shape[1], keys.shape[-1], values.shape[-1])
    kept = (
        StateTensor(
            name,
            tuple(
                size if all(run[name].shape[axis : axis + 1] == (size,) for run in runs if name in run) and size else -1
                for axis, size in enumerate(tensor.shape)
            ),
            str(tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in tensors.items()
    )
    return LayerSpec(kind.name, kind.window, tensors=tuple(kept))
