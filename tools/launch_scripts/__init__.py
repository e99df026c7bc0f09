"""Reads what launch scripts would start, without starting it."""
