"""What checkpoints make of what happens to machines: kills at every moment, and flipped bits.

`python -m tests.laws.kill_grid` (or `make test-faults`) kills each rank at each named moment of a
save, then ranks at random moments (`--random 200`), and flips bits over all files of a checkpoint
(`--flips 1000`); it ends with 1 if a checkpoint was lost or damage was not found. `--write` keeps
the table in docs/checkpoints.md. Smaller grids are among the tests.
"""

import argparse
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch

from megatron import log
from megatron.checkpoint import durable, storage
from megatron.checkpoint import folder as folders
from megatron.checkpoint.background import BackgroundSaves
from megatron.checkpoint.retention import Retention
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.pages import write_between
from tests.support.ranks import run_on_ranks
from tests.support.save_faults import MOMENTS, kill_after, kill_this_process, moments_of
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

PAGE = Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md"
MARKS = ("<!-- faults: written by `make test-faults WRITE=1` -->", "<!-- faults: end -->")
RANKS = 2
BEFORE, DURING, AFTER = 100, 200, 300
SLOW_WRITE_S = 0.002  # so that random moments fall into a save and not beside it
SPAN_S = 0.15  # of random moments, from the beginning of a save; about as long as one takes


class Result(NamedTuple):
    """What came of one fault."""

    kind: str
    what: str
    found: str  # "former", "new", "found"; anything else is a loss

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, and nothing passed unnoticed."""
        return self.found in ("former", "new", "found")


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the flags ask for; exit code 1 if anything was lost or not noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=200, help="kills at random moments")
    parser.add_argument("--flips", type=int, default=1000, help="bits to flip, one at a time")
    parser.add_argument("--seed", type=int, default=1234, help="of moments, ranks and bits")
    parser.add_argument("--no-moments", action="store_true", help="leave the named moments out")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    flags = parser.parse_args(argv)
    started, results = time.monotonic(), []
    log.configure(0, 1, level="error")
    with tempfile.TemporaryDirectory() as folder:
        for result in run_all(Path(folder), flags):
            results.append(result)
            if result.kind != "bit flipped" or not result.is_good:
                print(f"{time.monotonic() - started:6.0f} s {result.kind}: {result.what}: "
                      f"{result.found}", flush=True)  # fmt: skip
    lines = table(results)
    took = f"{len(results)} faults in {(time.monotonic() - started) / 60:.1f} minutes"
    bad = [result for result in results if not result.is_good]
    print("\n".join(["", *lines, "", f"{took}, {len(bad)} lost or not noticed"]))
    if flags.write:
        write(PAGE, [*lines, "", f"{took}, on {os.cpu_count()} cores, {RANKS} ranks."])
    sys.exit(1 if bad else 0)


def run_all(folder: Path, flags: argparse.Namespace) -> Iterator[Result]:
    """Every fault that the flags ask for, each in a folder of its own."""
    draw = random.Random(flags.seed)
    at = 0
    for beside in (False, True):
        for victim in range(RANKS):
            for moment in () if flags.no_moments else moments_of(victim, beside=beside):
                at += 1
                kind = f"killed at a named moment, {_spelled(beside)}"
                what = f"rank {victim}, {moment}"
                yield Result(kind, what, killed(folder / str(at), beside, victim, moment))
    for number in range(flags.random):
        at += 1
        beside, victim, after = number % 2 == 1, draw.randrange(RANKS), SPAN_S * draw.random()
        kind = f"killed at a random moment, {_spelled(beside)}"
        what = f"rank {victim}, {after:.3f} s after a save began"
        yield Result(kind, what, killed(folder / str(at), beside, victim, after))
    yield from flipped(folder / "flips", flags.flips, draw)


def _spelled(beside: bool) -> str:
    return "beside the training" if beside else "training waits"


def killed(folder: Path, beside: bool, victim: int, when: str | float) -> str:
    """Kill a rank in the second save; say which checkpoint is loaded after, and save a third."""
    try:
        run_on_ranks(RANKS, save_and_die, folder, beside, victim, when)
    except AssertionError as error:
        if not re.search(r"died with exit code -9|Connection|Read error|closed", str(error)):
            return f"another failure: {error}"
    alone = ParallelContext.single()
    try:
        found = loaded(folder, alone)
        snapshot = snapshot_at(1, 1, 0, seed=AFTER, iteration=AFTER)
        storage.save(folder, snapshot, iteration=AFTER, ctx=alone, retention=Retention(2))
        if loaded(folder, alone) != AFTER:
            return "the next save is not the latest"
        left = [name for name in os.listdir(folder) if name.startswith(".")]
    except (CheckpointError, AssertionError) as error:
        return f"lost: {' '.join(str(error).split())}"
    shutil.rmtree(folder)
    return f"left behind: {left}" if left else ("new" if found == DURING else "former")


def save_and_die(folder: Path, beside: bool, victim: int, when: str | float) -> None:
    """A rank of a job that saves twice, on a disk that is not fast."""
    ctx, real = ParallelContext.build(Topology(dp=RANKS)), durable.DurableFile.write

    def write(file: durable.DurableFile, data: bytes | memoryview) -> None:
        time.sleep(SLOW_WRITE_S)
        real(file, data)

    log.configure(ctx.rank, RANKS, level="error")
    with ExitStack() as hit:
        hit.enter_context(patch.object(durable.DurableFile, "write", write))
        for iteration in (BEFORE, DURING):
            if iteration == DURING and ctx.rank == victim:
                if isinstance(when, str):
                    hit.enter_context(MOMENTS[when].put_in(kill_this_process))
                else:
                    kill_after(when)
            snapshot = snapshot_at(1, RANKS, ctx.rank, seed=iteration, iteration=iteration)
            if beside:
                with BackgroundSaves(ctx) as saves:
                    saves.start(folder, snapshot, iteration=iteration, retention=Retention(1))
                    saves.wait()
            else:
                storage.save(folder, snapshot, iteration=iteration, ctx=ctx, retention=Retention(1))
    time.sleep(SPAN_S if ctx.rank == victim else 0.0)


def loaded(folder: Path, ctx: ParallelContext) -> int:
    """The iteration that a load takes; AssertionError unless it is what was saved, to the bit."""
    target = rank_at(1, 1, 0, seed=None)
    opened = storage.open_checkpoint(folder, ctx=ctx)
    opened.read_into(target.tensors)
    iteration = opened.manifest.iteration
    differing = differences(target, rank_at(1, 1, 0, seed=iteration))
    assert not differing, f"iteration {iteration} differs in {differing}"
    return iteration


def flipped(folder: Path, count: int, draw: random.Random) -> Iterator[Result]:
    """Flip single bits anywhere in a checkpoint of two ranks, one after the other."""
    if not count:
        return
    run_on_ranks(RANKS, save_once, folder)
    directory, alone = folder / folders.iteration_name(BEFORE), ParallelContext.single()
    files = sorted(directory.iterdir())
    sizes = [path.stat().st_size for path in files]
    for _ in range(count):
        (path,) = draw.choices(files, weights=sizes)
        good = path.read_bytes()
        at, bit = draw.randrange(len(good)), draw.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << bit)]) + good[at + 1 :])
        what = f"bit {bit} of byte {at} of {path.name}"
        yield Result("bit flipped", what, _noticed(folder, path, alone))
        path.write_bytes(good)
    assert loaded(folder, alone) == BEFORE, "the file was put back otherwise"


def save_once(folder: Path) -> None:
    """A rank of a job that saves once."""
    ctx = ParallelContext.build(Topology(dp=RANKS))
    snapshot = snapshot_at(1, RANKS, ctx.rank, seed=BEFORE, iteration=BEFORE)
    storage.save(folder, snapshot, iteration=BEFORE, ctx=ctx)


def _noticed(folder: Path, path: Path, ctx: ParallelContext) -> str:
    target = rank_at(1, 1, 0, seed=None)
    try:
        opened = storage.open_checkpoint(folder, ctx=ctx)
        opened.read_into(target.tensors)
        opened.verify_all()
    except CheckpointError as error:
        touched = [n for n, t in target.memory.items() if not torch.isnan(t.float()).all()]
        if touched:
            return f"found after {touched} had changed"
        return "found" if path.name in str(error) else f"found, but not named: {error}"
    return "not noticed"


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind of fault."""
    kinds = dict.fromkeys(result.kind for result in results)
    lines = [
        "| fault | times | former loaded | new one loaded | found | lost or unnoticed |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        count = Counter(r.found if r.is_good else "bad" for r in results if r.kind == kind)
        numbers = [count.total(), *(count[name] for name in ("former", "new", "found", "bad"))]
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    return lines


def write(page: Path, lines: Sequence[str]) -> None:
    """Put `lines` between the marks of a page."""
    write_between(page, lines, MARKS)


if __name__ == "__main__":
    main()
