"""`python -m langgraph_latent.cli`."""

from __future__ import annotations

from langgraph_latent.cli.app import main

main()
