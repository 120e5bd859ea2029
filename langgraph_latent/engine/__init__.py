"""A model that runs: loading, identity, probe, scheduling, prefill and decode. Nothing here knows pools or LangGraph."""
