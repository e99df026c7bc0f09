"""Check a launch on a cluster from one machine: mistakes, memory, time, disk, and data.

`python tools/preflight.py --world-size N <the flags of the launch of pretrain_gpt.py>`, without a
launcher, a GPU or the cluster's files. Every check of a launch that can be run here is run, chosen
ranks do a step on `meta` as in tools/plan.py, and what saves and corpora need is counted. Ends with
an error that lists all problems, if there are any. See docs/preflight.md.
"""

import argparse
import importlib.util
import json
import math
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.errors import ConfigError, Finding, MachineError, MegatronError, PreflightError
from megatron.host import in_gib
from megatron.lengths import batch_schedule, duration, token_count
from megatron.planning.fitting import Tried, fit
from megatron.planning.host_memory import host_bytes
from megatron.planning.layouts import SearchedRun
from megatron.planning.rehearsal import World, check_ranks, rehearse
from megatron.planning.saves import checkpoint_bytes, save_counts
from megatron.planning.step_time import seconds_at_share
from megatron.preflight.checks import LAYOUT_CHECKS
from megatron.preflight.memory import even_kept_bytes
from megatron.preflight.off_cluster import checks_here, local_folder
from megatron.preflight.run import RunPlan, collect_findings
from megatron.preflight.supply import training_supply
from megatron.program import run_program
from tools.planning.launch import PlannedLaunch, add_plan_flags, launch_of, plan_of_world
from tools.planning.report import (
    Disk,
    Report,
    RunTime,
    Steps,
    report_as_json,
    report_as_text,
    tried_as_text,
)
from tools.planning.tables import Plan

_RANKS_PER_NODE = 8


def main(argv: Sequence[str] | None = None) -> None:
    """Read the flags, look at the launch from all sides, and print what was found."""
    report = report_of(argv)
    if report.launch.config.extra["json"]:
        print(json.dumps(report_as_json(report), indent=2))
    else:
        print("\n".join(report_as_text(report)))
    if report.findings:
        raise PreflightError(report.findings)


def report_of(argv: Sequence[str] | None = None) -> Report:
    """Return what can be known of the launch that a command line describes.

    Raises:
        PreflightError: flags or layout are wrong, so that there is nothing to plan.
        ConfigError: a flag of this program makes no sense.
    """
    launch = launch_of(argv, _own_flags)
    config, extra = launch.config, launch.config.extra
    per_node = _ranks_per_node(launch)
    _check_numbers(launch)
    run = launch.run_plan(per_node)
    checks = checks_here(run)
    findings = collect_findings(run, checks.runnable)
    of_layout = {check.__name__ for check in LAYOUT_CHECKS}
    if any(finding.check in of_layout for finding in findings):
        raise PreflightError(findings)
    assert run.tokenizer is not None and run.data_parallel_size is not None  # noqa: S101, PT018  # invariant: checked
    batches = batch_schedule(config, run.data_parallel_size)
    length = duration(config, batches)
    steps = Steps(
        length.total_iterations,
        length.total_samples,
        token_count(config, batches).of_samples(length.total_samples),
    )
    report = Report(launch, checks, tuple(findings), steps, tuple(training_supply(run)), per_node)
    report = report._replace(disk=_disk(launch, steps), host=_offloaded(run, per_node))
    try:
        world = World.of(config, launch.task, run.tokenizer, launch.world_size)
        plan = plan_of_world(world, extra["ranks"], launch.hardware)
    except MegatronError as error:
        return report._replace(not_planned=error)
    stages = plan.ranks
    if {rank.coord.pp for rank in stages} != set(range(world.topology.pp)):
        stages = rehearse(world, world.representatives())
    report = report._replace(
        plan=plan,
        time=_run_time(launch, plan, steps),
        disk=report.disk._replace(checkpoint=checkpoint_bytes(stages)),
        host=host_bytes(world, stages, per_node),
        peak=max(rank.bytes.peak for rank in (*plan.ranks, *stages)),
    )
    if report.is_over_memory:
        searched = SearchedRun(config, launch.task, run.tokenizer, launch.world_size, frozenset())
        report = report._replace(tried=tuple(_tell(fit(searched, report.memory or 0))))
    return report._replace(findings=(*report.findings, *_problems(report)))


