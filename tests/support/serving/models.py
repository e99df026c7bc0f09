"""A model as a server offers it, without weights."""

from typing import Any

from megatron.data.samples.chat_template import CHATML
from megatron.serving.served_model import ServedModel
from megatron.tokenizer.token_text import text_rules
from megatron.tokenizer.tokenizer import build_tokenizer

CONTEXT = 128


def served_model(**changes: Any) -> ServedModel:
    """A model of bytes, with a chat template."""
    tokenizer = build_tokenizer(tokenizer_type="ByteTokenizer")
    values: dict[str, Any] = {
        "name": "tiny",
        "created": 1,
        "tokenizer": tokenizer,
        "rules": text_rules(tokenizer),
        "vocab_size": 257,
        "context_length": CONTEXT,
        "template": CHATML,
    }
    return ServedModel(**(values | changes))
