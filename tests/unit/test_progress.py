"""Tests of megatron.progress."""

import dataclasses
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.errors import CheckpointError, ConfigError
from megatron.progress import BatchSchedule, Duration, Progress
from tests.support.examples import examples

CONSTANT = BatchSchedule(4, 16, 2)
RAMP = BatchSchedule(2, 32, 4, rampup=(8, 8, 300))  # 8, 16, 24 for 100 samples each, then 32


@st.composite
def schedules(draw: st.DrawFn) -> BatchSchedule:
    """Any valid schedule with small numbers: constant, with a ramp, or in steps."""
    micro, parallel, start = (draw(st.integers(1, 4)) for _ in range(3))
    unit = micro * parallel
    if draw(st.booleans()):
        begins = draw(st.lists(st.integers(1, 500), max_size=4, unique=True))
        sizes = [unit * draw(st.integers(1, 4)) for _ in (0, *begins)]
        return BatchSchedule(
            micro, max(sizes), parallel, steps=tuple(zip([0, *sorted(begins)], sizes))
        )
    steps, increment = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    whole = unit * (start + steps * increment)
    ramp = (unit * start, unit * increment, draw(st.integers(1, 500))) if steps else None
    return BatchSchedule(micro, whole, parallel, rampup=ramp)


@given(schedule=schedules(), iterations=st.integers(1, 60))
def test_a_run_in_iterations_is_the_run_in_as_many_samples(
    schedule: BatchSchedule, iterations: int
) -> None:
    samples = walk(schedule, iterations)[-1]
    in_iterations = Duration(schedule, train_iters=iterations)
    assert in_iterations.total_samples == samples
    assert Duration(schedule, train_samples=samples).total_iterations == iterations


def walk(schedule: BatchSchedule, iterations: int) -> list[int]:
    """Samples consumed before each iteration, one iteration after the other."""
    consumed = [0]
    for _ in range(iterations):
        consumed.append(consumed[-1] + schedule.global_batch_size_at(consumed[-1]))
    return consumed


def test_progress_counts_one_iteration() -> None:
    after = Progress().after(samples=16, tokens=160)
    assert after == Progress(iteration=1, consumed_samples=16, consumed_tokens=160)


def test_progress_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Progress().iteration = 3  # type: ignore[misc]


def test_a_skipped_iteration_consumes_its_samples_and_counts_as_nonfinite() -> None:
    once = Progress().after(samples=4, tokens=8, skipped=True)
    twice = once.after(samples=4, tokens=8, skipped=True)
    assert (twice.iteration, twice.consumed_samples) == (2, 8)
    assert (twice.skipped_iterations, twice.nonfinite_in_a_row) == (2, 2)
    assert twice.after(samples=4, tokens=8).nonfinite_in_a_row == 0
    assert twice.after(samples=4, tokens=8).skipped_iterations == 2


def test_an_expected_overflow_is_skipped_but_not_nonfinite() -> None:
    after = Progress().after(samples=4, tokens=8, skipped=True, nonfinite=False)
    assert (after.skipped_iterations, after.nonfinite_in_a_row) == (1, 0)


def test_evaluation_consumes_validation_samples_only() -> None:
    assert Progress().after_evaluation(samples=5) == Progress(consumed_valid_samples=5)


@given(st.tuples(*[st.integers(0, 2**50)] * 6))
def test_progress_survives_json(values: tuple[int, ...]) -> None:
    progress = Progress(*values)
    assert Progress.from_plain(json.loads(json.dumps(progress.to_plain()))) == progress


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"iteration": -1}, "iteration=-1"),
        ({"iteration": 1.5}, "iteration=1.5"),
        ({"epoch": 3}, "epoch=3"),
    ],
)
def test_a_stored_progress_that_makes_no_sense_is_refused(
    change: dict[str, int], message: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"stored progress(.|\n)*{message}"):
        Progress.from_plain({**Progress().to_plain(), **change})


