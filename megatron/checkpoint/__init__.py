"""Checkpoints: named shards in safetensors files under a manifest that says what is where.

This package handles shards and files, not models or optimizers. Nothing is imported here, so that
programs which only read manifests do not import torch.
"""
