"""Language models and their words: loading, prompts, prefill and decode. Nothing here knows pools or LangGraph."""
