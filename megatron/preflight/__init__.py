"""Checks before a run starts: all errors are reported together, with a fix for each."""
