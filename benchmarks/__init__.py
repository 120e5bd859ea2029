"""Benchmarks of langgraph-latent against text edges and stock transformers. Run `python -m benchmarks.handoff`."""
