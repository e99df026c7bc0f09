"""LAMBADA and perplexities of a trained checkpoint: against one look at a time, on every grid."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.errors import CheckpointError, ConfigError, DataError
from megatron.inference import load_model_for_inference
from megatron.initialize import shutdown_megatron
from tasks.main import main
from tasks.zeroshot.detokenize import wikitext
from tests.programs.tasks.models import SAME, SENTENCES, sentences_gpt_checkpoint
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


def evaluate(argv: Sequence[str], output: str) -> None:
    main([*argv, "--output", output])
    shutdown_megatron()


def evaluated(ranks: int, output: Path, *words: object) -> dict[str, Any]:
    run_on_ranks(ranks, evaluate, [str(word) for word in words], str(output))
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def naive(folder: str, contexts: Sequence[tuple[str, str]], text: str) -> dict[str, Any]:
    """One passage, and one token of the text, at a time."""
    model, tokenizer, config, _ = load_model_for_inference(folder)
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


GRIDS: list[tuple[int, list[str]]] = [
    (1, []),
    (2, ["--tensor-model-parallel-size", "2"]),
    (2, []),
    (2, ["--pipeline-model-parallel-size", "2"]),
]


@pytest.mark.slow
def test_lambada_is_that_of_one_passage_at_a_time(
    checkpoint: Path, passages: Path, tmp_path: Path
) -> None:
    pairs = [(text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in PASSAGES]
    expected = run_on_ranks(1, naive, str(checkpoint), pairs, TEXT)[0]
    assert 0 < expected["correct"] < len(PASSAGES)
    for ranks, grid in GRIDS:
        words = ["--task", "LAMBADA", "--strict-lambada", "--load", checkpoint]
        words += ["--valid-data", passages, "--micro-batch-size", 2, *grid]
        found = evaluated(ranks, tmp_path / "out.json", *words)
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
    for ranks, grid in GRIDS:
        words = ["--task", "WIKITEXT103", "--load", checkpoint, "--valid-data", text]
        words += ["--overlapping-eval", 8, "--micro-batch-size", 4, *grid]
        found = evaluated(ranks, tmp_path / "out.json", *words)
        assert found["loss"] == pytest.approx(expected["loss"], rel=SAME)
        assert found["tokens"] == expected["tokens"]
        assert found["words"] == len(TEXT.strip().split(" "))
        assert found["token_ratio"] == expected["tokens"] / (found["words"] - 1)


def test_a_text_as_it_is_has_its_spaces(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    words = ["--load", checkpoint, "--valid-data", text]
    plain = evaluated(1, tmp_path / "a", "--task", "PERPLEXITY", *words)
    without = evaluated(1, tmp_path / "b", "--task", "WIKITEXT103", *words)
    assert plain["tokens"] == len(TEXT) - 1
    assert without["tokens"] == len(wikitext(TEXT)) - 1


def test_the_last_token_alone_counts_unless_it_is_strict(
    checkpoint: Path, passages: Path, tmp_path: Path
) -> None:
    words = ["--task", "LAMBADA", "--load", checkpoint, "--valid-data", passages]
    loose = evaluated(1, tmp_path / "a", *words)
    strict = evaluated(1, tmp_path / "b", *words, "--strict-lambada")
    assert 0 < strict["correct"] < loose["correct"] < len(PASSAGES)


def evaluate_and_fail(argv: Sequence[str]) -> str:
    try:
        main(argv)
    except (ConfigError, DataError, CheckpointError) as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    return "nothing was raised"


def said_of(*words: object) -> str:
    return run_on_ranks(1, evaluate_and_fail, [str(word) for word in words])[0]


def test_wrong_inputs_are_said_exactly(checkpoint: Path, passages: Path, tmp_path: Path) -> None:
    common = ["--load", checkpoint, "--valid-data"]
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "fine words"}\n{"txt": "no text"}\n')
    message = said_of("--task", "LAMBADA", *common, bad)
    assert "a line lacks a field that the task reads" in message
    assert "bad.jsonl:2: no 'text'; it has 'txt'" in message
    bad.write_text('{"text": 5}\n')
    assert "a field is not a text" in said_of("--task", "LAMBADA", *common, bad)
    bad.write_text("[1]\n")
    assert "a line is not a JSON object" in said_of("--task", "LAMBADA", *common, bad)
    bad.write_text("\n")
    assert "there is nothing to evaluate" in said_of("--task", "LAMBADA", *common, bad)
    missing = said_of("--task", "LAMBADA", *common, tmp_path / "lambda.jsonl")
    assert "a file of the task's data does not exist" in missing
    assert "bad.jsonl" in missing
    bad.write_text('{"text": "one"}\n')
    message = said_of("--task", "LAMBADA", "--strict-lambada", *common, bad)
    assert "a passage has no last word, or nothing before it" in message
    bad.write_text("x")
    assert "a text is too short to predict anything of it" in said_of(
        "--task", "PERPLEXITY", *common, bad
    )
    bad.write_text(" \n")
    assert "a text is empty" in said_of("--task", "PERPLEXITY", *common, bad)
    assert "micro-batch-size 0" in said_of(
        "--task", "LAMBADA", *common, passages, "--micro-batch-size", 0
    )
    assert "a size is not positive" in said_of(
        "--task", "PERPLEXITY", *common, passages, "--overlapping-eval", 0
    )
    assert "results cannot be written there" in said_of(
        "--task", "LAMBADA", *common, passages, "--output", tmp_path / "none" / "out.json"
    )


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, passages: Path) -> None:
    save = tmp_path / "bert"
    run = tiny_bert_run(write_tiny_sentences(tmp_path), train_iters=1, save=str(save))
    run_on_ranks(1, train_bert_all, [run])
    message = said_of("--task", "LAMBADA", "--load", save, "--valid-data", passages)
    assert "the checkpoint is of another kind of model than this program takes" in message
    assert "bert" in message