def _problems(report: Report) -> Iterator[Finding]:
    """Yield what the numbers of a report exceed."""
    if report.is_over_memory:
        fitting = report.tried[-1] if report.tried and report.tried[-1].fits else None
        room = in_gib(report.memory or 0)
        fix = (
            f"add {' '.join(fitting.layout.flags)}: then {in_gib(fitting.peak)}"
            if fitting is not None
            else "use more ranks or a smaller model: no flags that were tried are enough"
        )
        yield Finding(
            "a_step_fits_in_memory",
            ConfigError(
                "a rank needs more memory than it may use",
                found=f"{in_gib(report.peak)} at the peak of a step, --memory-gib is {room}",
                fix=fix,
            ),
        )
    disk = report.disk
    if disk.free is not None and disk.needed is not None and disk.needed > disk.free:
        yield Finding(
            "saves_fit_on_disk",
            MachineError(
                "the checkpoints of the run do not fit on the disk of --save",
                found=f"{disk.counts.at_once} at a time of {in_gib(disk.checkpoint or 0)} each are "
                f"{in_gib(disk.needed)}; {in_gib(disk.free)} are free in "
                f"{report.launch.config.checkpoint.save}",
                fix=_retention_that_fits(disk),
            ),
        )


def _retention_that_fits(disk: Disk) -> str:
    """Return what to do about too little space: one more checkpoint is there than is kept."""
    assert disk.free is not None and disk.checkpoint is not None  # noqa: S101, PT018  # invariant: compared
    kept = disk.free // disk.checkpoint - 1
    if kept < 1:
        return f"free some space: {in_gib(2 * disk.checkpoint)} hold one checkpoint and the next"
    return f"use --keep-last {kept} alone, or free some space"


def _disk(launch: PlannedLaunch, steps: Steps) -> Disk:
    flags = launch.config.checkpoint
    folder = local_folder(flags.save)
    free = None if folder is None else shutil.disk_usage(folder).free
    return Disk(save_counts(flags, steps.iterations), None, free)


def _offloaded(run: RunPlan, ranks_per_node: int) -> dict[str, int]:
    """Return what waits in the host memory of a node, of a run that cannot be rehearsed."""
    size = ranks_per_node * even_kept_bytes(run).waiting
    return {"optimizer state of --optimizer-cpu-offload, at least": size} if size else {}


def _run_time(launch: PlannedLaunch, plan: Plan, steps: Steps) -> RunTime | None:
    """Return seconds of a step and of the run, by --mfu or by --hardware."""
    mfu = launch.config.extra["mfu"]
    if mfu is not None:
        seconds = seconds_at_share(plan.world, plan.model_flops[0], _peak(launch), mfu)
    elif plan.time is not None:
        seconds = plan.time.total
    else:
        return None
    tokens = plan.world.samples * plan.world.config.data.seq_length
    return RunTime(seconds, seconds * steps.tokens / tokens)


def _peak(launch: PlannedLaunch) -> float:
    """Return the stated peak of a rank in FLOP/s."""
    if launch.hardware is not None:
        return launch.hardware.peak(launch.config)
    tflops = launch.config.logging.peak_tflops
    if tflops is None:
        raise ConfigError(
            "a share of the peak was given, and no peak",
            found=f"--mfu {launch.config.extra['mfu']}, no --peak-tflops and no --hardware",
            fix="add --peak-tflops 989.4 (of an H100 in bfloat16), or --hardware FILE",
        )
    return tflops * 1e12


def _tell(tried: Iterator[Tried]) -> Iterator[Tried]:
    for one in tried:
        print(f"rehearsed: {tried_as_text(one)}", file=sys.stderr, flush=True)
        yield one


def _ranks_per_node(launch: PlannedLaunch) -> int:
    given = launch.config.extra["ranks_per_node"]
    usual = _RANKS_PER_NODE if launch.hardware is None else launch.hardware.ranks_per_node
    return min(launch.world_size, given or usual)


def _check_numbers(launch: PlannedLaunch) -> None:
    """Check the numbers of this program's own flags.

    Raises:
        ConfigError: one makes no sense, or --mfu has no peak.
    """
    extra = launch.config.extra
    mfu, gib, per_node = extra["mfu"], extra["memory_gib"], extra["ranks_per_node"]
    for flag, value, is_right, fix in (
        ("--mfu", mfu, mfu is None or 0 < mfu <= 1, "a share of the peak, such as --mfu 0.4"),
        ("--memory-gib", gib, gib is None or 0 < gib < math.inf, "--memory-gib 80"),
        ("--ranks-per-node", per_node, per_node is None or per_node > 0, "--ranks-per-node 8"),
    ):
        if not is_right:
            raise ConfigError(
                "a flag of the preflight makes no sense", found=f"{flag} {value}", fix=f"use {fix}"
            )
    check_ranks(extra["ranks"] or (), launch.world_size)
    if mfu is not None:
        _peak(launch)


def _own_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add = add_plan_flags(parser).add_argument_group("the preflight").add_argument
    add("--mfu", type=float, metavar="SHARE", help="of the peak that ranks reach, for a time")
    add(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help=f"for host memory; that of --hardware, or {_RANKS_PER_NODE}, if not given",
    )
    return parser


if __name__ == "__main__":
    run_program(main)
