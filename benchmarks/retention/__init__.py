"""What exchanging caches instead of text costs in answers: facts, questions about them, and rows of hand-overs."""
