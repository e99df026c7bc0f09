"""A trained GPT for tests of tasks."""

from collections.abc import Sequence
from pathlib import Path

from megatron.arguments import parse_args
from tests.support.launch import byte_corpus, small_run
from tests.support.ranks import run_on_ranks
from tests.support.tiny import train

# Of float64 sums in another order.
SAME = 1e-9


def tiny_gpt_checkpoint(folder: Path) -> str:
    """The folder of a GPT on bytes, in float64, in which no two tokens are a tie."""
    save = folder / "save"
    flags = ["--fp64", "--train-iters", "20", "--save", str(save), "--eval-iters", "0"]
    run_on_ranks(1, _train_one, small_run(byte_corpus(folder), *flags))
    return str(save)


def _train_one(argv: Sequence[str]) -> None:
    train(parse_args(argv))
