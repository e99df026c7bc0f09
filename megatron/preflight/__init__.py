"""Checks before a run starts: what is wrong is found at once, together, with a fix for each."""
