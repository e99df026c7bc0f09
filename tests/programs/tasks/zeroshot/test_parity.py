"""Our scores are those of one look at a time, and those of `transformers` on the exported model.

The same model is loaded from our checkpoint, from Megatron's files by a script of Megatron's, and
from the Hugging Face folder; on one rank, and split by tensors, by layers and by rows.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.trained_model import load_model_for_inference
from tasks.zeroshot.pairs import ContextPair, encode_pair
from tests.programs.tasks.models import Exported, evaluated, refusals
from tests.support.ranks import run_on_ranks

# Per token, in float32: a few hundred sums in another order, of logits of size 1 to 10.
PER_TOKEN = 1e-5

PAIRS = [
    ContextPair("the cat sat on", " a mat and saw two dogs run"),
    ContextPair("two dogs", " run over green hills"),
    ContextPair("", "the cat sat"),
    ContextPair("while rain fell ", "far away"),
    ContextPair(
        "a mat and saw two dogs run over green hills far away while rain fell " * 3, "the cat"
    ),
]
# On two ranks.
GRIDS = {
    "tensors": ["--tensor-model-parallel-size", "2"],
    "rows": [],
    "layers": ["--pipeline-model-parallel-size", "2"],
}
# What Megatron-LM's scripts of evaluation give their tasks beside files.
SCRIPT = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --activations-checkpoint-method uniform "
    "--log-interval 10 --no-load-optim --no-load-rng --tokenizer-type GPT2BPETokenizer"
)


@pytest.fixture(scope="module")
def pairs(models: Exported) -> Path:
    file = models.ours.parent / "pairs.jsonl"
    file.write_text("".join(json.dumps(pair._asdict()) + "\n" for pair in PAIRS))
    return file


@pytest.fixture(scope="module")
def tokenized(models: Exported) -> list[tuple[list[int], list[int]]]:
    """The tokens of the pairs, cut in front to what the model can read."""
    (pairs,) = run_on_ranks(1, tokens_of, str(models.ours))
    return [
        (given[max(0, len(given) + len(continuation) - 33) :], continuation)
        for given, continuation in pairs
    ]


def tokens_of(folder: str) -> list[tuple[list[int], list[int]]]:
    tokenizer = load_model_for_inference(folder, device="cpu").tokenizer
    return [encode_pair(tokenizer, pair) for pair in PAIRS]


def log_likelihood(logits: Tensor, given: list[int], continuation: list[int]) -> float:
    """Of logits [s, v] for all tokens but the last."""
    scores = logits.float().log_softmax(-1)[len(given) - 1 :]
    return float(scores.gather(1, torch.tensor(continuation).unsqueeze(1)).sum())


@pytest.fixture(scope="module")
def theirs(models: Exported, tokenized: list[tuple[list[int], list[int]]]) -> list[float]:
    """One pair at a time, by the class that transformers chooses for the folder."""
    import transformers  # in seconds, which ranks that read this file need not wait for

    model = transformers.AutoModelForCausalLM.from_pretrained(
        models.huggingface, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        return [
            log_likelihood(model(torch.tensor([given + said[:-1]])).logits[0], given, said)
            for given, said in tokenized
        ]


def naive(folder: str, pairs: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """One pair at a time, by our model as it is, without batches or padding."""
    loaded = load_model_for_inference(folder, device="cpu")
    with torch.no_grad():
        return [
            log_likelihood(
                loaded.model(torch.tensor([given + continuation[:-1]]))[  # type: ignore[index]
                    :, 0, : loaded.tokenizer.vocab_size
                ],
                given,
                continuation,
            )
            for given, continuation in pairs
        ]


def assert_per_token(found: dict[str, Any], expected: Sequence[float]) -> None:
    for actual, reference in zip(found["pairs"], expected, strict=True):
        apart = abs(actual["log_likelihood"] - reference) / actual["num_tokens"]
        assert apart < PER_TOKEN, (actual, reference)


@pytest.mark.slow
def test_every_grid_says_what_transformers_says(
    models: Exported,
    pairs: Path,
    tokenized: list[tuple[list[int], list[int]]],
    theirs: list[float],
    tmp_path: Path,
) -> None:
    (alone,) = run_on_ranks(1, naive, str(models.ours), tokenized)
    assert max(theirs) - min(theirs) > 1  # so that rows cannot have been exchanged
    assert alone == pytest.approx(theirs, abs=PER_TOKEN)
    words = ["--task", "LOGLIKELIHOOD", "--load", models.ours, "--valid-data", pairs]
    words += ["--micro-batch-size", 2]
    found = evaluated(1, {tmp_path / "alone": words})
    found += evaluated(2, {tmp_path / name: [*words, *grid] for name, grid in GRIDS.items()})
    for one in found:
        assert_per_token(one, theirs)
        assert one["truncated"] == 1


@pytest.mark.slow
def test_other_programs_checkpoints_are_evaluated_alike(
    models: Exported, pairs: Path, theirs: list[float], tmp_path: Path
) -> None:
    files = [word for name, path in models.vocabulary.items() for word in (f"--{name}", path)]
    files = [word.replace("_", "-") if word.startswith("--") else word for word in files]
    words = ["--task", "LOGLIKELIHOOD", "--valid-data", pairs]
    found = evaluated(
        1,
        {
            tmp_path / folder.name: [*words, *SCRIPT.split(), *files, "--load", folder]
            for folder in (models.megatron, models.huggingface, models.ours)
        },
    )
    found += evaluated(
        2, {tmp_path / "split": [*words, "--load", models.huggingface, *GRIDS["tensors"]]}
    )
    for one in found:
        assert_per_token(one, theirs)


@pytest.mark.slow
def test_a_checkpoint_that_was_moved_is_told_where_its_vocabulary_lies(
    models: Exported, pairs: Path, theirs: list[float], tmp_path: Path
) -> None:
    there = Path(models.vocabulary["vocab_file"]).parent
    moved, other = (Path(shutil.copytree(there, tmp_path / name)) for name in ("moved", "other"))
    spelled = json.loads((other / "vocab.json").read_text())
    first, second = sorted(spelled)[50:52]
    spelled[first], spelled[second] = spelled[second], spelled[first]
    (other / "vocab.json").write_text(json.dumps(spelled))
    words = ["--task", "LOGLIKELIHOOD", "--valid-data", pairs, "--load", models.ours]
    output = tmp_path / "out"
    there.rename(there.with_name("hidden"))
    try:
        nowhere, found, changed = refusals(
            words,
            [*words, *files_in(moved), "--output", output],
            [*words, *files_in(other)],
        )
    finally:
        there.with_name("hidden").rename(there)
    assert "--vocab-file does not name a file" in nowhere
    assert found == ""
    assert_per_token(json.loads(output.read_text()), theirs)
    assert "the tokenizer is not the one that the model was trained with" in changed


def files_in(folder: Path) -> list[object]:
    return ["--vocab-file", folder / "vocab.json", "--merge-file", folder / "merges.txt"]


@pytest.mark.slow
def test_flags_that_contradict_the_checkpoint_are_refused(models: Exported, pairs: Path) -> None:
    words = ["--task", "LOGLIKELIHOOD", "--valid-data", pairs, "--load"]
    script = SCRIPT.replace("--num-layers 2", "--num-layers 24").split()
    *deeper, twice, misspelled = refusals(
        [*words, models.ours, *script],
        [*words, models.megatron, *script],
        [*words, models.ours, "--fp32", "--fp16"],
        [*words, models.ours, "--num-layrs", "2"],
    )
    for said in deeper:
        assert "flags and checkpoint describe different models" in said
        assert "--num-layers 24 given, 2 stored" in said
    assert "more than one precision was asked for" in twice
    assert "did you mean --num-layers?" in misspelled


@pytest.mark.slow
def test_half_precision_is_near_and_is_said(models: Exported, pairs: Path, tmp_path: Path) -> None:
    words = ["--task", "LOGLIKELIHOOD", "--valid-data", pairs, "--load", models.ours]
    exact, rounded = evaluated(1, {tmp_path / "a": words, tmp_path / "b": [*words, "--bf16"]})
    assert rounded["loss"] != exact["loss"]
    # bfloat16 keeps 8 bits: logits of size 10 are off by a few hundredths.
    assert rounded["loss"] == pytest.approx(exact["loss"], rel=0.05)
