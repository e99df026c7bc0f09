"""The start, the end and the padding of text-to-text rows, by what a tokenizer has."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.data.samples.decoder_marks import DecoderMarks
from megatron.errors import ConfigError

PIECES = ["a", "[EOS]", "b"]


def vocabulary(pieces: list[str] = PIECES, **ids: int) -> Any:
    names = dict.fromkeys(("bos", "pad", "eod", "sep"))
    return SimpleNamespace(vocab_size=len(pieces), piece=pieces.__getitem__, **(names | ids))


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ({"pad": 7, "eod": 8}, (7, 8, 7)),  # as T5's own
        ({"bos": 6, "pad": 7, "eod": 8}, (6, 8, 7)),
        ({"bos": 6, "pad": 7, "sep": 9}, (6, 1, 7)),  # as of a WordPiece, with an [EOS]
        ({"eod": 8}, (8, 8, 8)),  # as GPT-2's
    ],
)
def test_marks_are_those_that_a_tokenizer_has(ids: dict[str, int], expected: Any) -> None:
    assert DecoderMarks.of(vocabulary(**ids)) == expected


def test_sep_ends_texts_where_nothing_else_does() -> None:
    assert DecoderMarks.of(vocabulary(["a"], pad=7, sep=9)).end == 9
    with pytest.raises(ConfigError, match="lacks a token that ends a text"):
        DecoderMarks.of(vocabulary(["a"], pad=7))


def test_a_text_ends_once() -> None:
    marks = DecoderMarks(0, 1, 0)
    assert marks.ended((5, 6)) == marks.ended([5, 6, 1]) == [5, 6, 1]
    assert marks.ended([]) == [1]
