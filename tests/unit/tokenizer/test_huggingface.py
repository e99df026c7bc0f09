"""tokenizer.json as the library has it, without its habits that lose or add text."""

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from megatron.errors import ConfigError, DataError
from megatron.tokenizer.tokenizer import Tokenizer, build_tokenizer
from tests.unit.tokenizer.vocabularies import write_gpt2, write_tokenizer_json

TEXT = "the quick brown fox \u00e9\U0001f600 <|endoftext|>"


def load(path: Path, **options: int) -> Tokenizer:
    return build_tokenizer(
        tokenizer_type="PretrainedFromHF", tokenizer_name_or_path=str(path), **options
    )


def test_a_file_and_its_folder_give_the_same_ids_as_the_two_gpt2_files(tmp_path: Path) -> None:
    gpt2 = build_tokenizer(tokenizer_type="GPT2BPETokenizer", **write_gpt2(tmp_path))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        tokenizer = load(path)
        plain = TEXT.removesuffix("<|endoftext|>")
        assert tokenizer.tokenize(plain) == gpt2.tokenize(plain)
        assert tokenizer.vocab_size == gpt2.vocab_size
        assert tokenizer.eod == gpt2.eod
    named = build_tokenizer(
        tokenizer_type="HFTokenizer", vocab_file=str(tmp_path / "tokenizer.json")
    )
    assert named.tokenize(TEXT) == load(tmp_path).tokenize(TEXT)
    assert named.name == "HFTokenizer"


def test_a_special_name_in_a_text_is_its_id_and_comes_back(tmp_path: Path) -> None:
    tokenizer = load(write_tokenizer_json(tmp_path))
    ids = tokenizer.tokenize(TEXT)
    assert ids[-1] == tokenizer.eod
    assert tokenizer.detokenize(ids) == TEXT
    assert tokenizer.tokenize_batch([TEXT]) == [ids]


def test_truncation_and_padding_in_the_file_are_turned_off(tmp_path: Path) -> None:
    whole = load(write_tokenizer_json(tmp_path)).tokenize(TEXT * 9)
    cutting = write_tokenizer_json(
        tmp_path / "cut",
        truncation={
            "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
        },
        padding={
            "strategy": {"Fixed": 999}, "direction": "Right", "pad_to_multiple_of": None,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!",
        },
    )  # fmt: skip
    assert len(tokenizers.Tokenizer.from_file(str(cutting)).encode(TEXT).ids) == 999
    tokenizer = load(cutting)
    assert tokenizer.tokenize(TEXT * 9) == whole
    assert tokenizer.tokenize_batch([TEXT * 9]) == [whole]


def test_no_token_is_added_around_a_text(tmp_path: Path) -> None:
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [299], "tokens": ["<|endoftext|>"]}
        },
    }
    path = write_tokenizer_json(tmp_path, post_processor=template)
    assert len(tokenizers.Tokenizer.from_file(str(path)).encode("").ids) == 1
    assert load(path).tokenize("") == []
    assert load(path).tokenize_batch([""]) == [[]]


def test_the_declared_end_wins_over_well_known_names(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "the"}}')
    assert load(path).eod == load(path).tokenize("the")[0]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "!"}')
    assert load(path).eod == load(path).tokenize("!")[0]


def test_several_well_known_ends_are_none(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    core = tokenizers.Tokenizer.from_file(str(path))
    core.add_special_tokens(["</s>", "<pad>", "[MASK]"])
    core.save(str(path))
    tokenizer = load(path)
    assert tokenizer.eod is None
    assert "<|endoftext|>, </s>; name one" in tokenizer.eod_note
    assert tokenizer.pad == 301
    assert tokenizer.mask == 302
    assert tokenizer.vocab_size == 303


def test_tokens_added_by_the_config_count_and_are_whole_words(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    size = load(path).vocab_size
    added = {str(size): {"content": "<|im_start|>", "special": True, "lstrip": False}}
    added[str(size + 1)] = {"content": "qwerty", "special": False}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": added}))
    tokenizer = load(path, vocab_extra_ids=2)
    assert tokenizer.tokenize("<|im_start|>qwerty") == [size, size + 1]
    assert tokenizer.extra_ids == (size + 2, size + 3)
    assert tokenizer.vocab_size == size + 4
    config.write_text(json.dumps({"added_tokens_decoder": {"7": {"content": "<|im_start|>"}}}))
    with pytest.raises(DataError, match="give one token two ids"):
        load(path)


def test_a_vocabulary_without_some_bytes_refuses_text_that_needs_them(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    description = json.loads(path.read_text())
    description["model"]["merges"] = []
    del description["model"]["vocab"]["Z"]
    description["normalizer"] = {"type": "NFKC"}
    path.write_text(json.dumps(description))
    with pytest.raises(DataError, match="no piece for byte 0x5a"):
        load(path).tokenize("a \uff3a")  # the wide Z becomes Z
    assert load(path).tokenize("z")


def test_a_model_that_skips_letters_is_caught(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.save(str(tmp_path / "tokenizer.json"))
    assert core.encode("axb").ids == [2]  # the library gives no error: this is ab
    tokenizer = load(tmp_path)
    assert tokenizer.tokenize("ab b") == [2, 1]
    for call in (tokenizer.tokenize, lambda text: tokenizer.tokenize_batch([text])):
        with pytest.raises(DataError, match=r"no piece for U\+0078"):
            call("axb")


def test_the_unknown_piece_is_known(tmp_path: Path) -> None:
    core = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 3}, unk_token="?"))  # noqa: S106
    core.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).unk == 3
    assert load(tmp_path).vocab_size == 4  # one more than the highest id, gaps or not
    core = tokenizers.Tokenizer(models.Unigram([("?", 0.0), ("a", -1.0)], unk_id=0))
    core.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path).unk == 0


def test_nothing_is_downloaded() -> None:
    with pytest.raises(ConfigError, match="nothing is downloaded") as caught:
        load(Path("someone/some-model"))
    assert "hf download someone/some-model" in str(caught.value)


def test_a_folder_without_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not name a file") as caught:
        load(tmp_path)
    assert str(tmp_path / "tokenizer.json") in str(caught.value)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    path = write_tokenizer_json(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json beside the tokenizer"):
        load(path)
    path.write_text(path.read_text()[:99])
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read"):
        load(path)
