"""Megatron core's `torch_dist` layout: whole tensors by model key, cut into chunks in few files."""
