"""The layouts that a search tries: which there are, and what each needs at least.

`LAYOUT_FLAGS` has the searched flags in groups that are chosen together. The checks of a launch
decide what is a layout; nothing of them is repeated here. What a reader would get wrong: the guess
of the time orders what is tried first, and no result is made of it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from megatron.config.activations import RecomputeGranularity, RecomputeMethod
from megatron.config.fields import field_names
from megatron.config.parallel import ParallelConfig, PipelineSchedule, ShardingStrategy
from megatron.config.run import RunConfig
from megatron.engine.base import PretrainTask
from megatron.errors import MegatronError
from megatron.launch import Launch
from megatron.mpu.topology import Topology
from megatron.pipeline.plan import plan_of_run
from megatron.pipeline.schedule import ScheduleName
from megatron.planning.hardware import Hardware
from megatron.planning.rehearsal import World
from megatron.preflight.activations import least_activation_bytes
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.memory import even_kept_bytes
from megatron.preflight.run import RunPlan, collect_findings
from megatron.tokenizer.tokenizer import Tokenizer

Choice = Mapping[str, Any]  # values by the name of the flag's field


class SearchedRun(NamedTuple):
    """A run whose layout is searched.

    Attributes:
        config: with the flags that the user gave; the default of the others.
        fixed: the names of the fields that the user gave, which stay as they are.
    """

    config: RunConfig
    task: PretrainTask
    tokenizer: Tokenizer
    world_size: int
    fixed: frozenset[str]


_TP, _PP, _CP, _EP = (
    f"{axis}_parallel_size"
    for axis in ("tensor_model", "pipeline_model", "context", "expert_model")
)
_SIZES = (_TP, _PP, _CP)
RECOMPUTATION = (
    *("recompute_granularity", "recompute_method"),
    *("recompute_num_layers", "recompute_modules"),
)
LAYOUT_FLAGS: tuple[tuple[str, ...], ...] = (
    *((size,) for size in _SIZES),
    (_EP, "expert_tensor_parallel_size"),
    ("sequence_parallel",),
    (
        "pipeline_schedule",
        "num_virtual_stages_per_pipeline_rank",
        "num_layers_per_virtual_pipeline_stage",
    ),
    ("data_parallel_sharding_strategy", "use_distributed_optimizer"),
    RECOMPUTATION,
    ("micro_batch_size",),
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that the checks of a launch accept.

    Attributes:
        choice: the searched flags and their values; those that the user gave are not among them.
        at_least: a lower bound of the bytes at the peak of the rank that needs most.
    """

    choice: Choice
    world: World
    at_least: int

    @property
    def flags(self) -> tuple[str, ...]:
        """The chosen flags as a launch takes them; those with their default are left out."""
        words: list[str] = []
        for name, value in self.choice.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif value is not False and (value != 1 or name not in (*_SIZES, _EP)):
                words += [flag, str(value)]
        return tuple(words)


def layouts(run: SearchedRun) -> Iterator[Layout]:
    """Yield every layout of the searched flags that the checks of a launch accept."""
    for choice in choices(run):
        layout = layout_of(run, choice)
        if layout is not None:
            yield layout


def layout_of(run: SearchedRun, choice: Choice) -> Layout | None:
    """Return the layout of a run with other values of some flags; None if the checks refuse it."""
    launch = Launch(world_size=run.world_size, local_world_size=run.world_size)
    try:
        config, reads = with_choice(run.config, choice), run.task.reads
        plan = RunPlan(config, launch, run.tokenizer, reads=reads)
        if collect_findings(plan, LAYOUT_CHECKS):
            return None
        world = World.of(plan.config, run.task, run.tokenizer, run.world_size)
    except MegatronError:  # it is no layout
        return None
    return Layout(choice, world, _at_least(world, plan))


