"""A model that runs: loading, identity, probe, scheduling, prefill, decode. Nothing here knows pools or LangGraph."""
