"""BERT's WordPiece on a vocabulary of twelve pieces."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.unit.tokenizer.vocabularies import write_bert


def bert(path: Path, kind: str = "BertWordPieceLowerCase", **options: int) -> Tokenizer:
    return build_tokenizer(tokenizer_type=kind, vocab_file=str(path), **options)


def test_words_are_cut_into_the_longest_pieces(tmp_path: Path) -> None:
    tokenizer = bert(write_bert(tmp_path))
    ids = tokenizer.tokenize("The dog plays, playing.")
    assert [tokenizer.piece(token) for token in ids] == [
        "the", "dog", "play", "##s", "[UNK]", "play", "##ing", ".",
    ]  # fmt: skip
    assert tokenizer.detokenize(tokenizer.tokenize("the dogs")) == "the dogs"
    assert tokenizer.tokenize_batch(["The dog plays, playing."]) == [ids]


def test_case_is_kept_where_asked(tmp_path: Path) -> None:
    path = write_bert(tmp_path)
    assert bert(path, "BertWordPieceCase").tokenize("Dog") == [11]
    assert bert(path).tokenize("D\u00f3g") == [6]


def test_special_ids_are_those_of_the_file_with_two_added(tmp_path: Path) -> None:
    tokenizer = bert(write_bert(tmp_path), vocab_extra_ids=2)
    assert (tokenizer.pad, tokenizer.unk, tokenizer.cls, tokenizer.sep, tokenizer.mask) == (
        0, 1, 2, 3, 4,
    )  # fmt: skip
    assert tokenizer.bos == 12
    assert tokenizer.extra_ids == (14, 15)
    assert tokenizer.vocab_size == 16
    assert tokenizer.eod is None


def test_a_special_name_in_a_text_is_text(tmp_path: Path) -> None:
    tokenizer = bert(write_bert(tmp_path))
    assert tokenizer.mask not in tokenizer.tokenize("[MASK] the dog")


def test_a_word_of_two_hundred_letters_is_still_cut(tmp_path: Path) -> None:
    tokenizer = bert(write_bert(tmp_path))
    assert len(tokenizer.tokenize("play" + "s" * 196)) == 197
    assert tokenizer.tokenize("play" + "s" * 197) == [tokenizer.unk]


def test_a_piece_that_stands_twice_is_refused(tmp_path: Path) -> None:
    path = write_bert(tmp_path)
    path.write_text(path.read_text() + "the\n")
    with pytest.raises(DataError, match="stands twice") as caught:
        bert(path)
    assert f"{path}:13: 'the', first on line 6" in str(caught.value)


def test_a_file_without_the_special_pieces_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("[PAD]\n[UNK]\nword\n")
    with pytest.raises(DataError, match=r"not a BERT vocab\.txt") as caught:
        bert(path)
    assert r"lacks [CLS], [SEP], [MASK]" in str(caught.value)
