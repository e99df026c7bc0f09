"""Batch sizes and the length of a run: what is refused."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.fields import FieldsError
from megatron.config.training import SpikeAction, TrainingConfig
from megatron.errors import ConfigError
from tests.unit.config.groups import some_training

POSITIVE = [
    "micro_batch_size",
    "global_batch_size",
    "exit_interval",
    "exit_duration_in_mins",
    "num_threads",
    "nonfinite_limit",
]
NOT_NEGATIVE = ["eval_interval", "eval_iters", "check_agreement_interval", "seed"]


@pytest.mark.parametrize("name", POSITIVE)
def test_counts_are_positive(name: str) -> None:
    with pytest.raises(ConfigError, match="it is not positive") as caught:
        some_training(**{name: 0})
    assert caught.value.found == f"--{name.replace('_', '-')} 0"


@pytest.mark.parametrize("name", NOT_NEGATIVE)
def test_intervals_are_not_negative_and_zero_turns_them_off(name: str) -> None:
    assert getattr(some_training(**{name: 0}), name) == 0
    with pytest.raises(ConfigError, match="it cannot be negative") as caught:
        some_training(**{name: -1})
    assert caught.value.found == f"--{name.replace('_', '-')} -1"


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_the_weight_of_the_z_loss_is_a_finite_number_from_0(weight: float) -> None:
    assert some_training().z_loss_coeff == 0
    assert some_training(z_loss_coeff=1e-4).z_loss_coeff == 1e-4
    with pytest.raises(ConfigError, match="the weight of a loss is not a number from 0") as caught:
        some_training(z_loss_coeff=weight)
    assert caught.value.found == f"--z-loss-coeff {weight}"


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ({"train_iters": None}, "neither --train-iters nor --train-samples"),
        ({"train_samples": 20}, "--train-iters 10 and --train-samples 20"),
    ],
)
def test_the_length_is_given_exactly_once(lengths: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match="must be given exactly once") as caught:
        some_training(**lengths)
    assert caught.value.found == found


@pytest.mark.parametrize("ramp", [(1, 2), (4, 4, 0), (0, 4, 10), (4, -4, 10)])
def test_a_ramp_is_three_positive_numbers(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="a batch-size ramp is three positive numbers"):
        some_training(
            rampup_batch_size=ramp, global_batch_size=16, train_iters=None, train_samples=100
        )


@pytest.mark.parametrize("ramp", [(16, 4, 10), (5, 4, 10)])
def test_a_ramp_arrives_at_the_global_batch_size(ramp: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="does not arrive at the global batch size"):
        some_training(
            rampup_batch_size=ramp, global_batch_size=16, train_iters=None, train_samples=100
        )


@given(start=st.integers(1, 50), increment=st.integers(1, 50), steps=st.integers(1, 50))
def test_every_ramp_of_whole_steps_is_accepted(start: int, increment: int, steps: int) -> None:
    for length in ({"train_iters": None, "train_samples": 100_000}, {"train_iters": 10}):
        config = some_training(
            rampup_batch_size=(start, increment, 1000),
            global_batch_size=start + increment * steps,
            **length,
        )
        assert config.rampup_batch_size == (start, increment, 1000)


def in_steps(text: str, **flags: Any) -> TrainingConfig:
    values = {"global_batch_size": 3072, "train_iters": None, "train_samples": 10**6}
    return some_training(step_batch_size_schedule=text, **(values | flags))


def test_steps_of_the_batch_size_are_counted_in_tokens() -> None:
    steps = in_steps("0:768 1:16 2.4K:32 1.5M:3072 250B:1536 1.25T:8").batch_steps
    tokens = (0, 1, 2400, 1_500_000, 250 * 10**9, 1_250 * 10**9)
    assert steps == tuple(zip(tokens, (768, 16, 32, 3072, 1536, 8)))
    assert some_training().batch_steps == ()


NOT_SIZES = ("", "0", "0:0", "0:-1", "0:8, 5:3072", "0 : 3072")
NOT_TOKENS = ("0:8 .5:3072", "0:8 0.5:3072", "0:8 1k:3072")
NOT_IN_ORDER = ("5:3072", "0:8 1B:16 1B:3072", "0:8 2:16 1:3072")


@pytest.mark.parametrize("text", [*NOT_SIZES, *NOT_TOKENS, *NOT_IN_ORDER])
def test_steps_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="schedule of batch sizes cannot be read"):
        in_steps(text)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"global_batch_size": 16}, "not the largest of its schedule"),
        ({"global_batch_size": None}, "not the largest of its schedule"),
        ({"rampup_batch_size": (1024, 1024, 100)}, "follows two schedules"),
    ],
)
def test_steps_go_up_to_the_global_batch_size(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        in_steps("0:768 1B:3072", **flags)


def test_all_that_is_wrong_is_said_together() -> None:
    with pytest.raises(FieldsError) as caught:
        some_training(micro_batch_size=0, seed=-1, train_iters=None)
    problems = [error.problem for error in caught.value.errors]
    assert len(problems) == 3
    assert all(problem in str(caught.value) for problem in problems)


def test_a_spike_is_above_the_losses_before_it() -> None:
    for factor in (1.0, 0.5):
        with pytest.raises(ConfigError, match="no higher than those before"):
            TrainingConfig(micro_batch_size=1, train_iters=1, loss_spike_factor=factor)
    with pytest.raises(ConfigError, match="nothing says which loss is a spike"):
        TrainingConfig(micro_batch_size=1, train_iters=1, loss_spike_action=SpikeAction.REWIND)
    rewinds = TrainingConfig(
        micro_batch_size=1,
        train_iters=1,
        loss_spike_factor=3.0,
        loss_spike_action=SpikeAction.REWIND,
    )
    assert rewinds.loss_spike_factor == 3.0
