"""A prefix LM from windows of text to pairs, by its commands, and the answers that it writes."""

import re
import sys
from pathlib import Path

import pytest

from tests.programs.test_dataset_kinds import OF_ANSWERS_ALONE, losses, pairs
from tests.support.launch import ROOT, byte_corpus, run_program, small_run

PREFIX_LM = str(ROOT / "pretrain_prefix_lm.py")
T0 = str(ROOT / "finetune_t0_non_causal_decoder.py")
GENERATE = str(ROOT / "tools" / "generate_text.py")

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("program", [PREFIX_LM, T0])
def test_help_is_there_without_torch(program: str, tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", program, "--help"]
    ended = run_program(words, cwd=tmp_path)
    assert ended.status == 0, ended.text
    assert "--loss-on-targets-only" in ended.out
    assert "megatron.arguments" in ended.err
    assert not re.search(r"\| +(torch|numpy)\b", ended.err)


def test_a_model_goes_from_windows_with_prefixes_to_pairs(tmp_path: Path) -> None:
    corpus = byte_corpus(tmp_path)
    common = ("--seq-length", "64", "--position-embedding-type", "rope")
    run = small_run(corpus, *common, "--train-iters", "4", "--save", "prefix")
    words = [sys.executable, PREFIX_LM, *run, "--reset-attention-mask"]
    first = run_program([*words, "--exit-interval", "2"], cwd=tmp_path)
    assert first.status == 0, first.text
    assert "prefix_lm with" in first.out
    assert "--loss-on-targets-only leaves them out" in first.text
    resumed = run_program([*words, "--load", "prefix"], cwd=tmp_path)
    assert resumed.status == 0, resumed.text
    assert list(losses(first.out) | losses(resumed.out)) == [1, 2, 3, 4]

    tuning = small_run(pairs(tmp_path), *common, "--train-iters", "40", "--save", "t0")
    words = [sys.executable, T0, *tuning]
    refused = run_program([*words, "--load", "prefix", "--sft"], cwd=tmp_path)
    assert refused.status != 0
    assert "two kinds of training data were given at once" in refused.text
    ended = run_program([*words, "--load", "prefix", "--finetune"], cwd=tmp_path)
    assert ended.status == 0, ended.text
    found = losses(ended.out)
    assert found[1] > 3.0
    assert found[40] < OF_ANSWERS_ALONE

    asked = ["--load", "t0", "--num-tokens", "3", "--greedy", "--prompt", "bcdefghijklm"]
    written = run_program([sys.executable, GENERATE, *asked], cwd=tmp_path)
    assert written.status == 0, written.text
    assert "aaa" in written.out