def choices(run: SearchedRun) -> Iterator[Choice]:
    """Yield every combination of values that the searched flags may have, admissible or not."""
    config, world_size, fixed = run.config, run.world_size, run.fixed
    model, training = config.model, config.training
    heads, layers = model.num_attention_heads, config.num_blocks
    free = {group: not fixed & set(group) for group in LAYOUT_FLAGS}
    divisors = [n for n in range(1, world_size + 1) if world_size % n == 0]
    experts = model.num_experts or 1
    sizes = {
        _TP: [n for n in divisors if heads % n == 0],
        _PP: [n for n in divisors if n <= layers],
        _CP: [n for n in divisors if config.data.seq_length % n == 0],
    }
    of_sizes = [sizes[n] if free[n,] else [getattr(config.parallel, n)] for n in _SIZES]
    *_, of_experts, of_sequence, of_schedule, of_sharding, of_recomputation, of_batch = LAYOUT_FLAGS
    recomputations: list[Choice] = [
        {},
        {"recompute_granularity": RecomputeGranularity.SELECTIVE},
        {
            "recompute_granularity": RecomputeGranularity.FULL,
            "recompute_method": RecomputeMethod.UNIFORM,
        },
    ]
    for tp, pp, cp in product(*of_sizes):
        replicas, rest = divmod(world_size, tp * pp * cp)
        if rest or not replicas:
            continue
        share = (training.global_batch_size or 0) // replicas
        sharings = list(ShardingStrategy) if replicas * cp > 1 else [ShardingStrategy.NO_SHARD]
        alternatives: dict[tuple[str, ...], list[Choice]] = {
            of_experts: [{_EP: n} for n in divisors if experts % n == 0],
            of_sequence: [
                {"sequence_parallel": on} for on in ((False, True) if tp > 1 else (False,))
            ],
            of_schedule: list(_schedules(pp, layers)),
            of_sharding: [{"data_parallel_sharding_strategy": one} for one in sharings],
            of_recomputation: recomputations,
            of_batch: [{"micro_batch_size": n} for n in range(1, share + 1) if share % n == 0],
        }
        grid = {n: value for n, value in zip(_SIZES, (tp, pp, cp), strict=True) if free[n,]}
        searched = [found for group, found in alternatives.items() if free[group]]
        for parts in product(*searched):
            choice = dict(grid)
            for part in parts:
                choice |= part
            if choice.get(_EP, 1) > 1 and tp > 1:
                choice["expert_tensor_parallel_size"] = 1
            yield choice


def _schedules(stages: int, layers: int) -> Iterator[Choice]:
    """Yield those of so many stages; gpipe is as fast as 1f1b, and needs more memory."""
    if stages == 1:
        yield {}
        return
    yield {"pipeline_schedule": PipelineSchedule.ONE_F_ONE_B}
    yield {"pipeline_schedule": PipelineSchedule.ZERO_BUBBLE}
    for chunks in range(2, layers // stages + 1):
        if layers % (stages * chunks) == 0:
            yield {
                "pipeline_schedule": PipelineSchedule.INTERLEAVED,
                "num_virtual_stages_per_pipeline_rank": chunks,
            }


def with_choice(config: RunConfig, choice: Choice) -> RunConfig:
    """Return the config with other values of those flags.

    Raises:
        MegatronError: it refuses them.
    """
    names = set(field_names(ParallelConfig))
    parallel = {name: value for name, value in choice.items() if name in names}
    training = {name: value for name, value in choice.items() if name not in names}
    return replace(
        config,
        parallel=replace(config.parallel, **parallel),
        training=replace(config.training, **training),
    )


def guess_seconds(layout: Layout, hardware: Hardware, flops_per_token: int) -> float:
    """Return what a step may take, for the order in which layouts are tried: nothing more.

    Products with the bubble, and of what is sent the sums over tp and over replicas.
    """
    world = layout.world
    config, grid, count = world.config, world.topology, world.microbatches
    pipeline = plan_of_run(config)
    rate = grid.world_size * hardware.peak(config) * hardware.efficiency
    idle = (grid.pp - 1) / (count * pipeline.num_chunks)
    if pipeline.schedule == ScheduleName.ZERO_BUBBLE:
        idle /= 3
    tokens = world.samples * config.data.seq_length
    seconds = flops_per_token * tokens / rate * (1 + idle)
    width = config.precision.precision.num_bytes
    carry = config.training.micro_batch_size * config.data.seq_length // grid.cp
    calls = 4 * config.num_blocks * count // grid.pp
    size = calls * carry * config.model.hidden_size * width
    if grid.tp > 1:
        seconds += hardware.seconds("all_reduce", _peers(grid, "tp"), calls=calls, size=size)
    replicas = _peers(grid, "dp", "cp")
    if len(replicas) > 1:
        times = 1.5 * count if config.parallel.sharding.shards_parameters else 1.0
        gradients = flops_per_token // 6 // (grid.tp * grid.pp) * 4
        once = hardware.seconds("all_reduce", replicas, calls=1, size=gradients)
        seconds += times * once
    return seconds


@cache
def _peers(grid: Topology, *axes: str) -> tuple[int, ...]:
    return grid.peers(0, *axes)


def _at_least(world: World, plan: RunPlan) -> int:
    num_towers = plan.reads.kind(world.config.data).num_towers
    saved = least_activation_bytes(world.config, world.topology.dp, num_towers=num_towers)
    return even_kept_bytes(plan).total + max(saved)
