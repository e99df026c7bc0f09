"""Formats of checkpoints, a package for each system."""
