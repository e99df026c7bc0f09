"""Folders as Hugging Face transformers writes them: config.json, weights, tokenizer."""
