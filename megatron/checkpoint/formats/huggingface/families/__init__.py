"""One table per family of Hugging Face models: its names for the parts of our models.

Adding a family is one file with a `Family` and one line in `registry.py`. The modules above define
what a family is, and read and write the files.
"""
