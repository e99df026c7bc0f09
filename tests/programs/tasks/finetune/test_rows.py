"""Pairs as rows of tokens: specials, types, padding, and what is cut."""

from pathlib import Path

import pytest
import torch

from megatron.errors import ConfigError
from megatron.tokenizer.protocol import Tokenizer
from megatron.tokenizer.tokenizer import build_tokenizer
from tasks.finetune.examples import Example, TextPair
from tasks.finetune.rows import UNKNOWN, make_rows


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]))
    return build_tokenizer(tokenizer_type="BertWordPieceLowerCase", vocab_file=str(vocab))


def one(tokenizer: Tokenizer, pair: TextPair, *, length: int = 8) -> tuple[list[int], ...]:
    rows = make_rows([Example("x", (pair,), 1)], tokenizer, seq_length=length)
    return tuple(tensor[0, 0].tolist() for tensor in (rows.text, rows.types, rows.padding_mask))


def test_a_pair_is_two_segments_with_their_types(tokenizer: Tokenizer) -> None:
    text, types, mask = one(tokenizer, TextPair("a b", "c"))
    assert text == [2, 5, 6, 3, 7, 3, 0, 0]
    assert types == [0, 0, 0, 0, 1, 1, 0, 0]
    assert mask == [1, 1, 1, 1, 1, 1, 0, 0]


def test_a_single_text_is_one_segment(tokenizer: Tokenizer) -> None:
    assert one(tokenizer, TextPair("a b"))[0] == [2, 5, 6, 3, 0, 0, 0, 0]


def test_what_is_too_long_loses_its_end_but_not_its_mark(tokenizer: Tokenizer) -> None:
    assert one(tokenizer, TextPair("a b", "c c c c c c"))[0] == [2, 5, 6, 3, 7, 7, 7, 3]
    assert one(tokenizer, TextPair("a b a b a b a b"))[0] == [2, 5, 6, 5, 6, 5, 6, 3]
    examples = [Example("x", (TextPair("a " * 9), TextPair("a")), 0)]
    assert make_rows(examples, tokenizer, seq_length=8).truncated == 1


def test_what_fills_up_a_batch_counts_for_nothing(tokenizer: Tokenizer) -> None:
    examples = [Example(str(i), (TextPair("a"),), i) for i in range(3)]
    rows = make_rows(examples, tokenizer, seq_length=8)
    batch = rows.take([2, 0], size=4)
    assert batch["labels"].tolist() == [2, 0, UNKNOWN, UNKNOWN]
    assert batch["text"].shape == (4, 1, 8)
    assert rows.take([], size=2)["labels"].tolist() == [UNKNOWN] * 2
    assert rows.labels.tolist() == [0, 1, 2]  # not written into
    assert rows.text.dtype == torch.int64


def test_a_tokenizer_without_marks_and_rows_without_room_are_refused(tokenizer: Tokenizer) -> None:
    null = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=10)
    examples = [Example("x", (TextPair("1 2"),), 0)]
    with pytest.raises(ConfigError, match="the tokenizer lacks tokens that a BERT needs"):
        make_rows(examples, null, seq_length=8)
    with pytest.raises(ConfigError, match="rows are too short to hold two texts"):
        make_rows(examples, tokenizer, seq_length=4)
