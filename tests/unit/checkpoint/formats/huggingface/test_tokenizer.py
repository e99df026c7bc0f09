"""The tokenizer beside a model gives the same ids in `transformers` as here."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron import log
from megatron.checkpoint.formats.huggingface.tokenizer import described, plan
from megatron.checkpoint.source import WriteOptions
from megatron.errors import CheckpointError
from megatron.tokenizer.tokenizer import Tokenizer, TokenizerSpec, build_tokenizer
from tests.unit.tokenizer.vocabularies import write_gpt2, write_sentencepiece, write_tokenizer_json

TEXTS = ("the quick brown fox", "a  b\n\tc", "jumps over 12 lazy dogs!", "")
NOTHING = WriteOptions()
AS_LLAMA = {
    "byte_fallback": True,
    "vocab_size": 400,
    "hard_vocab_limit": False,
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
}


def written(config: dict[str, Any], folder: Path, options: WriteOptions = NOTHING) -> Path:
    folder.mkdir()
    plan(config, options).write(folder)
    return folder


def again(folder: Path) -> Tokenizer:
    """The tokenizer in `folder`, by the flags that reading it gives."""
    fields = described(folder, 10_000)
    assert fields.pop("true_vocab_size") == 10_000
    return TokenizerSpec(**fields).build()


def test_gpt2_files_are_read_by_both_to_the_same_ids(tmp_path: Path) -> None:
    config = {"tokenizer_type": "GPT2BPETokenizer", **write_gpt2(tmp_path)}
    ours = build_tokenizer(**config)
    folder = written(config, tmp_path / "m")
    assert sorted(path.name for path in folder.iterdir()) == [
        "merges.txt", "tokenizer.json", "tokenizer_config.json", "vocab.json",
    ]  # fmt: skip
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    read = again(folder)
    for text in TEXTS:
        assert reference(text)["input_ids"] == ours.tokenize(text) == read.tokenize(text)
    assert reference.eos_token_id == ours.eod == read.eod
    assert len(reference) == ours.vocab_size == read.vocab_size
    ids = plan(config, NOTHING).special_ids
    assert ids == {"bos_token_id": ours.eod, "eos_token_id": ours.eod, "pad_token_id": None}


def test_a_tokenizer_json_and_what_lies_beside_it_are_copied(tmp_path: Path) -> None:
    source = tmp_path / "from"
    write_tokenizer_json(source)
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.safetensors").write_text("gigabytes")
    for given in (source, source / "tokenizer.json"):
        config = {"tokenizer_type": "HFTokenizer", "tokenizer_name_or_path": str(given)}
        folder = written(config, tmp_path / f"to {given.name}")
        assert sorted(path.name for path in folder.iterdir()) == [
            "chat_template.jinja", "merges.txt",
            "tokenizer.json", "tokenizer_config.json", "vocab.json",
        ]  # fmt: skip
        for name in ("tokenizer.json", "chat_template.jinja"):
            assert (folder / name).read_bytes() == (source / name).read_bytes()
        ours = build_tokenizer(**config)
        assert again(folder).tokenize(TEXTS[0]) == ours.tokenize(TEXTS[0])
        assert plan(config, NOTHING).special_ids["eos_token_id"] == ours.eod


@pytest.mark.parametrize("kind", ["Llama2Tokenizer", "GPTSentencePieceTokenizer"])
def test_a_sentencepiece_model_is_copied_with_its_special_pieces(kind: str, tmp_path: Path) -> None:
    model = write_sentencepiece(tmp_path, **AS_LLAMA)
    config = {"tokenizer_type": kind, "tokenizer_model": str(model)}
    ours = build_tokenizer(**config)
    folder = written(config, tmp_path / "m")
    assert (folder / "tokenizer.model").read_bytes() == model.read_bytes()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["add_bos_token"] == (kind == "Llama2Tokenizer")
    assert settings["eos_token"] == "</s>"  # noqa: S105
    assert plan(config, NOTHING).special_ids["eos_token_id"] == ours.eod == 2
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS[:3]:  # transformers turns an empty text into <s>, our tokenizer into nothing
        assert reference(text)["input_ids"] == ours.tokenize(text)
    assert len(reference) == ours.vocab_size
    assert reference.eos_token_id == ours.eod
    read = again(folder)
    assert read.name == kind
    assert read.tokenize(TEXTS[1]) == ours.tokenize(TEXTS[1])
    for damaged in ("[]", "{"):
        (folder / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(CheckpointError, match=r"tokenizer_config.json of a Hugging Face"):
            described(folder, 400)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalization_rule_name": "nmt_nfkc"}, "changes white space or characters"),
        ({"remove_extra_whitespaces": True}, "changes white space or characters"),
        ({"model_type": "unigram"}, "no byte-pair encoding"),
    ],
)
def test_a_sentencepiece_model_unlike_llamas_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = write_sentencepiece(tmp_path, **(AS_LLAMA | changes))
    config = {"tokenizer_type": "Llama2Tokenizer", "tokenizer_model": str(model)}
    with pytest.raises(CheckpointError, match="as one of LLaMA's, which it is not") as caught:
        plan(config, NOTHING)
    assert message in str(caught.value)


def test_a_run_without_files_has_none_to_copy(tmp_path: Path) -> None:
    for config in ({}, {"tokenizer_type": "ByteTokenizer"}):
        files = plan(config, NOTHING)
        assert (files.copies, files.made, files.special_ids) == ({}, {}, {})
    folder = tmp_path / "bare"
    folder.mkdir()
    read = TokenizerSpec(
        **{n: v for n, v in described(folder, 53).items() if n != "true_vocab_size"}
    )
    assert read.build().vocab_size == 53


def test_a_folder_can_be_named_in_place_of_the_runs_own(tmp_path: Path) -> None:
    source = tmp_path / "from"
    write_tokenizer_json(source)
    config = {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "gone", "merge_file": "gone"}
    with pytest.raises(CheckpointError, match="the tokenizer of the checkpoint cannot be read"):
        plan(config, NOTHING)
    folder = written(config, tmp_path / "m", WriteOptions(tokenizer=source))
    assert {path.name for path in folder.iterdir()} == {
        "tokenizer.json",
        "vocab.json",
        "merges.txt",
    }
    assert plan(config, WriteOptions(copy_tokenizer=False)).copies == {}


def test_added_tokens_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    config = {
        "tokenizer_type": "GPT2BPETokenizer", "vocab_extra_ids": 3, **write_gpt2(tmp_path)
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="added tokens that its files do not hold") as caught:
        plan(config, NOTHING)
    assert "3 extra ids" in str(caught.value)
    model = write_sentencepiece(tmp_path)
    config = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(model)}
    with pytest.raises(CheckpointError, match="no form that transformers reads") as caught:
        plan(config, NOTHING)
    assert "--tokenizer-type SentencePieceTokenizer" in str(caught.value)


def test_files_in_a_folder_are_told_apart(tmp_path: Path) -> None:
    gpt2 = write_gpt2(tmp_path)
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(gpt2["vocab_file"], folder / "vocab.json")
    shutil.copy(gpt2["merge_file"], folder / "merges.txt")
    assert described(folder, 7)["tokenizer_type"] == "GPT2BPETokenizer"
    assert again(folder).tokenize(TEXTS[0]) == build_tokenizer(
        tokenizer_type="GPT2BPETokenizer", **gpt2
    ).tokenize(TEXTS[0])


WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "brown", "fox", "##es", ",")
PAIR = ("The quick foxes,", "the BROWN fox")


@pytest.mark.parametrize("kind", ["BertWordPieceLowerCase", "BertWordPieceCase"])
def test_a_word_piece_is_the_same_there_with_the_tokens_that_ours_adds(
    kind: str, tmp_path: Path
) -> None:
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("\n".join(WORDS) + "\n")
    config = {"tokenizer_type": kind, "vocab_file": str(vocab), "vocab_extra_ids": 1}
    ours = build_tokenizer(**config)
    folder = written(config, tmp_path / "m")
    assert sorted(path.name for path in folder.iterdir()) == [
        "tokenizer.json", "tokenizer_config.json", "vocab.txt",
    ]  # fmt: skip
    lines = (folder / "vocab.txt").read_text().splitlines()
    assert lines == [*WORDS, "[BOS]", "[EOS]", "<extra_id_0>"]
    reference, read = transformers.AutoTokenizer.from_pretrained(folder), again(folder)
    assert type(reference).__name__.startswith("BertTokenizer")
    assert len(reference) == ours.vocab_size == read.vocab_size == len(lines)
    rows = reference(*PAIR)
    one, two = (ours.tokenize(text) for text in PAIR)
    assert (one, two) == tuple(read.tokenize(text) for text in PAIR)
    assert rows["input_ids"] == [ours.cls, *one, ours.sep, *two, ours.sep]
    assert rows["token_type_ids"] == [0] * (len(one) + 2) + [1] * (len(two) + 1)
    for role in ("cls", "sep", "mask", "pad", "unk"):
        assert getattr(reference, f"{role}_token_id") == getattr(ours, role), role
    assert plan(config, NOTHING).special_ids == {"pad_token_id": 0}
    # And from there again, as files of a folder.
    onward = {"tokenizer_type": "HFTokenizer", "tokenizer_name_or_path": str(folder)}
    copied = written(onward, tmp_path / "n")
    assert sorted(path.name for path in copied.iterdir()) == sorted(
        p.name for p in folder.iterdir()
    )
    assert plan(onward, NOTHING).special_ids == {"pad_token_id": 0}


def test_a_vocabulary_alone_is_said_to_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    assert described(tmp_path, 11)["tokenizer_type"] == "NullTokenizer"
    assert "vocab.txt is not read: ours adds two tokens to a WordPiece" in warnings[0]
