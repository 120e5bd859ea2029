"""Random models for tests: a few as ready folders (`testing.tiny`), every family as a toy (`testing.catalogue`)."""

from langgraph_latent.testing.tiny import (
    CHATML,
    CORPUS,
    SMALL,
    SPECIAL_TOKENS,
    TINY_CONFIGS,
    tiny_model,
    tiny_tokenizer,
)

__all__ = ["CHATML", "CORPUS", "SMALL", "SPECIAL_TOKENS", "TINY_CONFIGS", "tiny_model", "tiny_tokenizer"]
