"""Flags that make a run fit: each is rehearsed, the cheapest of those that are enough is last."""

import pytest

from megatron.planning import fitting
from megatron.planning.fitting import Tried, fit
from megatron.planning.layouts import SearchedRun, layout_of
from megatron.planning.rehearsal import World, rehearse
from tests.unit.planning.test_layouts import run_of

BATCH = ("--micro-batch-size", "2", "--seq-length", "16")
STAGES = (
    "--num-layers",
    "2",
    "--pipeline-model-parallel-size",
    "2",
    "--tensor-model-parallel-size",
    "2",
    *BATCH,
)


def peak(run: SearchedRun) -> int:
    world = World.of(run.config, run.task, run.tokenizer, run.world_size)
    return max(rank.bytes.peak for rank in rehearse(world, world.representatives()))


def tried(run: SearchedRun, memory: int) -> list[Tried]:
    return list(fit(run, memory))


def test_the_first_flag_that_is_enough_is_the_last_that_is_tried() -> None:
    run = run_of(8, *STAGES)
    now = peak(run)
    (one,) = tried(run, now - 1)
    assert one.fits
    assert one.layout.flags == ("--use-distributed-optimizer",)
    peaks = [rank.bytes.peak for rank in one.ranks]
    assert min(peaks) < one.peak == max(peaks) < now
    world = one.layout.world
    assert one.ranks == rehearse(world, world.representatives())


def test_flags_are_tried_in_the_order_of_their_cost() -> None:
    run = run_of(8, *STAGES)
    found = tried(run, 1)
    flags = [" ".join(one.layout.flags) for one in found]
    assert flags[:6] == [
        "--use-distributed-optimizer",
        "--sequence-parallel",
        "--recompute-granularity selective",
        "--micro-batch-size 1",
        "--recompute-granularity full --recompute-method uniform",
        "--data-parallel-sharding-strategy optim_grads_params",
    ]
    assert flags[6] == "--tensor-model-parallel-size 4"
    alone = flags.index("--use-distributed-optimizer --sequence-parallel")
    assert flags[alone + 1].startswith("--use-distributed-optimizer --sequence-parallel --recomp")
    assert not any(one.fits or one.ranks for one in found)  # by the lower bound


def test_flags_add_up_where_none_is_enough_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = (fitting._smaller_microbatches, fitting._full_recomputation)
    monkeypatch.setattr(fitting, "KNOBS", knobs)
    run = run_of(1, "--micro-batch-size", "2", "--global-batch-size", "2")
    singles = [layout_of(run, choice) for knob in knobs for choice in knob(run.config)]
    limit = min(peak(run._replace(config=one.world.config)) for one in singles if one) - 1
    *others, last = fit(run, limit)
    assert last.fits
    assert last.peak <= limit
    assert last.layout.flags == (
        *("--micro-batch-size", "1", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform"),
    )
    assert others
    assert not any(one.fits for one in others)


@pytest.mark.parametrize(
    ("flags", "absent"),
    [
        (["--use-distributed-optimizer"], "use_distributed_optimizer"),
        (["--tensor-model-parallel-size", "1"], "sequence_parallel"),
        (["--micro-batch-size", "1"], "micro_batch_size"),
        (["--recompute-granularity", "selective"], "selective"),
        (["--data-parallel-sharding-strategy", "optim_grads_params"], "optim_grads_params"),
    ],
)
def test_flags_that_are_given_are_not_tried(flags: list[str], absent: str) -> None:
    found = tried(run_of(8, *STAGES, *flags), 1)
    alone = [one.layout.choice for one in found if len(one.layout.choice) == 1]
    assert found
    assert not any(absent in {*choice, *map(str, choice.values())} for choice in alone)


def test_a_strategy_that_is_given_is_replaced_by_its_own_flag() -> None:
    run = run_of(8, *STAGES, "--data-parallel-sharding-strategy", "no_shard")
    first = next(fit(run, 1))
    assert first.layout.flags == ("--data-parallel-sharding-strategy", "optim")
