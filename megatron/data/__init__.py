"""Corpora on disk, sample orders, and the loaders that feed them to a run.

Everything here works without torch.distributed: ranks and sizes arrive as integers, a barrier as
a function. Only `loaders` and batches (`*_batch`) import torch; this package imports nothing.
"""
