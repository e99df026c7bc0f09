"""Mutants of how tokens are chosen in the server: what is proposed, and what is allowed."""
