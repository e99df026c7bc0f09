"""Text to token ids and back. No torch here, so that a preprocessing worker starts fast.

Callers need only `megatron.tokenizer.tokenizer`; the other modules are one kind of tokenizer each,
imported when that kind is asked for.
"""
