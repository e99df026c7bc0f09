"""Checkpoints: named shards in safetensors files under a manifest that says what is where.

This package knows shards and files, not models or optimizers. It imports nothing here, so that
programs which only read manifests never wait for torch.
"""
