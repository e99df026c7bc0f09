"""Parts of tools/generate_text.py: flags, and what each kind of model answers to a prompt."""
