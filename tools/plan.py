"""Plan a training on ranks that are not there: bytes, FLOPs, communication, bubble and time.

`python -m tools.plan --world-size N <the flags of the launch of pretrain_gpt.py>`. The code of the
run itself does a step on `meta`, in this process; nothing is read but the tokenizer. With
`--search` the layout is proposed. See docs/planning.md.
"""

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pretrain_bert
import pretrain_gpt
from megatron.arguments import parse_args, parse_given
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.initialize import tokenizer_of
from megatron.launch import Launch
from megatron.planning.calls import CallSum
from megatron.planning.hardware import Hardware, read_hardware
from megatron.planning.layouts import SearchedRun
from megatron.planning.rehearsal import RankPlan, World, flops_of_model, rehearse
from megatron.planning.search import Candidate, Limits, Search, search
from megatron.planning.step_time import StepTime, bubble, model_flops_share, step_time
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.run import RunPlan, run_preflight
from megatron.program import run_program

GIB, MIB = 2**30, 2**20


class Plan(NamedTuple):
    """The result for the chosen ranks, and what is known of the whole world."""

    world: World
    ranks: tuple[RankPlan, ...]
    model_flops: tuple[int, int]  # of a token, by formula: of the model; with what is recomputed
    bubble_share: float  # if forward and backward take as long as their FLOPs, and messages no time
    hardware: Hardware | None
    time: StepTime | None


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, rehearse the step, and print the plan."""
    given = sys.argv[1:] if argv is None else argv
    if "--search" in given:
        found = search_of(given)
        is_json = "--json" in given
        shown = json.dumps(search_as_json(found), indent=2) if is_json else search_as_text(found)
        print(shown if isinstance(shown, str) else "\n".join(shown))
        return
    plan = plan_of(given)
    if plan.world.config.extra["json"]:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print("\n".join(as_text(plan)))


def plan_of(argv: Sequence[str] | None = None) -> Plan:
    """Return the plan that a command line asks for.

    Raises:
        PreflightError: with all that is wrong with the flags and the layout.
        ConfigError: there is no such rank, or the hardware is not described well.
    """
    config, is_bert = _config(sys.argv[1:] if argv is None else argv)
    extra = config.extra
    size, hardware = int(extra["world_size"]), _hardware(extra["hardware"], config)
    _check_size(size)
    tokenizer = tokenizer_of(config)
    launch = Launch(world_size=size, local_world_size=size)
    run_preflight(RunPlan(config, launch, tokenizer), LAYOUT_CHECKS)
    world = World.of(config, _task(config, is_bert), tokenizer, size)
    ranks = rehearse(world, extra["ranks"] or world.representatives())
    time = None if hardware is None else step_time(world, ranks, hardware)
    share = bubble(world).bubble_share
    return Plan(world, ranks, flops_of_model(world), share, hardware, time)


def search_of(argv: Sequence[str]) -> Search:
    """Return the layouts that a command line with `--search` asks for.

    Raises:
        CommandLineError: with all that is wrong with the flags.
        ConfigError: a flag of the search is missing or makes no sense, or no layout fits.
    """
    # It has to be given to a training; here the search gives it.
    config, is_bert = _config(argv, micro_batch_size=1)
    extra = config.extra
    size = int(extra["world_size"])
    _check_size(size)
    gib, rehearsals = extra["memory_gib"], int(extra["search_rehearsals"])
    for flag, is_right, fix in (
        ("--memory-gib", gib is not None and 0 < gib < math.inf, "--memory-gib 80"),
        ("--hardware", extra["hardware"] is not None, "--hardware FILE, as in docs/planning.md"),
        ("--search-rehearsals", rehearsals > 0, "--search-rehearsals 16"),
        (
            "--global-batch-size",
            config.training.global_batch_size is not None,
            "--global-batch-size 1024",
        ),
        ("--ranks", extra["ranks"] is None, "--search alone: it chooses ranks of every layout"),
    ):
        if not is_right:
            raise ConfigError(
                "the search lacks what it needs, or a flag of it makes no sense",
                found=f"{flag} {_value(config, flag)}",
                fix=f"use {fix}",
            )
    hardware = _hardware(extra["hardware"], config)
    assert hardware is not None  # noqa: S101  # invariant: just checked
    own = _own_flags(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    fixed = frozenset(parse_given(own.parse_known_args(argv)[1]))
    run = SearchedRun(config, _task(config, is_bert), tokenizer_of(config), size, fixed)
    tell = partial(print, file=sys.stderr, flush=True)
    return search(run, hardware, Limits(int(gib * GIB), rehearsals), tell)


def search_as_json(found: Search) -> dict[str, Any]:
    """Return the search as JSON values: bytes and seconds."""
    return {
        "layouts": [_candidate_as_json(one) for one in found.fitting],
        "rehearsed_over_memory": found.over,
        "over_memory_by_lower_bound": found.pruned,
        "slower_by_recomputation": found.slower,
        "not_tried": found.untried,
    }


def search_as_text(found: Search) -> Iterator[str]:
    """Yield the lines of the table of a search."""
    names = ("peak GiB", "step s", "compute", "waiting", "idle", "update", "tokens/s", "bubble")
    yield "".join(f"{name:>10}" for name in names) + "  layout"
    for one in found.fitting:
        time = one.time
        assert time is not None  # noqa: S101  # invariant: it fits
        waiting = sum(time.exposed.values())
        parts = (time.total, time.compute, waiting, time.bubble, time.update)
        columns = "".join(f"{seconds:>10.4g}" for seconds in parts)
        yield (
            f"{one.peak / GIB:>10.3f}{columns}{one.tokens_per_second:>10.1f}"
            f"{one.bubble_share:>10.2%}  {' '.join(one.layout.flags)}"
        )
    yield ""
    yield f"rehearsed: {len(found.fitting)} layouts that fit, {found.over} that do not"
    yield f"left out: {found.pruned} layouts that need more memory by a lower bound"
    yield f"left out: {found.slower} layouts that recompute more than one of those that fit"
    more = "; --search-rehearsals tries more" if found.untried else ""
    yield f"not tried: {found.untried} layouts{more}"


def _candidate_as_json(one: Candidate) -> dict[str, Any]:
    assert one.time is not None  # noqa: S101  # invariant: it fits
    return {
        "flags": list(one.layout.flags),
        "peak_bytes": one.peak,
        "seconds": one.time._asdict(),
        "tokens_per_second_per_rank": one.tokens_per_second,
        "bubble_share": one.bubble_share,
    }


def _value(config: RunConfig, flag: str) -> object:
    name = flag[2:].replace("-", "_")
    value = config.extra.get(name)
    return "not given" if value is None else value


def _config(argv: Sequence[str], **defaults: object) -> tuple[RunConfig, bool]:
    """Return the config of the flags, and whether they are those of a BERT."""
    is_bert = "bert" in argv[argv.index("--task") + 1 :][:1] if "--task" in argv else False
    tokenizer = (pretrain_bert if is_bert else pretrain_gpt).TOKENIZER_TYPE
    config = parse_args(
        argv,
        extra_args_provider=_own_flags,
        args_defaults={"tokenizer_type": tokenizer, **defaults},
        world_size=_world_size(argv),
    )
    return config, is_bert


def _world_size(argv: Sequence[str]) -> int | None:
    """Return the number of ranks, which files of gpt-neox derive batches from."""
    after = argv[argv.index("--world-size") + 1 :][:1] if "--world-size" in argv else []
    return int(after[0]) if after and after[0].isdecimal() else None


def _check_size(size: int) -> None:
    if size < 1:
        raise ConfigError("a world has no ranks", found=f"--world-size {size}", fix="use 1 or more")


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


def _own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("the plan")
    add = group.add_argument
    add("--world-size", type=int, required=True, metavar="N", help="ranks of the run")
    add("--task", choices=("gpt", "bert"), default="gpt", help="whose flags they are [gpt]")
    add(
        "--ranks",
        type=int,
        nargs="+",
        metavar="RANK",
        help="ranks to plan; one of every pipeline stage if not given",
    )
    add("--hardware", metavar="FILE", help="JSON about the machines, for a time")
    add("--search", action="store_true", help="propose layouts: flags of it that are given stay")
    add("--memory-gib", type=float, metavar="GIB", help="what a rank may use: for --search")
    add(
        "--search-rehearsals",
        type=int,
        default=16,
        metavar="N",
        help="layouts that --search rehearses at most [16]",
    )
    add("--json", action="store_true", help="print JSON for programs")
    return parser


def _hardware(path: str | None, config: RunConfig) -> Hardware | None:
    if path is None:
        return None
    hardware = read_hardware(Path(path))
    hardware.peak(config)  # raises at once where it is missing
    return hardware


def _task(config: RunConfig, is_bert: bool) -> Any:
    if is_bert:
        return pretrain_bert.bert_task(order_head=config.data.bert_binary_head)
    return pretrain_gpt.gpt_task()


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


if __name__ == "__main__":
    run_program(main)
