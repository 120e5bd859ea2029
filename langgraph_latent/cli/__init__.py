"""`langgraph-latent` on the command line: one file a command; consoles, widths and colours are in `terminal.py`."""
