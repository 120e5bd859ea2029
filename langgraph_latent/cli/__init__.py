"""`langgraph-latent` on the command line: one file a command; consoles, widths and colours are in `terminal.py`."""

from langgraph_latent.cli.app import main

__all__ = ["main"]
