"""Questions that are answered by blocks of text: evaluation and fine-tuning of retrievers."""
