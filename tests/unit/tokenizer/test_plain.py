"""Numbers as they are, and bytes as they are."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import build_tokenizer

NULL = build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=100)
BYTES = build_tokenizer(tokenizer_type="ByteTokenizer")


def test_null_reads_numbers_and_puts_the_document_end_behind_them() -> None:
    assert NULL.tokenize("3  99\n0") == [3, 99, 0]
    assert NULL.tokenize_batch(["1", ""]) == [[1], []]
    assert (NULL.vocab_size, NULL.eod) == (101, 100)
    assert NULL.detokenize([3, 100]) == "3 100"
    assert NULL.piece(7) == "7"


@pytest.mark.parametrize("word", ["100", "-1", "x", "1.5", "\u0663"])
def test_null_refuses_what_is_no_id(word: str) -> None:
    with pytest.raises(DataError, match="NullTokenizer reads ids") as caught:
        NULL.tokenize(f"1 {word}")
    assert repr(word) in str(caught.value)


def test_null_needs_an_id() -> None:
    with pytest.raises(ConfigError, match="at least one id"):
        build_tokenizer(tokenizer_type="NullTokenizer", vocab_size=0)


@given(st.text())
def test_bytes_come_back_as_the_text(text: str) -> None:
    ids = BYTES.tokenize(text)
    assert BYTES.tokenize_batch([text]) == [ids]
    assert max(ids, default=0) < 256
    assert BYTES.detokenize(ids) == text


def test_the_byte_document_end_shows_by_name() -> None:
    assert BYTES.detokenize([104, 105, 256]) == "hi<|endoftext|>"
    assert BYTES.piece(256) == "<|endoftext|>"
    assert BYTES.piece(10) == "<0x0A>"
    assert BYTES.detokenize([0xC3]) == "\ufffd"  # half a character
