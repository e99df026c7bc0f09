"""Which tokenizer the flags choose, what they must name, and how the vocabulary is padded."""

import pickle
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from subprocess import run

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import (
    TokenizerSpec,
    build_tokenizer,
    padded_vocab_size,
    require_eod,
    true_vocab_size,
)
from tests.unit.tokenizer.vocabularies import write_bert, write_gpt2


def test_an_unknown_type_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="no tokenizer type 'GPT2BPETokeniser'") as caught:
        build_tokenizer(tokenizer_type="GPT2BPETokeniser")
    assert "did you mean GPT2BPETokenizer?" in str(caught.value)
    assert "ByteTokenizer" in str(caught.value)


def test_a_type_says_which_flag_it_needs() -> None:
    with pytest.raises(ConfigError, match="GPT2BPETokenizer needs --merge-file"):
        build_tokenizer(tokenizer_type="GPT2BPETokenizer", vocab_file="vocab.json")
    with pytest.raises(ConfigError, match="needs --tokenizer-model"):
        build_tokenizer(tokenizer_type="SentencePieceTokenizer")
    with pytest.raises(ConfigError, match="NullTokenizer needs --vocab-size"):
        build_tokenizer(tokenizer_type="NullTokenizer")


def test_of_alternative_flags_exactly_one_is_taken() -> None:
    with pytest.raises(ConfigError, match="--tokenizer-name-or-path a --vocab-file b"):
        build_tokenizer(tokenizer_type="HFTokenizer", tokenizer_name_or_path="a", vocab_file="b")


def test_a_flag_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="ByteTokenizer does not read --vocab-file"):
        build_tokenizer(tokenizer_type="ByteTokenizer", vocab_file="vocab.json")


@pytest.mark.parametrize("count", [-1, 3])
def test_extra_ids_are_refused_where_none_can_be_added(count: int) -> None:
    with pytest.raises(ConfigError, match="ByteTokenizer cannot add this number of extra ids"):
        build_tokenizer(tokenizer_type="ByteTokenizer", vocab_extra_ids=count)


def test_a_missing_file_is_named_with_its_flag(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--vocab-file does not name a file") as caught:
        build_tokenizer(tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path / "none.txt"))
    assert "none.txt" in str(caught.value)
    with pytest.raises(DataError, match="a folder"):
        build_tokenizer(tokenizer_type="BertWordPieceCase", vocab_file=str(tmp_path))


def test_a_spec_builds_the_same_tokenizer_in_another_process(tmp_path: Path) -> None:
    spec = TokenizerSpec(tokenizer_type="GPT2BPETokenizer", **write_gpt2(tmp_path))
    assert pickle.loads(pickle.dumps(spec)) == spec
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        there = pool.submit(_ids, spec, "the quick fox").result(timeout=60)
    assert there == _ids(spec, "the quick fox")


def _ids(spec: TokenizerSpec, text: str) -> list[int]:
    return spec.build().tokenize(text)


def test_no_tokenizer_imports_torch(tmp_path: Path) -> None:
    program = (
        "import sys, megatron.tokenizer.tokenizer as t\n"
        "for m in ('gpt2_bpe', 'bert_wordpiece', 'huggingface', 'sentence_piece', 'plain'):\n"
        "    __import__('megatron.tokenizer.' + m)\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert run([sys.executable, "-c", program], cwd=root, timeout=60).returncode == 0


def test_a_missing_end_of_document_says_what_was_looked_for(tmp_path: Path) -> None:
    bert = build_tokenizer(tokenizer_type="BertWordPieceCase", vocab_file=str(write_bert(tmp_path)))
    with pytest.raises(ConfigError, match="--append-eod needs an end-of-document token") as caught:
        require_eod(bert, "--append-eod")
    assert "no end-of-document token" in str(caught.value)
    assert require_eod(build_tokenizer(tokenizer_type="ByteTokenizer"), "--append-eod") == 256


@given(
    vocab_size=st.integers(1, 300_000),
    divisible_by=st.integers(1, 256),
    tp=st.sampled_from([1, 2, 3, 8]),
)
def test_padding_is_the_smallest_that_divides_evenly(
    vocab_size: int, divisible_by: int, tp: int
) -> None:
    padded = padded_vocab_size(vocab_size, divisible_by=divisible_by, tp=tp)
    assert padded % (divisible_by * tp) == 0
    assert vocab_size <= padded < vocab_size + divisible_by * tp


def test_padding_agrees_with_megatrons_numbers() -> None:
    assert padded_vocab_size(50257, divisible_by=128, tp=1) == 50304
    assert padded_vocab_size(50257, divisible_by=128, tp=8) == 51200
    assert padded_vocab_size(5000, divisible_by=128, tp=2, pad_to=5120) == 5120


def test_a_wanted_size_must_be_divisible() -> None:
    with pytest.raises(ConfigError, match="5121 is not divisible by 128"):
        padded_vocab_size(5000, divisible_by=128, tp=2, pad_to=5121)
    with pytest.raises(ConfigError, match="5121 is not divisible by 2"):
        padded_vocab_size(5000, divisible_by=1, tp=2, pad_to=5121)


def test_a_wanted_size_must_hold_the_vocabulary() -> None:
    with pytest.raises(ConfigError, match="smaller than the tokenizer's: 4096 < 5000"):
        padded_vocab_size(5000, divisible_by=128, tp=1, pad_to=4096)


def test_a_model_may_have_more_rows_than_the_tokenizer_has_tokens() -> None:
    assert true_vocab_size(50277, None) == 50277
    assert true_vocab_size(50277, 50304) == 50304
    with pytest.raises(ConfigError, match="fewer rows of vocabulary than the tokenizer") as caught:
        true_vocab_size(50277, 50000)
    assert "use at least --true-vocab-size 50277" in str(caught.value)


def test_the_divisors_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="divided by positive numbers"):
        padded_vocab_size(5000, divisible_by=0, tp=1)


def test_its_files_are_those_that_are_read_and_of_a_folder_no_others(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    of_folder = TokenizerSpec(tokenizer_type="HFTokenizer", tokenizer_name_or_path=str(tmp_path))
    assert of_folder.files() == [tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"]
    named = TokenizerSpec(
        tokenizer_type="GPT2BPETokenizer",
        vocab_file=str(tmp_path / "tokenizer.json"),
        merge_file=str(tmp_path / "none.txt"),
    )
    assert named.files() == [tmp_path / "tokenizer.json"]
