"""Tensors of KV caches: buffers, states, their file format. Nothing here knows text, models or LangGraph."""
