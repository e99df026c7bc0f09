"""One small table per family of Hugging Face models: how it spells what our GPT is made of.

Adding a family is one file with a `Family` and one line in `registry.py`. Reading and writing
files is the part of `source` and `writer`, not theirs.
"""
