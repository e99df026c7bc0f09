"""Layers that a model of an encoder and a decoder has beside those of one stack."""
