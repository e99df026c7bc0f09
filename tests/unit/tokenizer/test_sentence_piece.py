"""SentencePiece models under Megatron's three names, and as T5's."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.unit.tokenizer.vocabularies import write_sentencepiece

TEXT = "the quick brown fox"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentencepiece(tmp_path_factory.mktemp("sp"))


def load(model: Path, name: str = "SentencePieceTokenizer", extra: int = 0) -> Tokenizer:
    return build_tokenizer(tokenizer_type=name, tokenizer_model=str(model), vocab_extra_ids=extra)


@pytest.mark.parametrize(
    "name", ["SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer"]
)
def test_a_text_comes_back(model: Path, name: str) -> None:
    tokenizer = load(model, name)
    assert tokenizer.detokenize(tokenizer.tokenize(TEXT)) == TEXT
    assert tokenizer.tokenize_batch([TEXT, ""]) == [tokenizer.tokenize(TEXT), []]
    assert tokenizer.unk in tokenizer.tokenize("\u6f22")


def test_megatrons_special_tokens_stand_behind_the_pieces_in_its_order(model: Path) -> None:
    tokenizer = load(model, extra=2)
    names = [tokenizer.piece(token) for token in range(60, tokenizer.vocab_size)]
    assert names == [
        "<CLS>", "<SEP>", "<EOD>", "<MASK>", "<PAD>", "<extra_id_0>", "<extra_id_1>",
    ]  # fmt: skip
    assert (tokenizer.cls, tokenizer.sep, tokenizer.eod, tokenizer.mask) == (60, 61, 62, 63)
    assert (tokenizer.pad, tokenizer.bos) == (64, 1)
    assert tokenizer.extra_ids == (65, 66)
    ids = tokenizer.tokenize(TEXT)
    assert tokenizer.detokenize([*ids, 62, *ids]) == f"{TEXT}<EOD>{TEXT}"


def test_the_gpt_kind_adds_nothing_and_ends_with_the_models_own_piece(model: Path) -> None:
    tokenizer = load(model, "GPTSentencePieceTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad, tokenizer.cls) == (
        60,
        2,
        None,
        None,
    )
    assert tokenizer.piece(2) == "</s>"


def test_sentinels_of_the_t5_kind_fall_and_are_found_in_a_text(model: Path) -> None:
    t5, plain = (load(model, f"{kind}SentencePieceTokenizer", extra=3) for kind in ("T5", "GPT"))
    assert (t5.extra_ids, plain.extra_ids) == ((62, 61, 60), (60, 61, 62))
    assert [t5.piece(token) for token in t5.extra_ids] == [f"<extra_id_{at}>" for at in range(3)]
    words = plain.tokenize("the cat"), plain.tokenize("fox")
    marked = "the cat <extra_id_0> fox<extra_id_2>"
    assert t5.tokenize(marked) == [*words[0], 62, *words[1], 60]
    assert t5.tokenize_batch([marked, TEXT]) == [t5.tokenize(marked), plain.tokenize(TEXT)]
    assert t5.tokenize("<extra_id_3>") == plain.tokenize("<extra_id_3>"), "there is no such one"
    assert (t5.eod, t5.vocab_size) == (2, 63)


def test_the_llama_kind_opens_every_text(model: Path) -> None:
    llama = load(model, "Llama2Tokenizer")
    assert llama.tokenize(TEXT) == [1, *load(model, "GPTSentencePieceTokenizer").tokenize(TEXT)]
    assert llama.tokenize("") == []


def test_a_model_without_an_end_says_so(tmp_path: Path) -> None:
    model = write_sentencepiece(tmp_path, bos_id=-1, eos_id=-1, pad_id=1)
    gpt = load(model, "GPTSentencePieceTokenizer")
    assert gpt.eod is None
    assert "eos_id=-1" in gpt.eod_note
    own = load(model)
    assert own.pad == 1
    assert own.piece(own.bos or 0) == "<BOS>"
    assert own.piece(own.eod or 0) == "<EOD>"
    assert "<EOD>" in own.eod_note


def test_a_damaged_model_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "bad.model"
    path.write_bytes(b"not a model")
    with pytest.raises(DataError, match="SentencePiece model cannot be read") as caught:
        load(path)
    assert str(path) in str(caught.value)
