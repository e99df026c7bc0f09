"""Which layouts a search tries: those that a launch accepts, all of them, and their bounds."""

from functools import cache
from itertools import chain, product
from typing import Any

import pytest

from megatron.arguments import parse_args, parse_given
from megatron.config.parallel import PipelineSchedule, ShardingStrategy
from megatron.errors import MegatronError
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.planning.layouts import (
    LAYOUT_FLAGS,
    Layout,
    SearchedRun,
    guess_seconds,
    layouts,
    with_choice,
)
from megatron.planning.rehearsal import World, rehearse
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.run import RunPlan, collect_findings
from pretrain_gpt import gpt_task
from tests.unit.planning.test_step_time import SLOW
from tests.unit.planning.worlds import OF_TASK, planned_world

FLAGS = (
    *("--num-layers", "4", "--hidden-size", "16", "--num-attention-heads", "4"),
    *("--seq-length", "16", "--max-position-embeddings", "16", "--bf16", "--train-iters", "1"),
    *("--global-batch-size", "8", "--lr", "0.1", "--data-path", "nowhere"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "50"),
    *("--make-vocab-size-divisible-by", "4"),
)
REHEARSALS = 4  # of all layouts: a second each
EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--swiglu"),
    *("--data-parallel-sharding-strategy", "no_shard", "--recompute-granularity", "selective"),
)


def run_of(size: int, *flags: str) -> SearchedRun:
    words = [*FLAGS, *flags]
    config = parse_args(words, args_defaults={"micro_batch_size": 1})
    fixed = frozenset(parse_given(words))
    return SearchedRun(config, gpt_task(), tokenizer_of(config), size, fixed)


@cache
def layouts_of_four(flags: tuple[str, ...]) -> tuple[Layout, ...]:
    """All layouts of four ranks, which takes seconds."""
    return tuple(layouts(run_of(4, *flags)))


def is_accepted(run: SearchedRun, **values: Any) -> bool:
    try:
        config = with_choice(run.config, values)
        launch = Launch(world_size=run.world_size, local_world_size=run.world_size)
        if collect_findings(RunPlan(config, launch, run.tokenizer), LAYOUT_CHECKS):
            return False
        World.of(config, run.task, run.tokenizer, run.world_size)
    except MegatronError:
        return False
    return True


@pytest.mark.parametrize("flags", [(), EXPERTS], ids=["dense", "experts"])
def test_a_launch_takes_every_layout_as_its_flags_say(flags: tuple[str, ...]) -> None:
    run = run_of(4, *flags)
    for layout in layouts_of_four(flags):
        config = parse_args([*FLAGS, *flags, *layout.flags])
        assert config == layout.world.config
        assert is_accepted(run, **layout.choice)


def test_no_layout_is_missed_in_a_small_world() -> None:
    """All values of all searched flags are tried, and the checks say which of them can be."""
    run = run_of(4, "--recompute-granularity", "selective", "--sequence-parallel")
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    sizes = [f"{name}_parallel_size" for name in names]
    schedule, chunks = "pipeline_schedule", "num_virtual_stages_per_pipeline_rank"
    sharing, batch = "data_parallel_sharding_strategy", "micro_batch_size"
    schedules = [name for name in PipelineSchedule if name is not PipelineSchedule.GPIPE]
    expected = set()
    for tp, pp, cp, ep, name, v, sharding, rows in product(
        *[range(1, 5)] * 4, schedules, (None, 2, 3, 4), ShardingStrategy, range(1, 9)
    ):
        if tp * pp * cp > run.world_size or (name == "interleaved") != (v is not None):
            continue
        if pp == 1 and name != "1f1b":
            continue  # no pipeline: one schedule is like another
        if tp * pp == run.world_size and sharding != "no_shard":
            continue  # no replicas: nothing to share out
        values = dict(zip(sizes, (tp, pp, cp, ep), strict=True))
        if is_accepted(
            run, **values, **{schedule: name, chunks: v, sharing: sharding, batch: rows}
        ):
            expected.add((tp, pp, cp, ep, name, v, sharding, rows))
    found = {
        (
            *(layout.choice[size] for size in sizes),
            layout.choice.get(schedule, PipelineSchedule.ONE_F_ONE_B),
            *(layout.choice.get(chunks), layout.choice[sharing], layout.choice[batch]),
        )
        for layout in layouts(run)
    }
    assert len(found) > 30
    assert found == expected


def test_whole_experts_are_shared_out_beside_tensor_parallelism() -> None:
    grids = {
        (layout.world.topology.tp, layout.world.topology.ep) for layout in layouts_of_four(EXPERTS)
    }
    # Experts are shared out over tp and the replicas together.
    assert {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)} <= grids


def test_layouts_of_a_model_with_a_decoder_are_found() -> None:
    world = planned_world(4, **OF_TASK["t5"], num_layers=2)
    fixed = frozenset(chain(*LAYOUT_FLAGS)) - {"pipeline_model_parallel_size"}
    run = SearchedRun(world.config, world.task, world.tokenizer, 4, fixed)
    # Two layers of the encoder and two of the decoder.
    assert {layout.world.topology.pp for layout in layouts(run)} == {1, 2, 4}


def test_given_flags_stay() -> None:
    run = run_of(4, "--tensor-model-parallel-size", "2", "--micro-batch-size", "2")
    for layout in layouts(run):
        assert layout.world.topology.tp == 2
        assert layout.world.config.training.micro_batch_size == 2
        assert not layout.choice.keys() & {"tensor_model_parallel_size", "micro_batch_size"}


@pytest.mark.parametrize("flags", [(), EXPERTS], ids=["dense", "experts"])
def test_the_bound_is_below_what_a_rehearsal_needs(flags: tuple[str, ...]) -> None:
    every = layouts_of_four(flags)
    for layout in every[:: len(every) // REHEARSALS]:
        plans = rehearse(layout.world, layout.world.representatives())
        assert 0 < layout.at_least <= max(plan.bytes.peak for plan in plans), layout.flags


def test_the_guess_counts_idle_stages_and_what_is_sent() -> None:
    run = run_of(4, "--micro-batch-size", "1", "--context-parallel-size", "1")
    seconds = {layout.flags: guess_seconds(layout, SLOW, 600) for layout in layouts(run)}
    sharing = ("--data-parallel-sharding-strategy", "no_shard")
    stages = ("--pipeline-model-parallel-size", "4", "--pipeline-schedule")
    plain, zero = ((*stages, name, *sharing) for name in ("1f1b", "zero-bubble"))
    # 600 FLOPs of 8 x 16 tokens on 4 ranks of 10 FLOP/s; 3 of 8 micro-batches wait.
    assert seconds[plain] == pytest.approx(600 * 8 * 16 / 40 * (1 + 3 / 8))
    assert seconds[zero] == pytest.approx(600 * 8 * 16 / 40 * (1 + 1 / 8))
    assert seconds["--tensor-model-parallel-size", "4", *sharing] > seconds[plain]
