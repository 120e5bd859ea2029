"""`langgraph-latent` on the command line."""
