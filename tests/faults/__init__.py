"""Runs with a fault in them, of which each has a stated end in a stated time."""
