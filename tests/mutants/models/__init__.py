"""Mutants of families of models beside GPT and BERT."""
