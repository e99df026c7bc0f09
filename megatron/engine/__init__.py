"""Engines: who holds the model, its gradients and the optimizer, and does one step at a time."""
