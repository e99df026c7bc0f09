"""The converter to and from Hugging Face folders of BERTs, and programs that take other models."""

import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.checkpoint.formats.huggingface.tokenizer import plan
from megatron.checkpoint.source import WriteOptions
from tests.support.checkpoints.hf_bert import hf_bert
from tests.support.launch import ROOT, Ended, run_program

VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es")


def tool(name: str, *words: object) -> Ended:
    path = ROOT / "tools" / f"{name}.py"
    return run_program([sys.executable, str(path), *map(str, words)], cwd=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small BERT with its tokenizer."""
    root = tmp_path_factory.mktemp("bert")
    (root / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    hf_bert("bert", vocab_size=len(VOCABULARY) + 2).save_pretrained(root / "model")
    config = {"tokenizer_type": "BertWordPieceLowerCase", "vocab_file": str(root / "vocab.txt")}
    plan(config, WriteOptions()).write(root / "model")
    return root / "model"


def test_there_and_back_with_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    done = tool("convert_checkpoint", "--load", folder, "--save", ours, "--format", "sharded")
    assert done.status == 0, done.text
    done = tool("inspect_checkpoint", ours)
    assert "kind of model: bert" in done.out
    done = tool("convert_checkpoint", "--load", ours, "--save", back, "--format", "huggingface")
    assert done.status == 0, done.text
    assert "hidden states, pooled rows, word scores, order scores of 48 tokens" in done.text
    assert "transformers computes the same model" in done.text
    before, after = (load_file(path / "model.safetensors") for path in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert tokenizer("The foxes", "quick")["input_ids"] == [2, 5, 7, 8, 3, 6, 3]
    model = transformers.AutoModelForPreTraining.from_pretrained(back)
    assert type(model).__name__ == "BertForPreTraining"


def test_programs_for_other_models_say_both_kinds(folder: Path, tmp_path: Path) -> None:
    written = (tmp_path / "gpt2", "--format", "huggingface")
    done = tool("convert_checkpoint", "--load", folder, "--save", *written, "--family", "gpt2")
    assert done.status == 66, done.text
    message = "holds a BERT (kind bert), and the family gpt2 takes a GPT (kind gpt)"
    assert message in done.text
    done = tool("generate_text", "--load", folder, "--prompt", "the", "--device", "cpu")
    assert done.status == 66, done.text
    assert "holds a BERT (kind bert), and this program takes a GPT (kind gpt)" in done.text
