"""Flags that one family of models reads."""
