"""Mutants of decoding: what is proposed, what is allowed, and which stage computes what."""
