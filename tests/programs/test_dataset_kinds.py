"""From JSON to a trained model for each kind of data that a GPT is trained on, by its commands."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError, DataError, PreflightError
from tests.support.launch import byte_corpus, pretrain_words, run_program, small_run
from tests.unit.tokenizer.vocabularies import TEXT, write_gpt2
from tools import preprocess_data, preprocess_sft, sample_idxs_to_text

BYTES = ("--tokenizer-type", "ByteTokenizer")
LETTERS = "bcdefghijklmnopqrstuvwxyz"
# Letters drawn at random cannot be learned: no model does better than ln 25 = 3.2 nats. What is
# always the same can, so a loss far below that is one of answers alone.
OF_ANSWERS_ALONE = 1.0
MARKS = ("--fim-prefix-token", "<0x00>", "--fim-suffix-token", "<0x01>")
MARKS += ("--fim-middle-token", "<0x02>")


def noise(draw: random.Random) -> str:
    """Text that cannot be learned."""
    return "".join(draw.choices(LETTERS, k=12))


def chats(folder: Path) -> str:
    """200 dialogues of unlearnable questions with one answer; the prefix for --sft."""
    draw = random.Random(0)
    with open(folder / "chats.jsonl", "w") as file:
        for _ in range(200):
            turns = [{"role": "user", "content": noise(draw)}]
            turns.append({"role": "assistant", "content": "a" * draw.randint(3, 9)})
            file.write(json.dumps({"messages": turns}) + "\n")
    words = ["--input", str(folder / "chats.jsonl"), "--output-prefix", str(folder / "chats")]
    preprocess_sft.main([*words, "--template", "plain", *BYTES])
    return str(folder / "chats")


def pairs(folder: Path) -> str:
    """200 pairs of unlearnable inputs with one target; the prefix for --mtf."""
    draw = random.Random(0)
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(200):
            pair = {"inputs": noise(draw), "targets": "a" * draw.randint(3, 9)}
            file.write(json.dumps(pair) + "\n")
    words = ["--input", str(folder / "pairs.jsonl"), "--output-prefix", str(folder / "pairs")]
    preprocess_data.main([*words, "--json-keys", "inputs", "targets", *BYTES])
    return str(folder / "pairs")


@pytest.fixture
def samples(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[Any]]:
    """Shows samples of a run by its flags."""

    def show(*flags: str) -> list[Any]:
        capsys.readouterr()
        sample_idxs_to_text.main([*flags, "--all-tokens", "--print-tokens"])
        lines = capsys.readouterr().out.splitlines()
        return [json.loads(line) for line in lines if line[:1] == "{"]

    return show


def losses(output: str, name: str = "lm loss") -> dict[int, float]:
    """The loss of each iteration that was logged."""
    found = re.findall(rf" iteration +(\d+)/.* {name}: ([\d.E+-]+) ", output)
    return {int(iteration): float(loss) for iteration, loss in found}


@pytest.mark.parametrize(("flag", "make"), [("--sft", chats), ("--mtf", pairs)])
def test_what_is_given_is_read_and_what_is_learned_is_learned(
    tmp_path: Path,
    flag: str,
    make: Callable[[Path], str],
    samples: Callable[..., list[Any]],
) -> None:
    prefix = make(tmp_path)
    run = small_run(prefix, flag, "--seq-length", "64", "--train-iters", "40", "--save", "save")
    words = pretrain_words(*run, "--load", "save")
    ended = run_program([*words, "--exit-interval", "20"], cwd=tmp_path)
    assert ended.status == 0, ended.text
    resumed = run_program(words, cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    found = losses(ended.out) | losses(resumed.out)
    assert list(found) == list(range(1, 41))
    assert found[1] > 4.5  # ln 257 = 5.55, for an untrained model
    assert found[40] < OF_ANSWERS_ALONE
    (shown,) = samples(*run, "--sample-id-range", "0", "1")
    assert (shown["corpus"], shown["num_tokens"]) == (prefix, 65)
    evaluated = re.findall(r"(?:validation|test) loss at iteration 40 \| .*", resumed.out)
    assert len(evaluated) == 2


def test_a_run_that_fills_in_middles_trains_resumes_and_shows_its_samples(
    tmp_path: Path, samples: Callable[..., list[Any]]
) -> None:
    prefix = byte_corpus(tmp_path)
    run = small_run(prefix, "--fim-data", "--fim-rate", "1", *MARKS, "--save", "save")
    words = pretrain_words(*run, "--load", "save")
    ended = run_program([*words, "--exit-interval", "2"], cwd=tmp_path)
    assert ended.status == 0, ended.text
    resumed = run_program(words, cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    assert "at iteration 2" in resumed.out
    assert list(losses(ended.out) | losses(resumed.out)) == [1, 2, 3, 4]
    rows = samples(*run)
    assert len(rows) == 10
    for row in rows:
        assert len(row["tokens"]) == 33
        assert row["tokens"].count(0) == row["tokens"].count(2) > 0
        assert row["corpus"] == prefix
        assert sum(stop - start for _, start, stop in row["documents"]) == 33


def test_made_up_samples_are_learned_without_a_corpus(
    tmp_path: Path, samples: Callable[..., list[Any]]
) -> None:
    run = small_run(None, "--train-iters", "30", "--lr", "0.01", "--split", "99,1,0")
    ended = run_program(pretrain_words(*run), cwd=tmp_path)
    assert ended.status == 0, ended.text
    found = losses(ended.out)
    assert found[1] > 4.5  # ln 257 = 5.55, for an untrained model
    assert found[30] < found[1] - 1  # in 30 steps it learns that few numbers are ever used
    assert "--split 99,1,0: nothing is evaluated on test data" in ended.text
    assert len(re.findall(r"validation loss at iteration 30 \| ", ended.out)) == 1
    assert list(tmp_path.iterdir()) == []
    (shown,) = samples(*run, "--sample-id-range", "0", "1")
    assert (shown["corpus"], shown["num_tokens"]) == ("MockDataset", 33)


def test_a_run_that_writes_lost_spans_trains(tmp_path: Path) -> None:
    vocabulary = write_gpt2(tmp_path / "tokenizer")
    tokenizer = ["--tokenizer-type", "GPT2BPETokenizer"]
    tokenizer += ["--vocab-file", vocabulary["vocab_file"]]
    tokenizer += ["--merge-file", vocabulary["merge_file"]]
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()))
    words = ["--input", str(text), "--output-prefix", str(tmp_path / "c"), "--append-eod"]
    preprocess_data.main([*words, *tokenizer])
    run = small_run(f"{tmp_path / 'c'}_text_document", *tokenizer, "--noise-density", "0.15")
    # The corpus was made without the sentinels, which stand behind its vocabulary.
    run += ["--vocab-extra-ids", "8", "--seq-length", "34"]
    ended = run_program(pretrain_words(*run), cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert list(losses(ended.out)) == [1, 2, 3, 4]


def test_everything_wrong_with_the_data_of_a_kind_is_said_at_once(tmp_path: Path) -> None:
    prefix = byte_corpus(tmp_path)
    ended = run_program(pretrain_words(*small_run(prefix, "--fim-data")), cwd=tmp_path)
    assert ended.status == ConfigError.exit_code
    assert "--fim-prefix-token <fim_prefix>" in ended.err
    assert "name tokens of the vocabulary that no text holds" in ended.err
    ended = run_program(pretrain_words(*small_run(prefix, "--sft")), cwd=tmp_path)
    assert ended.status == DataError.exit_code
    assert "--sft reads two corpora of one prefix" in ended.err
    both = small_run(prefix, "--sft", "--fim-data", "--fim-rate", "2")
    ended = run_program(pretrain_words(*both), cwd=tmp_path)
    assert ended.status == PreflightError.exit_code
    assert "--fim-data together with --sft" in ended.err
    assert "--fim-rate 2.0" in ended.err
