"""The converter to and from Hugging Face folders, as a user starts it, tokenizer and all."""

import json
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.support.checkpoints.hf_models import hf_model
from tests.support.launch import ROOT, Ended, run_program
from tests.unit.tokenizer.vocabularies import write_gpt2

CONVERT = str(ROOT / "tools" / "convert_checkpoint.py")
GENERATE = str(ROOT / "tools" / "generate_text.py")
PROMPT = "the quick brown"
VOCABULARY = 320  # more rows than the tokenizer of 300 pieces has tokens, as in Pythia


def convert(*words: object) -> Ended:
    return run_program([sys.executable, CONVERT, *map(str, words)], cwd=ROOT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT-NeoX with a tokenizer of a few English words."""
    folder = tmp_path_factory.mktemp("pythia")
    files = write_gpt2(folder / "bpe")
    hf_model("gpt_neox", vocab_size=VOCABULARY).save_pretrained(folder / "model")
    for file in files.values():
        Path(file).rename(folder / "model" / Path(file).name)
    (folder / "bpe" / "tokenizer.json").rename(folder / "model" / "tokenizer.json")
    settings = {"eos_token": "<|endoftext|>", "tokenizer_class": "GPT2Tokenizer"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder / "model"


def test_there_and_back_and_text_from_both(folder: Path, tmp_path: Path) -> None:
    ours, back = tmp_path / "ours", tmp_path / "back"
    done = convert("--load", folder, "--save", ours, "--format", "sharded")
    assert done.status == 0, done.text
    done = convert("--load", ours, "--save", back, "--format", "huggingface")
    assert done.status == 0, done.text
    assert "transformers computes the same model" in done.text
    before, after = (load_file(path / "model.safetensors") for path in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt"):
        assert (back / name).read_bytes() == (folder / name).read_bytes()
    # The same words from the checkpoint here as from the folder there.
    tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    model = transformers.AutoModelForCausalLM.from_pretrained(back)
    ids = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    for load in (ours, back):
        output = run_program(
            [sys.executable, GENERATE, "--load", str(load), "--prompt", PROMPT, "--greedy",
             "--num-tokens", "8", "--json", "--device", "cpu"],
            cwd=ROOT,
        )  # fmt: skip
        assert output.status == 0, output.text
        line = next(line for line in output.out.splitlines() if line.startswith("{"))
        assert json.loads(line)["tokens"] == expected[0, ids["input_ids"].shape[1] :].tolist()


def test_flags_of_the_export(folder: Path, tmp_path: Path) -> None:
    narrow = tmp_path / "narrow"
    done = convert(
        "--load", folder, "--save", narrow, "--format", "huggingface", "--dtype", "bf16",
        "--max-shard-size", "30KB", "--no-copy-tokenizer", "--family", "gpt_neox",
    )  # fmt: skip
    assert done.status == 0, done.text
    assert len(list(narrow.glob("model-*.safetensors"))) > 2
    assert not (narrow / "tokenizer.json").exists()
    model = transformers.AutoModelForCausalLM.from_pretrained(narrow)
    assert model.dtype == torch.bfloat16
    done = convert(
        "--load", folder, "--save", tmp_path / "fast", "--format", "huggingface",
        "--no-check-logits",
    )  # fmt: skip
    assert done.status == 0, done.text
    assert "transformers computes" not in done.text


@pytest.mark.parametrize(
    ("words", "message", "status"),
    [
        (("--family", "llama"), "the family llama does not compute what this model does", 66),
        (("--family", "roberta"), "has no model here yet: a bidirectional encoder", 66),
        (("--max-shard-size", "5 gigs"), "a size of files cannot be read", 64),
        (("--true-vocab-size", "300"), "add --true-vocab-size 320", 66),
    ],
)
def test_what_cannot_be_done_is_said(
    folder: Path, tmp_path: Path, words: tuple[str, ...], message: str, status: int
) -> None:
    done = convert("--load", folder, "--save", tmp_path / "m", "--format", "huggingface", *words)
    assert done.status == status, done.text
    assert message in done.text
    assert not (tmp_path / "m").exists()
