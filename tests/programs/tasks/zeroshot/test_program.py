"""LAMBADA and perplexities of a trained checkpoint: against one look at a time, on every grid."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.initialize import shutdown_megatron
from megatron.trained_model import load_model_for_inference
from tasks.zeroshot.detokenize import wikitext
from tests.programs.tasks.models import (
    SAME,
    SENTENCES,
    evaluated,
    refusals,
    sentences_gpt_checkpoint,
)
from tests.support.ranks import run_on_ranks
from tests.support.tiny_bert import tiny_bert_run, train_bert_all, write_tiny_sentences

# The model completes two of its sentences, of the third the last letter alone, and no other one.
PASSAGES = [*SENTENCES, "the cat sat on a hat"]
TEXT = " = Cats = \n the cat , a dog and 1 @,@ 000 mice sat . \n" * 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(sentences_gpt_checkpoint(tmp_path_factory.mktemp("trained")))


@pytest.fixture
def passages(tmp_path: Path) -> Path:
    file = tmp_path / "lambada.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return file


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "wiki.txt"
    file.write_text(TEXT)
    return file


def naive(folder: str, contexts: Sequence[tuple[str, str]], text: str) -> dict[str, Any]:
    """One passage, and one token of the text, at a time."""
    model, tokenizer, config, *_ = load_model_for_inference(folder)
    model.eval()
    correct = 0
    with torch.no_grad():
        for context, answer in contexts:
            before, wanted = tokenizer.tokenize(context), tokenizer.tokenize(answer)
            logits = model(torch.tensor([before + wanted]))[:, 0, : tokenizer.vocab_size]
            correct += logits.argmax(-1)[len(before) - 1 : -1].tolist() == wanted
        tokens, losses = tokenizer.tokenize(text), []
        for at in range(1, len(tokens)):
            # A window is aligned to where Megatron-LM's with a step of 8 would begin.
            length = config.data.seq_length
            start = 0 if at <= length else math.ceil((at - length) / 8) * 8
            logits = model(torch.tensor([tokens[start:at]]))[-1, 0, : tokenizer.vocab_size]
            losses.append(-float(logits.log_softmax(-1)[tokens[at]]))
    shutdown_megatron()
    return {"correct": correct, "loss": math.fsum(losses) / len(losses), "tokens": len(losses)}


# On two ranks.
GRIDS = {
    "tensors": ["--tensor-model-parallel-size", "2"],
    "rows": [],
    "layers": ["--pipeline-model-parallel-size", "2"],
}


def on_every_grid(folder: Path, words: Sequence[object]) -> list[dict[str, Any]]:
    """What is found by one rank, and by two that share the work in every way."""
    alone = evaluated(1, {folder / "alone": words})
    return alone + evaluated(2, {folder / name: [*words, *grid] for name, grid in GRIDS.items()})


@pytest.mark.slow
def test_lambada_is_that_of_one_passage_at_a_time(
    checkpoint: Path, passages: Path, tmp_path: Path
) -> None:
    pairs = [(text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in PASSAGES]
    expected = run_on_ranks(1, naive, str(checkpoint), pairs, TEXT)[0]
    assert 0 < expected["correct"] < len(PASSAGES)
    words = ["--task", "LAMBADA", "--strict-lambada", "--load", checkpoint]
    words += ["--valid-data", passages, "--micro-batch-size", 2]
    for found in on_every_grid(tmp_path, words):
        assert found == {
            "task": "LAMBADA",
            "correct": expected["correct"],
            "total": len(PASSAGES),
            "truncated": 0,
            "accuracy": expected["correct"] / len(PASSAGES),
        }


@pytest.mark.slow
def test_perplexity_is_that_of_one_token_at_a_time(
    checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    expected = run_on_ranks(1, naive, str(checkpoint), [], wikitext(TEXT))[0]
    words = ["--task", "WIKITEXT103", "--load", checkpoint, "--valid-data", text]
    words += ["--overlapping-eval", 8, "--micro-batch-size", 4]
    for found in on_every_grid(tmp_path, words):
        assert found["loss"] == pytest.approx(expected["loss"], rel=SAME)
        assert found["tokens"] == expected["tokens"]
        assert found["words"] == len(TEXT.strip().split(" "))
        assert found["token_ratio"] == expected["tokens"] / (found["words"] - 1)


def test_a_text_as_it_is_has_its_spaces(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    words = ["--load", checkpoint, "--valid-data", text]
    runs = {tmp_path / name: ["--task", name, *words] for name in ("PERPLEXITY", "WIKITEXT103")}
    plain, without = evaluated(1, runs)
    assert plain["tokens"] == len(TEXT) - 1
    assert without["tokens"] == len(wikitext(TEXT)) - 1


def test_the_last_token_alone_counts_unless_it_is_strict(
    checkpoint: Path, passages: Path, tmp_path: Path
) -> None:
    words = ["--task", "LAMBADA", "--load", checkpoint, "--valid-data", passages]
    runs = {tmp_path / "a": words, tmp_path / "b": [*words, "--strict-lambada"]}
    loose, strict = evaluated(1, runs)
    assert 0 < strict["correct"] < loose["correct"] < len(PASSAGES)


def test_wrong_inputs_are_said_exactly(checkpoint: Path, passages: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()

    def of_text(text: str) -> Path:
        file = made / f"{len(list(made.iterdir()))}.jsonl"
        file.write_text(text)
        return file

    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine words"}\n{"txt": "no text"}\n')
    fields = ["a line lacks a field that the task reads", "bad.jsonl:2: no 'text'; it has 'txt'"]
    missing = ["a file of the task's data does not exist", "bad.jsonl"]
    single = ["a passage has no last word, or nothing before it"]
    strict, none = "--strict-lambada", tmp_path / "none" / "out.json"
    cases: list[tuple[str, list[object], list[str]]] = [
        ("LAMBADA", [bad], fields),
        ("LAMBADA", [of_text('{"text": 5}\n')], ["a field is not a text"]),
        ("LAMBADA", [of_text("[1]\n")], ["a line is not a JSON object"]),
        ("LAMBADA", [of_text("\n")], ["there is nothing to evaluate"]),
        ("LAMBADA", [tmp_path / "lambda.jsonl"], missing),
        ("LAMBADA", [of_text('{"text": "one"}\n'), strict], single),
        ("PERPLEXITY", [of_text("x")], ["a text is too short to predict anything of it"]),
        ("PERPLEXITY", [of_text(" \n")], ["a text is empty"]),
        ("LAMBADA", [passages, "--micro-batch-size", 0], ["micro-batch-size 0"]),
        ("PERPLEXITY", [passages, "--overlapping-eval", 0], ["a size is not positive"]),
        ("LAMBADA", [passages, "--output", none], ["results cannot be written there"]),
    ]
    found = refusals(
        *(["--task", task, "--load", checkpoint, "--valid-data", *own] for task, own, _ in cases)
    )
    for (_, own, words), said in zip(cases, found, strict=True):
        assert all(word in said for word in words), (own, said)


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, passages: Path) -> None:
    save = tmp_path / "bert"
    run = tiny_bert_run(write_tiny_sentences(tmp_path), train_iters=1, save=str(save))
    run_on_ranks(1, train_bert_all, [run])
    (said,) = refusals(["--task", "LAMBADA", "--load", save, "--valid-data", passages])
    assert "the checkpoint is of another kind of model than this program takes" in said
    assert "bert" in said
