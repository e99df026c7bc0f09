"""An estimate of the time of a step, from what ranks compute and send and how fast machines are.

What a reader would get wrong: this is a model. Kernels reach one share of the peak whatever their
shape, links are never shared with another axis, and nothing fails. What it overlaps is in
`_exposed`; the rest is waited for.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.pipeline.plan import plan_of_run
from megatron.pipeline.simulate import Durations, Simulation, simulate_schedule
from megatron.planning.hardware import Hardware
from megatron.planning.rehearsal import RankPlan, World

_FORWARD, _BACKWARD, _EXCHANGE = "forward-compute", "backward-compute", "pipeline-exchange"
_REPLICAS = ("dp", "dp_cp", "edp")


class StepTime(NamedTuple):
    """Seconds of a step, and of what they are spent on by the stage that works longest."""

    total: float
    compute: float
    exposed: dict[str, float]  # by axis: communication that is waited for
    bubble: float  # idle, or waiting for messages between stages
    update: float


def bubble(world: World, durations: Durations = Durations()) -> Simulation:  # noqa: B008  # immutable
    """Return the simulated passes of all stages, of such durations for one chunk."""
    plan = plan_of_run(world.config)
    return simulate_schedule(
        plan.schedule,
        num_stages=plan.num_stages,
        num_microbatches=world.microbatches,
        num_chunks=plan.num_chunks,
        durations=durations,
        overlaps=world.config.parallel.overlap_p2p_communication,
    )


def step_time(world: World, ranks: Sequence[RankPlan], hardware: Hardware) -> StepTime:
    """Return the estimate, in which every stage takes as long as the slowest of `ranks`."""
    rate = hardware.peak(world.config) * hardware.efficiency
    costs = [_costs(world, rank, hardware, rate) for rank in ranks]
    slowest = max(costs, key=lambda cost: cost.forward + cost.backward)
    plan = plan_of_run(world.config)
    passes = world.microbatches * plan.num_chunks
    half = slowest.backward / passes / 2
    message = max(cost.message for cost in costs)
    done = bubble(world, Durations(slowest.forward / passes, half, half, message))
    update = max(cost.update for cost in costs)
    after = sum(slowest.after.values())
    working = slowest.forward + slowest.backward
    exposed = {
        axis: slowest.exposed.get(axis, 0.0) + slowest.after.get(axis, 0.0)
        for axis in dict.fromkeys([*slowest.exposed, *slowest.after])
    }
    return StepTime(
        total=done.makespan + after + update,
        compute=working - sum(slowest.exposed.values()),
        exposed={axis: seconds for axis, seconds in exposed.items() if seconds > 0},
        bubble=done.makespan - working,
        update=update,
    )


def model_flops_share(tokens_per_second: float, flops_per_token: int, world: World,
                      hardware: Hardware) -> float:  # fmt: skip
    """Return the MFU: FLOPs of the model per second, as a share of the peak of all ranks."""
    everyone = world.topology.world_size * hardware.peak(world.config)
    return tokens_per_second * flops_per_token / everyone


def seconds_at_share(world: World, flops_per_token: int, peak: float, share: float) -> float:
    """Return the seconds of a step in which all ranks reach a share of their peak FLOP/s (MFU)."""
    tokens = world.samples * world.config.data.seq_length
    return tokens * flops_per_token / (share * peak * world.topology.world_size)


class _Costs(NamedTuple):
    """Seconds of one rank: of all its passes with their communication, and of what follows."""

    forward: float
    backward: float
    exposed: dict[str, float]  # within those, by axis
    message: float  # one between stages
    after: dict[str, float]  # communication after the last backward pass, by axis
    update: float


def _costs(world: World, rank: RankPlan, hardware: Hardware, rate: float) -> _Costs:
    spent: dict[str, dict[tuple[str, str], float]] = {}
    message = 0.0
    for kind, one in rank.calls.items():
        seconds = hardware.seconds(kind.operation, kind.ranks, calls=one.calls, size=one.bytes)
        if kind.phase == _EXCHANGE:
            message = max(message, seconds / one.calls)
            continue
        of_phase = spent.setdefault(kind.phase, {})
        key = (kind.axis, kind.operation)
        of_phase[key] = of_phase.get(key, 0.0) + seconds
    exposed: dict[str, float] = {}
    passes = {}
    for phase in (_FORWARD, _BACKWARD):
        compute = rank.flops.get(phase, 0) / rate
        waited = _exposed(world, spent.pop(phase, {}), compute)
        passes[phase] = compute + sum(waited.values())
        for axis, seconds in waited.items():
            exposed[axis] = exposed.get(axis, 0.0) + seconds
    after: dict[str, float] = {}
    for of_phase in spent.values():
        for (axis, _), seconds in of_phase.items():
            after[axis] = after.get(axis, 0.0) + seconds
    held = rank.bytes
    moved = 2 * held.optimizer + held.gradients + held.weights
    update = moved / hardware.memory_bandwidth
    return _Costs(passes[_FORWARD], passes[_BACKWARD], exposed, message, after, update)


def _exposed(world: World, spent: dict[tuple[str, str], float], compute: float) -> dict[str, float]:
    """Return the seconds by axis that a phase waits.

    Rings of cp and tp, and what replicas exchange where the flags overlap it, run beside the
    computation of the phase: of all its micro-batches where parameters are shared out, else of one.
    """
    parallel = world.config.parallel
    every = parallel.sharding.shards_parameters
    window = compute if every else compute / world.microbatches
    found: dict[str, float] = {}
    for (axis, operation), seconds in spent.items():
        gathers = operation == "all_gather"
        overlaps = parallel.overlap_param_gather if gathers else parallel.overlap_grad_reduce
        left = seconds
        if axis in _REPLICAS and overlaps:
            left = max(0.0, seconds - window)
        elif axis in ("cp", "tp") and operation == "send":
            left = max(0.0, seconds - compute)
        found[axis] = found.get(axis, 0.0) + left
    return found
