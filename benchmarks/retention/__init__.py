"""What exchanging caches instead of text costs in answers: facts, questions about them, and ways to hand them over."""
