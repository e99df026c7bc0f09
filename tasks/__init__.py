"""Evaluation and fine-tuning of trained models, each by `python -m tasks.main --task NAME`."""
