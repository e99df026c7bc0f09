"""Checks of the flags of single families of models."""
