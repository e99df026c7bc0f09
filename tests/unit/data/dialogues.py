"""Corpora of dialogues and of pairs, written token by token."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.data.samples.chat_template import EncodedDialogue
from megatron.data.samples.mtf_dataset import PARTS, pair_prefix
from megatron.data.samples.sft_dataset import SFTCorpusBuilder

NULL = CorpusMetadata(tokenizer_type="NullTokenizer", vocab_size=51, eod=50)  # that of tiny runs
Tokens = Sequence[int]


def write_dialogues(
    prefix: Path, dialogues: Sequence[tuple[Tokens, Tokens]], *, metadata: CorpusMetadata = NULL
) -> str:
    """Dialogues as (tokens, mask); returns the prefix for --sft."""
    with SFTCorpusBuilder(str(prefix), np.uint16, metadata=metadata) as builder:
        for tokens, mask in dialogues:
            builder.add(EncodedDialogue(np.array(tokens, np.int64), np.array(mask, np.uint8)))
    return str(prefix)


def write_pairs(
    prefix: Path, pairs: Sequence[tuple[Tokens, Tokens]], *, metadata: CorpusMetadata = NULL
) -> str:
    """Pairs as (input, target); returns the prefix for --mtf."""
    for side, part in enumerate(PARTS):
        with MMapIndexedDatasetBuilder(
            pair_prefix(prefix, part), np.uint16, metadata=metadata
        ) as builder:
            for pair in pairs:
                builder.add_document(pair[side])
    return str(prefix)


def random_dialogues(count: int, *, seed: int = 0, most: int = 12) -> list[tuple[Tokens, Tokens]]:
    """Prompts of random tokens below 40 and answers that count up from 40."""
    draw = np.random.RandomState(seed)
    made: list[tuple[Tokens, Tokens]] = []
    for _ in range(count):
        prompt = draw.randint(0, 40, draw.randint(1, most // 2)).tolist()
        answer = [40 + number % 10 for number in range(draw.randint(1, most // 2))]
        made.append((prompt + answer, [0] * len(prompt) + [1] * len(answer)))
    return made


def as_pairs(dialogues: Sequence[tuple[Tokens, Tokens]]) -> list[tuple[Tokens, Tokens]]:
    """What is given of each dialogue, and what is learned."""
    return [
        (
            [token for token, learned in zip(tokens, mask) if not learned],
            [token for token, learned in zip(tokens, mask) if learned],
        )
        for tokens, mask in dialogues
    ]
