"""Tests of the layers of an encoder and its decoder."""
