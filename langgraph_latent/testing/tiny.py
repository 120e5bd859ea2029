"""Tiny random models as local folders, for tests that need a real model but not its weights. No download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the",
    "team",
    "that",
    "reads",
    "the",
    "report",
    "hands",
    "over",
    "what",
    "it",
    "knows",
    "to",
    "the",
    "team",
    "that",
    "decides",
    "and",
    "writes",
    "the",
    "answer",
]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "pad_token_id": 0,
}
TINY_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, SMALL),
    "mistral": (MistralConfig, {**SMALL, "sliding_window": 24}),
    "qwen3": (Qwen3Config, {**SMALL, "head_dim": 8}),
    "gpt2": (
        GPT2Config,
        {
            "n_embd": 32,
            "n_layer": 3,
            "n_head": 4,
            "n_positions": 2048,
            "initializer_range": 0.3,
            "eos_token_id": 2,
            "bos_token_id": 0,
        },
    ),
}


def tiny_model(folder: Path, kind: str = "llama", *, seed: int = 0, template: str = CHATML, **config: Any) -> Path:
    """Save a random model of one of `TINY_CONFIGS` with a byte-level tokenizer into `folder`; returns it.

    Equal arguments give equal weights; `config` overrides fields of the config.
    """
    tokenizer = tiny_tokenizer(template)
    make, fields = TINY_CONFIGS[kind]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make(**{**fields, "vocab_size": len(tokenizer), **config}))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of about 300 tokens with a chat template; any text survives a round trip."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=template
    )
