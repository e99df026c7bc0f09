"""Fine-tuning of a ViT on images with classes, and its evaluation."""
