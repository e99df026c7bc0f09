"""Corpora on disk, sample orders, and the loaders that feed them to a run.

The package works without torch.distributed: ranks and sizes are passed as integers, a barrier as a
function. Only `loaders` and batches (`*_batch`) import torch; this package imports nothing.
"""
