"""GPT-2's BPE: every text comes back, and a damaged pair of files is refused."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import DataError
from megatron.tokenizer.huggingface import byte_symbols
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.unit.tokenizer.vocabularies import write_gpt2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_gpt2(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module")
def gpt2(files: dict[str, str]) -> Iterator[Tokenizer]:
    return build_tokenizer(tokenizer_type="GPT2BPETokenizer", **files)


def test_any_text_comes_back(gpt2: Tokenizer) -> None:
    @given(st.text())
    def check(text: str) -> None:
        ids = gpt2.tokenize(text)
        assert gpt2.tokenize_batch([text, ""]) == [ids, []]
        assert all(0 <= token < gpt2.vocab_size for token in ids)
        assert gpt2.detokenize(ids) == text

    check()


def test_the_document_end_is_the_last_id_and_never_comes_from_text(gpt2: Tokenizer) -> None:
    assert gpt2.eod == gpt2.vocab_size - 1
    assert gpt2.eod not in gpt2.tokenize("a<|endoftext|>b")
    assert gpt2.detokenize([*gpt2.tokenize("a"), gpt2.eod]) == "a<|endoftext|>"
    assert gpt2.piece(gpt2.eod) == "<|endoftext|>"


def test_merges_are_applied(gpt2: Tokenizer) -> None:
    assert len(gpt2.tokenize("the quick brown fox")) < len("the quick brown fox") / 2


def test_extra_ids_stand_behind_the_vocabulary(files: dict[str, str], gpt2: Tokenizer) -> None:
    extended = build_tokenizer(tokenizer_type="GPT2BPETokenizer", vocab_extra_ids=2, **files)
    assert extended.extra_ids == (gpt2.vocab_size, gpt2.vocab_size + 1)
    assert extended.vocab_size == gpt2.vocab_size + 2
    assert extended.tokenize("<extra_id_1>") == [extended.extra_ids[1]]


def test_bytes_are_spelled_by_256_different_characters() -> None:
    from tokenizers import pre_tokenizers

    assert set(byte_symbols()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert len(byte_symbols()) == 256
    assert byte_symbols()[0x20] == "\u0120"  # the G with a dot of GPT-2's vocabularies
    assert byte_symbols()[ord("A")] == "A"


def test_a_vocabulary_without_a_byte_refuses_text_that_needs_it(tmp_path: Path) -> None:
    vocab = {symbol: token for token, symbol in enumerate(byte_symbols()) if symbol != "q"}
    vocab_file, merge_file = tmp_path / "v.json", tmp_path / "m.txt"
    vocab_file.write_text(json.dumps(vocab))
    merge_file.write_text("#version: 0.2\n")
    tokenizer = build_tokenizer(
        tokenizer_type="GPT2BPETokenizer", vocab_file=str(vocab_file), merge_file=str(merge_file)
    )
    assert tokenizer.detokenize(tokenizer.tokenize("fox")) == "fox"
    for call in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch([text])):
        with pytest.raises(DataError, match="no piece for byte 0x71"):
            call("quick " * 20)
    assert tokenizer.eod is None
    assert "<|endoftext|>" in tokenizer.eod_note


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("#version: 0.2\na b\n", "Expecting value"),
        ("[1, 2]", "no pairs"),
        ('{"a": 1, "b": 1}', "not distinct"),
        ('{"a": "x"}', "not distinct integers"),
    ],
)
def test_a_file_that_is_no_vocabulary_is_refused(
    tmp_path: Path, files: dict[str, str], content: str, reason: str
) -> None:
    wrong = tmp_path / "vocab.json"
    wrong.write_text(content)
    with pytest.raises(DataError, match=r"not a GPT-2 vocab\.json") as caught:
        build_tokenizer(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=str(wrong),
            merge_file=files["merge_file"],
        )
    assert reason in str(caught.value)


def test_merges_of_another_training_are_refused(tmp_path: Path, files: dict[str, str]) -> None:
    other = tmp_path / "merges.txt"
    other.write_text("#version: 0.2\nz z\n")
    with pytest.raises(DataError, match="the merges do not fit the vocabulary"):
        build_tokenizer(
            tokenizer_type="GPT2BPETokenizer",
            vocab_file=files["vocab_file"],
            merge_file=str(other),
        )
