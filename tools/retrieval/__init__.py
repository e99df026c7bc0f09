"""Vectors of blocks of text by a trained retriever, an index of them, and search in it."""
