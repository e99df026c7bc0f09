"""What our training step is measured beside: a plain GPT, and those of other packages."""