def test_a_stored_progress_without_a_counter_is_refused() -> None:
    plain = Progress().to_plain()
    del plain["consumed_tokens"]
    with pytest.raises(CheckpointError, match="consumed_tokens=missing"):
        Progress.from_plain(plain)


def test_a_constant_batch_is_constant() -> None:
    assert [CONSTANT.global_batch_size_at(n) for n in (0, 1, 10**9)] == [16, 16, 16]
    assert CONSTANT.num_microbatches_at(5) == 2
    assert CONSTANT.sizes == (16,)


def test_a_ramp_grows_as_in_megatron() -> None:
    at = RAMP.global_batch_size_at
    assert [at(n) for n in (0, 99, 100, 199, 200, 299, 300, 10**9)] == [
        8,
        8,
        16,
        16,
        24,
        24,
        32,
        32,
    ]
    assert [RAMP.num_microbatches_at(n) for n in (0, 100, 200, 300)] == [1, 2, 3, 4]
    assert RAMP.sizes == (8, 16, 24, 32)


@pytest.mark.parametrize(
    ("steps", "samples", "consumed", "done"),
    [
        (14, 36, 18, 7),  # as 18 / (36 / 14) it is 6.9999
        (22, 176, 120, 15),  # as 120 / 176 * 22 it is 14.9999
        (7, 10**17 + 1, 28571428571428571, 1),  # as 28571428571428571 * 7 / (10**17 + 1) it is 2
    ],
)
def test_no_step_of_a_ramp_comes_early_or_late_by_rounding(
    steps: int, samples: int, consumed: int, done: int
) -> None:
    ramp = BatchSchedule(1, 1 + steps, 1, rampup=(1, 1, samples))
    assert ramp.global_batch_size_at(consumed) == 1 + done
    starts = [-(-step * samples // steps) for step in range(1, steps + 1)]
    for step, start in enumerate(starts, 1):
        assert ramp.global_batch_size_at(start - 1) == step
        assert ramp.global_batch_size_at(start) == step + 1


@given(schedules(), st.integers(0, 2000))
def test_every_batch_is_whole_micro_batches_and_a_ramp_never_shrinks(
    schedule: BatchSchedule, consumed: int
) -> None:
    size = schedule.global_batch_size_at(consumed)
    assert size == schedule.num_microbatches_at(consumed) * schedule.samples_per_microbatch
    assert size in schedule.sizes
    assert schedule.steps or schedule.global_batch_size_at(consumed + 1) >= size


@given(schedules(), st.integers(0, 80))
def test_samples_before_an_iteration_are_those_of_a_walk(
    schedule: BatchSchedule, iterations: int
) -> None:
    assert schedule.samples_before(iterations) == walk(schedule, iterations)[-1]


@given(schedules(), st.integers(0, 2000))
@examples(100)
def test_iterations_within_samples_are_those_of_a_walk(
    schedule: BatchSchedule, samples: int
) -> None:
    count = sum(consumed <= samples for consumed in walk(schedule, samples)[1:])
    assert schedule.iterations_within(samples) == count


def test_each_step_of_the_batch_size_begins_with_its_sample() -> None:
    stepped = BatchSchedule(2, 24, 4, steps=((0, 8), (100, 24), (250, 16)))
    at = stepped.global_batch_size_at
    assert [at(n) for n in (0, 99, 100, 249, 250, 10**9)] == [8, 8, 24, 24, 16, 16]
    assert stepped.sizes == (8, 24, 16)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (((0, 8), (100, 12)), "does not divide into whole micro-batches(.|\n)*multiples of 8"),
        (((0, 8), (0, 16)), "begin with the same sample"),
        (((5, 8),), "begin with the same sample"),
    ],
)
def test_steps_that_do_not_work_are_refused(
    steps: tuple[tuple[int, int], ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchSchedule(4, 16, 2, steps=steps)


@pytest.mark.parametrize(("size", "fix"), [(18, "16 or 24"), (3, "8$")])
def test_a_batch_that_does_not_divide_names_the_nearest_sizes(size: int, fix: str) -> None:
    with pytest.raises(ConfigError, match=rf"does not divide(.|\n)*use --global-batch-size {fix}"):
        BatchSchedule(4, size, 2)


@pytest.mark.parametrize(
    ("ramp", "fix"),
    [
        ((6, 2, 100), "8 8 100"),
        ((8, 4, 100), "8 8 100"),
        ((4, 4, 100), "8 8 100"),
        ((16, 4, 50), "16 8 50"),
    ],
)
def test_a_ramp_with_an_odd_step_offers_one_that_works(
    ramp: tuple[int, int, int], fix: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"step of the batch-size ramp(.|\n)*use --rampup-batch-size {fix}"
    ):
        BatchSchedule(4, 32, 2, rampup=ramp)


@pytest.mark.parametrize("ramp", [(32, 8, 10), (40, 8, 10), (8, 7, 10), (8, 8, 0), (0, 8, 10)])
def test_a_ramp_that_does_not_arrive_offers_one_that_works(ramp: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="does not arrive") as caught:
        BatchSchedule(4, 32, 2, rampup=ramp)
    start, increment, samples = map(int, caught.value.fix.split()[-3:])
    BatchSchedule(4, 32, 2, rampup=(start, increment, samples))


def test_a_ramp_to_a_single_micro_batch_is_told_to_go() -> None:
    with pytest.raises(ConfigError, match="drop --rampup-batch-size"):
        BatchSchedule(4, 8, 2, rampup=(4, 4, 100))


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(2, 8),
    st.tuples(st.integers(-2, 99), st.integers(-2, 30), st.integers(-1, 100)),
)
def test_the_ramp_that_an_error_offers_is_accepted(
    micro: int, parallel: int, batches: int, ramp: tuple[int, int, int]
) -> None:
    whole = micro * parallel * batches
    try:
        BatchSchedule(micro, whole, parallel, rampup=ramp)
    except ConfigError as error:
        offered = tuple(map(int, error.fix.split()[-3:]))
        BatchSchedule(micro, whole, parallel, rampup=offered)  # type: ignore[arg-type]


def test_a_run_in_iterations_ends_after_them() -> None:
    duration = Duration(CONSTANT, train_iters=10)
    assert (duration.total_iterations, duration.total_samples) == (10, 160)
    assert not duration.is_done(Progress(iteration=9, consumed_samples=144))
    assert duration.is_done(Progress(iteration=10, consumed_samples=160))


def test_a_run_in_samples_ends_with_the_last_whole_batch() -> None:
    duration = Duration(CONSTANT, train_samples=100)
    assert (duration.total_iterations, duration.total_samples) == (6, 96)
    assert not duration.is_done(Progress(iteration=5, consumed_samples=80))
    assert duration.is_done(Progress(iteration=6, consumed_samples=96))


def test_a_run_in_samples_looks_at_samples_after_a_change_of_batch_size() -> None:
    duration = Duration(CONSTANT, train_samples=100)
    assert duration.is_done(Progress(iteration=1, consumed_samples=96))
    assert not duration.is_done(Progress(iteration=99, consumed_samples=84))


@given(schedules(), st.integers(1, 1000))
@examples(100)
def test_a_run_lasts_as_long_as_it_says(schedule: BatchSchedule, samples: int) -> None:
    assume(samples >= schedule.global_batch_size_at(0))
    duration = Duration(schedule, train_samples=samples)
    progress = Progress()
    while not duration.is_done(progress):
        size = schedule.global_batch_size_at(progress.consumed_samples)
        progress = progress.after(samples=size, tokens=0)
    assert progress.iteration == duration.total_iterations
    assert progress.consumed_samples == duration.total_samples <= samples


def test_a_training_shorter_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shorter than one iteration(.|\n)*train-samples 16 or"):
        Duration(CONSTANT, train_samples=15)
