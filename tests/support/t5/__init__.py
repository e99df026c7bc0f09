"""Tiny T5s, and runs of them, for tests."""
