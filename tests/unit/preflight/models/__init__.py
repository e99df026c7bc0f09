"""Tests of the checks of single families of models."""
