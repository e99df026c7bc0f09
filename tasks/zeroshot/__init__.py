"""Evaluation of a GPT as it was pretrained: how well it predicts a text it has not seen."""
