"""What a preflight found out about a launch, as lines of text and as JSON values."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from megatron.errors import Finding, MegatronError
from megatron.host import in_gib
from megatron.planning.fitting import Tried
from megatron.planning.saves import SaveCounts
from megatron.preflight.off_cluster import ChecksHere
from megatron.preflight.supply import CorpusSupply
from tools.planning.launch import PlannedLaunch
from tools.planning.tables import GIB, Plan, as_json, as_text


class Steps(NamedTuple):
    """The length of a run."""

    iterations: int
    samples: int
    tokens: int


class RunTime(NamedTuple):
    """Seconds of a step, and of all tokens of a run at this speed."""

    step: float
    run: float


class Disk(NamedTuple):
    """The saves of a run; bytes, None where they are not known."""

    counts: SaveCounts
    checkpoint: int | None
    free: int | None  # where --save lies on this machine

    @property
    def needed(self) -> int | None:
        """Bytes of the most checkpoints that are there at once."""
        return None if self.checkpoint is None else self.checkpoint * self.counts.at_once


class Report(NamedTuple):
    """All that is known of a launch.

    Attributes:
        not_planned: why no rank was rehearsed.
        host: bytes of host memory of a node, by purpose.
        tried: layouts that were rehearsed since the flags do not fit; the last one fits, if any.
    """

    launch: PlannedLaunch
    checks: ChecksHere
    findings: tuple[Finding, ...]
    steps: Steps
    supply: tuple[CorpusSupply, ...]
    ranks_per_node: int
    disk: Disk = Disk(SaveCounts(0, 0, 0), None, None)
    host: Mapping[str, int] = {}  # a default that nobody changes
    plan: Plan | None = None
    not_planned: MegatronError | None = None
    time: RunTime | None = None
    peak: int = 0
    tried: tuple[Tried, ...] = ()

    @property
    def memory(self) -> int | None:
        """Bytes that a rank may use; None: no limit was given."""
        gib = self.launch.config.extra["memory_gib"]
        return None if gib is None else int(gib * GIB)

    @property
    def is_over_memory(self) -> bool:
        """Whether a rank needs more than that."""
        return self.memory is not None and self.peak > self.memory


def report_as_text(report: Report) -> Iterator[str]:
    """Yield the lines of the report."""
    yield f"checks: {len(report.checks.runnable)} run, {len(report.findings)} problems"
    for name, reason in report.checks.not_run.items():
        yield f"  not run here: {name}: {reason}"
    yield ""
    if report.plan is not None:
        yield from as_text(report.plan)
    else:
        why = "" if report.not_planned is None else f": {_in_a_line(report.not_planned)}"
        yield f"no rank was rehearsed{why}"
    yield ""
    yield from _memory_as_text(report)
    yield from _time_as_text(report)
    yield from _disk_as_text(report)
    yield from _supply_as_text(report)


def report_as_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON values: bytes, seconds, samples and tokens."""
    disk = report.disk
    return {
        "problems": [
            {
                "check": finding.check,
                "problem": finding.error.problem,
                "found": finding.error.found,
                "fix": finding.error.fix,
            }
            for finding in report.findings
        ],
        "checks_run": [check.__name__ for check in report.checks.runnable],
        "checks_not_run": dict(report.checks.not_run),
        "plan": None if report.plan is None else as_json(report.plan),
        "not_planned": None if report.not_planned is None else _in_a_line(report.not_planned),
        "peak_bytes": report.peak or None,
        "tried_to_fit": [
            {"flags": list(one.layout.flags), "peak_bytes": one.peak, "fits": one.fits}
            for one in report.tried
        ],
        "seconds": None if report.time is None else report.time._asdict(),
        "steps": report.steps._asdict(),
        "disk": {
            **disk.counts._asdict(),
            "checkpoint_bytes": disk.checkpoint,
            "needed_bytes": disk.needed,
            "free_bytes": disk.free,
        },
        "host_bytes_of_a_node": dict(report.host),
        "ranks_per_node": report.ranks_per_node,
        "corpora": [one._asdict() for one in report.supply],
    }


def tried_as_text(one: Tried) -> str:
    """Return a line about a layout that was rehearsed."""
    size = in_gib(one.peak) if one.fits else f"{in_gib(one.peak)} and more"
    return f"{' '.join(one.layout.flags)}: {size}{', fits' if one.fits else ''}"


def _memory_as_text(report: Report) -> Iterator[str]:
    if report.memory is not None and report.plan is not None:
        verdict = "does not fit into" if report.is_over_memory else "fits into"
        yield f"memory: {in_gib(report.peak)} at the peak of a rank {verdict} --memory-gib " + (
            f"{report.memory / GIB:g}"
        )
        for one in report.tried:
            yield f"  with {tried_as_text(one)}"
    total = sum(report.host.values())
    yield f"host memory of a node of {report.ranks_per_node} ranks: {in_gib(total)}"
    for purpose, size in report.host.items():
        yield f"  {purpose}: {in_gib(size)}"
    yield "  not counted: the processes themselves, and pages of corpora, which can be dropped"


def _time_as_text(report: Report) -> Iterator[str]:
    steps = report.steps
    length = f"{steps.iterations:,} iterations, {steps.samples:,} samples, {steps.tokens:,} tokens"
    if report.time is None:
        yield f"time: {length}; --mfu SHARE or --hardware FILE gives an estimate"
        return
    mfu = report.launch.config.extra["mfu"]
    by = "by --hardware" if mfu is None else f"at an MFU of {mfu:.2%}"
    days = report.time.run / 86400
    yield f"time {by}: {report.time.step:.4g} s a step, {days:.4g} days for {length}"
    yield "  evaluations, saves and restarts come on top"


def _disk_as_text(report: Report) -> Iterator[str]:
    disk = report.disk
    if report.launch.config.checkpoint.save is None:
        yield "disk: no --save, no checkpoint is written"
        return
    counts = disk.counts
    each = "an unknown size" if disk.checkpoint is None else in_gib(disk.checkpoint)
    needed = "" if disk.needed is None else f", together {in_gib(disk.needed)}"
    free = "not on this machine" if disk.free is None else f"{in_gib(disk.free)} free"
    yield (
        f"disk: {counts.written} saves of {each}; at most {counts.at_once} there at once{needed}, "
        f"{counts.kept} kept at the end; --save is {free}"
    )


def _supply_as_text(report: Report) -> Iterator[str]:
    if not report.supply:
        yield f"data: made up, {report.steps.samples:,} samples (--mock-data)"
        return
    yield f"data: {report.steps.samples:,} samples of training"
    for one in report.supply:
        taken = f"  {one.prefix}: {one.share:.4%}, {one.samples:,} samples"
        if one.tokens is None:
            yield f"{taken}; the corpus could not be opened here"
            continue
        epochs = "no sample" if one.epochs is None else f"{one.epochs:.4g} epochs"
        yield f"{taken} of {one.tokens:,} tokens in {one.documents:,} documents: {epochs}"


def _in_a_line(error: MegatronError) -> str:
    return "; ".join(str(error).split("\n"))
