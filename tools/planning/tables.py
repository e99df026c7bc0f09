"""A plan of chosen ranks, as lines of text and as JSON values."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.planning.calls import CallSum
from megatron.planning.hardware import Hardware
from megatron.planning.rehearsal import RankPlan, World
from megatron.planning.step_time import StepTime, model_flops_share

GIB, MIB = 2**30, 2**20


class Plan(NamedTuple):
    """The result for the chosen ranks, and what is known of the whole world."""

    world: World
    ranks: tuple[RankPlan, ...]
    model_flops: tuple[int, int]  # of a token, by formula: of the model; with what is recomputed
    bubble_share: float  # if forward and backward take as long as their FLOPs, and messages no time
    hardware: Hardware | None
    time: StepTime | None


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan as JSON values: bytes, FLOPs and seconds."""
    grid = plan.world.topology
    found: dict[str, Any] = {
        "layout": {axis: grid.size(axis) for axis in ("tp", "pp", "dp", "cp", "ep")}
        | {"etp": grid.expert_tp},
        "microbatches": plan.world.microbatches,
        "samples": plan.world.samples,
        "bubble_share": plan.bubble_share,
        "flops_by_formula": _flops_by_formula(plan),
        "ranks": [_rank_as_json(rank) for rank in plan.ranks],
    }
    if plan.time is not None:
        found["seconds"] = plan.time._asdict()
        found["tokens_per_second_per_rank"] = _tokens_per_second(plan) / grid.world_size
        found["mfu"] = _mfu(plan)
    return found


def as_text(plan: Plan) -> Iterator[str]:
    """Yield the lines of the tables."""
    world = plan.world
    sizes = " x ".join(f"{axis} {world.topology.size(axis)}" for axis in ("tp", "pp", "dp", "cp"))
    experts = f"ep {world.topology.ep} x etp {world.topology.expert_tp}"
    yield f"{world.topology.world_size} ranks: {sizes}, {experts}"
    yield f"a step: {world.samples} samples, {world.microbatches} micro-batches of each replica"
    yield ""
    yield "GiB on a rank, and its FLOPs of a step"
    names = ("weights", "gradients", "optimizer", "in a step", "peak")
    yield f"{'rank':>6} {'stage':>6}" + "".join(f"{name:>11}" for name in names) + f"{'FLOPs':>12}"
    for rank in plan.ranks:
        held = rank.bytes
        sizes_of_rank = (held.weights, held.gradients, held.optimizer, held.step, held.peak)
        columns = "".join(f"{size / GIB:11.3f}" for size in sizes_of_rank)
        yield f"{rank.rank:>6} {rank.coord.pp:>6}{columns}{sum(rank.flops.values()):12.4g}"
    if plan.world.representatives() == tuple(rank.rank for rank in plan.ranks):
        share = _flops_counted(plan) / _flops_by_formula(plan)
        yield f"counted FLOPs of all ranks: {share:.4%} of those by formula"
    yield ""
    senders: dict[tuple[str, ...], list[str]] = {}
    for rank in plan.ranks:
        senders.setdefault(tuple(_sent_as_text(rank)), []).append(str(rank.rank))
    for lines, ranks in senders.items():
        yield f"sent in a step by rank {', '.join(ranks)}"
        yield from lines
    yield ""
    yield f"bubble: {plan.bubble_share:.2%} of the passes, if messages take no time"
    if plan.time is not None:
        yield from _time_as_text(plan, plan.time)


def _sent_as_text(rank: RankPlan) -> Iterator[str]:
    yield f"  {'axis':<7}{'ranks':>6}  {'operation':<16}{'calls':>9}{'MiB':>14}  in"
    rows: dict[tuple[str, str, str, int], CallSum] = {}
    for kind, one in rank.calls.items():
        row = kind.axis, kind.phase, kind.operation, len(kind.ranks)
        calls, size = rows.get(row, CallSum(0, 0))
        rows[row] = CallSum(calls + one.calls, size + one.bytes)
    for (axis, phase, operation, count), one in sorted(rows.items()):
        sent = f"{one.calls:>9}{one.bytes / MIB:>14.3f}"
        yield f"  {axis:<7}{count:>6}  {operation:<16}{sent}  {phase}"


def _rank_as_json(rank: RankPlan) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "coordinate": rank.coord._asdict(),
        "bytes": rank.bytes._asdict(),
        "flops": rank.flops,
        "calls": [
            {**kind._asdict(), "calls": one.calls, "bytes": one.bytes}
            for kind, one in rank.calls.items()
        ],
    }


def _flops_counted(plan: Plan) -> int:
    """Return those of all ranks: of a stage all have as many, but for a rest of rows of experts."""
    ranks_of_stage = plan.world.topology.stage_size
    return ranks_of_stage * sum(sum(rank.flops.values()) for rank in plan.ranks)


def _flops_by_formula(plan: Plan) -> int:
    return plan.model_flops[1] * plan.world.samples * plan.world.config.data.seq_length


def _tokens_per_second(plan: Plan) -> float:
    assert plan.time is not None  # noqa: S101  # invariant: callers have asked
    return plan.world.samples * plan.world.config.data.seq_length / plan.time.total


def _mfu(plan: Plan) -> float:
    assert plan.hardware is not None  # noqa: S101  # invariant: there is a time
    return model_flops_share(
        _tokens_per_second(plan), plan.model_flops[0], plan.world, plan.hardware
    )


def _time_as_text(plan: Plan, time: StepTime) -> Iterator[str]:
    yield ""
    yield f"a step takes about {time.total:.3f} s:"
    parts = {"computation": time.compute}
    parts |= {f"communication over {axis}": seconds for axis, seconds in time.exposed.items()}
    parts |= {"idle between stages": time.bubble, "update": time.update}
    for name, seconds in parts.items():
        yield f"  {name:<28}{seconds:>10.4f} s {seconds / time.total:>8.2%}"
    each = _tokens_per_second(plan) / plan.world.topology.world_size
    yield f"{each:.1f} tokens/s on each rank, MFU {_mfu(plan):.2%}"
