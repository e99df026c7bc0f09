"""How large batches are, how long a run is, and how many samples it needs."""

from typing import Any

import pytest

from megatron.config.training import TrainingConfig
from megatron.errors import ConfigError
from megatron.preflight.lengths import batch_schedule, duration, num_samples


def training(**flags: Any) -> TrainingConfig:
    return TrainingConfig(**({"micro_batch_size": 2, "train_iters": 10} | flags))


def test_without_a_global_batch_it_is_one_micro_batch_each() -> None:
    assert batch_schedule(training(), 3).global_batch_size == 6
    assert batch_schedule(training(global_batch_size=12), 3).global_batch_size == 12


def test_a_ramp_is_handed_on() -> None:
    flags = {"global_batch_size": 8, "rampup_batch_size": (4, 4, 40), "train_samples": 80}
    batches = batch_schedule(training(**flags, train_iters=None), 1)
    assert batches.sizes == (4, 8)
    assert duration(training(**flags, train_iters=None), batches).total_samples == 80


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"eval_iters": 0}, (40, 0, 0)),
        # Validation after 4 and 8 iterations and at the end.
        ({"eval_iters": 2, "eval_interval": 4}, (40, 3 * 8, 8)),
        ({"eval_iters": 2, "eval_interval": 0}, (40, 8, 8)),
    ],
)
def test_samples_are_enough_for_every_evaluation(
    flags: dict[str, int], expected: tuple[int, int, int]
) -> None:
    config = training(global_batch_size=4, **flags)
    batches = batch_schedule(config, 2)
    assert num_samples(config, duration(config, batches), 4) == expected


def test_batches_and_lengths_that_do_not_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not divide into whole micro-batches"):
        batch_schedule(training(global_batch_size=7), 2)
    short = training(train_iters=None, train_samples=3, global_batch_size=4)
    with pytest.raises(ConfigError, match="shorter than one iteration"):
        duration(short, batch_schedule(short, 2))
