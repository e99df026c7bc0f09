"""The flags that name a tokenizer, for every tool that writes or reads tokens."""

import argparse

from megatron.tokenizer.tokenizer import TOKENIZER_TYPES, TokenizerSpec


def add_tokenizer_flags(group: "argparse._ArgumentGroup", *, required: bool = True) -> None:
    """Add the flags from which `tokenizer_spec` is made."""
    add = group.add_argument
    add("--tokenizer-type", required=required, metavar="TYPE", help=", ".join(TOKENIZER_TYPES))
    add("--vocab-file", help="vocab.json of GPT-2, vocab.txt of BERT")
    add("--merge-file", help="merges.txt of GPT-2")
    add("--tokenizer-model", help=".model file of SentencePiece, or .json of TikTokenizer")
    add("--tokenizer-name-or-path", help="tokenizer.json or a folder that holds one")
    add(
        "--vocab-size",
        type=int,
        help="NullTokenizer: ids without the document end; TikTokenizer: all",
    )
    add("--tiktoken-pattern", help="TikTokenizer: v1 or v2, how text is split")
    add(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        help="TikTokenizer: special tokens, which come first [1000]",
    )
    add("--vocab-extra-ids", type=int, default=0, help="add <extra_id_0> and so on [0]")


def tokenizer_spec(args: argparse.Namespace) -> TokenizerSpec:
    """Return the tokenizer that the flags name; reads no file."""
    return TokenizerSpec.of(args)
