"""Text from a trained model: choosing tokens, and running the model one token at a time."""
