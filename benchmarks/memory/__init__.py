"""How much memory a training step takes, for what."""
