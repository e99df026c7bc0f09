"""A T5 from sentences to weights that go on, by its command; and what it shares with no GPT."""

import re
import sys
from pathlib import Path

import pytest

from tests.programs.test_dataset_kinds import losses
from tests.support.launch import ROOT, run_program, small_run
from tests.support.tiny_bert import write_tiny_sentences

T5 = str(ROOT / "pretrain_t5.py")
GPT = str(ROOT / "pretrain_gpt.py")

pytestmark = pytest.mark.slow


def test_help_is_there_without_torch(tmp_path: Path) -> None:
    ended = run_program([sys.executable, "-X", "importtime", T5, "--help"], cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert "--decoder-num-layers" in ended.out
    assert not re.search(r"\| +(torch|numpy)\b", ended.err)


def test_a_t5_learns_goes_on_and_is_refused_by_a_gpt(tmp_path: Path) -> None:
    words = write_tiny_sentences(tmp_path)
    data = ("--vocab-file", words.vocab_file, "--tokenizer-type", "BertWordPieceLowerCase")
    shape = ("--encoder-seq-length", "32", "--num-layers", "1", "--encoder-num-layers", "2")
    run = small_run(words.prefix, *data, *shape, "--train-iters", "30", "--lr", "1e-2")
    own = ("--vocab-extra-ids", "16", "--decoder-seq-length", "16", "--save", "t5")
    first = run_program([sys.executable, T5, *run, *own, "--exit-interval", "20"], cwd=tmp_path)
    assert first.status == 0, first.text
    assert "t5 with" in first.out
    assert "for the tokens of both stacks" in first.out
    resumed = run_program([sys.executable, T5, *run, *own, "--load", "t5"], cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    found = losses(first.out) | losses(resumed.out)
    assert list(found) == list(range(1, 31))
    assert found[30] < found[1] - 1

    refused = run_program([sys.executable, GPT, *run, *own], cwd=tmp_path)
    assert refused.status != 0
    assert "to a program whose model has one stack" in refused.text
    refused = run_program(
        [sys.executable, T5, *run, *own, "--decoder-seq-length", "40"], cwd=tmp_path
    )
    assert refused.status != 0
    assert "40 tokens of the decoder, 32 positions" in refused.text
