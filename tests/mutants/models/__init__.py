"""Mutants of families of models."""
