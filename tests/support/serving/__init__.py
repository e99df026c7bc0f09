"""A server of text generation without a model: an engine that spells, and calls in one process."""
