"""A run measured in tokens is the run measured in samples, as long as samples have one length.

When they grow, its learning rate follows the tokens, and a run that is resumed goes on with it.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import TOKENS_PER_SAMPLE, tiny_run, train, write_tiny_corpus

BATCH = 8 * TOKENS_PER_SAMPLE
GROWS: dict[str, Any] = {
    "curriculum_schedule": "fixed_linear",
    "curriculum_seqlen_min": 4,
    "curriculum_seqlen_step": 4,
    "curriculum_iters": 4,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents to train on."""
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def trained(corpus: str, flags: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Losses and learning rates of a run, and the tokens that it reports."""
    record = train(tiny_run(corpus, **{"train_iters": 6} | flags))
    rates = [plan.learning_rate for plan in record.plans]
    return record.losses, rates, record.progress.consumed_tokens


def of(corpus: str, **flags: Any) -> tuple[list[float], list[float], int]:
    """The same on one rank of its own."""
    return run_on_ranks(1, trained, corpus, flags)[0]


def test_a_schedule_in_tokens_is_the_one_in_samples(corpus: str) -> None:
    in_samples = of(corpus, train_iters=None, train_samples=48, lr_warmup_samples=16)
    in_tokens = of(corpus, lr_decay_tokens=6 * BATCH, lr_warmup_tokens=2 * BATCH)
    assert in_tokens == in_samples


def test_a_decay_in_tokens_begins_where_a_warmup_in_iterations_ended(corpus: str) -> None:
    in_tokens = {"lr_decay_tokens": 6 * BATCH, "lr_warmup_tokens": 2 * BATCH}
    assert of(corpus, lr_decay_tokens=6 * BATCH, lr_warmup_iters=2) == of(corpus, **in_tokens)
    _, rates, _ = of(corpus, **GROWS, lr_decay_tokens=6 * BATCH, lr_warmup_iters=2)
    read = [8 * length for length in (4, 8, 12, 16, 16, 16)]  # each iteration's
    warmup = read[0] + read[1]
    seen = [sum(read[:at]) for at in range(2, 6)]
    decay = [0.01 * (1 - (at - warmup) / (6 * BATCH - warmup)) for at in seen]
    assert rates == pytest.approx([0.0, 0.005, *decay], rel=1e-12)


def test_a_run_ends_at_its_tokens_with_the_numbers_of_a_longer_one(corpus: str) -> None:
    decay = {"lr_decay_tokens": 6 * BATCH}
    longer, shorter = of(corpus, **decay), of(corpus, **decay, train_tokens=3 * BATCH)
    assert shorter[2] == 3 * BATCH
    assert shorter[0] == longer[0][:3]


def test_under_a_curriculum_the_schedule_goes_by_the_tokens_that_were_read(
    corpus: str, tmp_path: Path
) -> None:
    flags = {**GROWS, "lr_decay_tokens": 6 * BATCH, "train_tokens": 400}
    losses, rates, tokens = of(corpus, **flags)
    read = [8 * length for length in (4, 8, 12, 16, 16, 16)]  # each iteration's
    before = [sum(read[:at]) for at in range(6)]
    steps = next(at for at, seen in enumerate([*before, sum(read)]) if seen >= 400)
    assert tokens == sum(read[:steps])
    expected = [0.01 * (1 - seen / (6 * BATCH)) for seen in before[:steps]]
    assert rates == pytest.approx(expected, rel=1e-12)
    save = {"save": str(tmp_path), "load": str(tmp_path)}
    first = of(corpus, **flags, **save, exit_interval=2)
    second = of(corpus, **flags, **save)
    assert [*first[0], *second[0]] == losses
