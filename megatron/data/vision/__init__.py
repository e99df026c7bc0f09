"""Images with classes: where they are read from, how they are augmented, and datasets of them."""
