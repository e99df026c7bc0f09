"""By what a tokenizer is known again: how many tokens it has, and how its vocabulary spells them.

A checkpoint remembers this of its run's, so that one whose files lie elsewhere, or are of another
kind, can be distinguished from one of another vocabulary. The splitting of text is not compared.
"""

import xxhash

from megatron.tokenizer.protocol import Tokenizer

KEY = "tokenizer"  # among what a checkpoint remembers of its run's data
_LOOKED_AT = 1024  # tokens, spread evenly over the vocabulary


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a line that is equal for two tokenizers if and only if their vocabularies are."""
    size = tokenizer.vocab_size
    ids = sorted({at * (size - 1) // _LOOKED_AT for at in range(_LOOKED_AT + 1)})
    spelled = "\0".join(tokenizer.piece(token) for token in ids)
    digest = xxhash.xxh3_128_hexdigest(spelled.encode(errors="surrogatepass"))
    return f"{size} tokens, end of document {tokenizer.eod}, xxh3_128 {digest}"
