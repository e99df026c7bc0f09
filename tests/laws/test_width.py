"""The law of widths: under muP the learning rate of a small model serves wider ones.

What it promises (Yang et al. 2022, arXiv 2203.03466, section 1): wider is better at any time of a
training, at the same learning rate. Without it, a rate that trains the small model spoils the wide.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import tiny_run, train_all, write_tiny_corpus

WIDTHS = (16, 64, 256)
RUN: dict[str, Any] = {
    "lr": 0.03,
    "lr_decay_style": "constant",
    "train_iters": 6,
    "micro_batch_size": 8,
    "clip_grad": 0.0,  # which would hide how far updates go
    "init_method_std": 0.1,
    "fp64": False,
}
MUP: dict[str, Any] = {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, int], list[float]]:
    corpus = write_tiny_corpus(Path(tmp_path_factory.mktemp("corpus")))
    kinds = [(is_mup, width) for is_mup in (False, True) for width in WIDTHS]
    runs = [
        tiny_run(corpus, **RUN, **(MUP if is_mup else {}), hidden_size=width)
        for is_mup, width in kinds
    ]
    (records,) = run_on_ranks(1, train_all, runs)
    return {kind: record.losses for kind, record in zip(kinds, records)}


def test_wider_is_better_at_the_learning_rate_of_the_small_model(
    losses: dict[tuple[bool, int], list[float]],
) -> None:
    narrow, middle, wide = (losses[True, width] for width in WIDTHS)
    assert narrow == losses[False, WIDTHS[0]], "at its own width muP changes nothing"
    assert narrow[-1] > middle[-1] > wide[-1]
    assert wide[-1] < wide[0] - 0.4  # nats, of 4.0


def test_without_it_that_learning_rate_spoils_the_wide_model(
    losses: dict[tuple[bool, int], list[float]],
) -> None:
    assert losses[False, WIDTHS[0]][-1] < losses[False, WIDTHS[0]][0]
    assert losses[False, WIDTHS[-1]][-1] > losses[False, WIDTHS[-1]][0]
