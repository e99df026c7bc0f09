"""Example scripts of other Megatrons, shrunken to what two ranks of a CPU train: the loss falls."""

import re
from pathlib import Path

import pytest

from tests.programs.tools.launch_scripts.scripts_of_other_megatrons import (
    BIGSCIENCE,
    MEGATRON_LM,
    MICROSOFT,
    Script,
)
from tests.support.launch import all_ended, byte_corpus, each_rank

pytestmark = pytest.mark.slow

# Where files lie, how long the run is, and what needs a GPU; everything else stays.
LEFT_OUT = {
    *("--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model"),
    *("--vocab-size", "--mock-data", "--data-cache-path", "--load", "--save", "--tensorboard-dir"),
    *("--save-interval", "--train-samples", "--train-tokens", "--lr-decay-samples"),
    *("--lr-decay-tokens", "--lr-decay-iters", "--lr-warmup-tokens", "--lr-warmup-samples"),
    *("--lr-warmup-iters", "--lr-warmup-fraction", "--profile", "--profile-step-start"),
    *("--profile-step-end", "--distributed-backend", "--eval-interval"),
}
SMALL = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --lr 1e-2
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 10
    --min-lr 1e-3 --eval-iters 0 --log-interval 1 --num-workers 0 --tokenizer-type ByteTokenizer"""
GATED = "--ffn-hidden-size 128"
RUNS = [
    (BIGSCIENCE[1], "--tensor-model-parallel-size 1 --initial-loss-scale 1024"),
    (MICROSOFT[0], "--initial-loss-scale 1024"),
    (MICROSOFT[2], f"{GATED} --pipeline-model-parallel-size 1"),
    (MEGATRON_LM[2], f"{GATED} --kv-channels 16 --num-query-groups 2 --attention-backend auto"),
]


def shrunken(script: Script, more: str) -> list[str]:
    """The flags of a script without those that are left out, and with other sizes behind them."""
    words: list[str] = []
    is_left_out = False
    for word in script.flags.split():
        if word.startswith("--"):
            is_left_out = word in LEFT_OUT
        if not is_left_out:
            words.append(word)
    return [*words, *SMALL.split(), *more.split()]


@pytest.mark.parametrize(("script", "more"), RUNS, ids=[script.path for script, _ in RUNS])
def test_a_shrunken_script_learns(tmp_path: Path, script: Script, more: str) -> None:
    words = [*shrunken(script, more), "--data-path", byte_corpus(tmp_path)]
    with each_rank(2, words, cwds=[tmp_path]) as ranks:
        first, second = all_ended(ranks)
    assert (first.status, second.status) == (0, 0), first.text + second.text
    # The last rank prints the lines of Megatron's form.
    losses = [float(loss) for loss in re.findall(r"lm loss: ([\d.E+-]+) ", first.out + second.out)]
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 0.3  # of 5.5 nats at first; steps differ by less than 0.1
