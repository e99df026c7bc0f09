"""What is left of checkpoints when a rank is killed at any moment of a save, in every format.

`python -m tests.laws.checkpoints.kill_grid` (or `make test-faults`) kills each rank at each named
moment of a save, then ranks at random moments (`--random 400`), in each way of saving; it ends with
1 if a checkpoint was lost. Ours are saved by the library alone, those of other frameworks by runs
that train, and a run goes on from what is left. `--write` keeps the table in docs/checkpoints.md.
Smaller grids are among the tests; damage to files that lie there is `corruption`'s.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import torch.distributed as dist

import megatron.training
from megatron import log
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder import run_folder as folders
from megatron.checkpoint.folder.retention import Retention
from megatron.checkpoint.load import storage
from megatron.checkpoint.save.background import BackgroundSaves
from megatron.config.run import RunConfig
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from tests.support.checkpoints.save_faults import (
    MOMENTS_OF,
    kill_after,
    kill_this_process,
    moments_of,
)
from tests.support.pages import write_between
from tests.support.ranks import run_on_ranks
from tests.support.tiny import (
    Record,
    assert_went_on,
    tiny_run,
    train,
    train_all,
    write_tiny_corpus,
)
from tests.unit.checkpoint.toy import differences, rank_at, snapshot_at

PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoints.md"
MARKS = ("<!-- faults: written by `make test-faults WRITE=1` -->", "<!-- faults: end -->")
RANKS = 2
BEFORE, DURING, AFTER = 100, 200, 300
SLOW_WRITE_S = 0.002  # so that random moments fall into a save and not beside it
DEADLINE_S = 120.0
GOOD = ("former", "new")  # what is loaded after a kill; anything else is a loss
# Whose end is heard of first, that of the victim or of who misses it, is chance.
_KILLED = re.compile(r"died with exit code -9|Connection|Read error|closed")


class Result(NamedTuple):
    """What came of one kill."""

    kind: str
    what: str
    found: str

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost."""
        return self.found in GOOD


class Way(Protocol):
    """One way to save, with a rank that is killed in its second save."""

    spelled: str
    span_s: float  # of random moments, from the beginning of a save; about as long as one takes

    def moments(self, rank: int) -> list[str]:
        """The named moments that come on a rank."""

    def killed(self, folder: Path, victim: int, when: str | float) -> str:
        """Kill a rank at a moment, or so many seconds into the save; one of `GOOD`, or the loss."""


def ways(place: Path) -> list[Way]:
    """Every way; what runs need is made in `place`, when it is first needed."""
    return [
        Ours(beside=False),
        Ours(beside=True),
        *(Run(name, place / name) for name in FOREIGN),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Do what the flags ask for; exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=400, help="kills at random moments, in all")
    parser.add_argument("--seed", type=int, default=1234, help="of moments and ranks")
    parser.add_argument("--no-moments", action="store_true", help="leave the named moments out")
    parser.add_argument("--write", action="store_true", help=f"keep the table in {PAGE.name}")
    flags = parser.parse_args(argv)
    started, results = time.monotonic(), []
    log.configure(0, 1, level="error")
    with tempfile.TemporaryDirectory() as folder:
        for result in run_all(Path(folder), flags):
            results.append(result)
            print(f"{time.monotonic() - started:6.0f} s {result.kind}: {result.what}: "
                  f"{result.found}", flush=True)  # fmt: skip
    lines = table(results)
    took = f"{len(results)} kills in {(time.monotonic() - started) / 60:.1f} minutes"
    bad = [result for result in results if not result.is_good]
    print("\n".join(["", *lines, "", f"{took}, {len(bad)} lost"]))
    if flags.write:
        write(PAGE, [*lines, "", f"{took}, on {os.cpu_count()} cores, {RANKS} ranks."])
    sys.exit(1 if bad else 0)


def run_all(place: Path, flags: argparse.Namespace) -> Iterator[Result]:
    """Every kill that the flags ask for, each in a folder of its own."""
    draw, every, at = random.Random(flags.seed), ways(place), 0
    for way in every:
        for victim in range(RANKS):
            for moment in () if flags.no_moments else way.moments(victim):
                at += 1
                kind, what = f"at a named moment, {way.spelled}", f"rank {victim}, {moment}"
                yield Result(kind, what, way.killed(place / str(at), victim, moment))
    for number in range(flags.random):
        at += 1
        way, victim = every[number % len(every)], draw.randrange(RANKS)
        after = way.span_s * draw.random()
        kind = f"at a random moment, {way.spelled}"
        what = f"rank {victim}, {after:.3f} s after a save began"
        yield Result(kind, what, way.killed(place / str(at), victim, after))


def lay_in_wait(hit: ExitStack, form: str, when: str | float) -> None:
    """Kill this process at a moment of a save of this format, or after so many seconds."""
    if isinstance(when, str):
        hit.enter_context(MOMENTS_OF[form][when].put_in(kill_this_process))
    else:
        kill_after(when)


def slow_disk() -> Any:
    """A disk that is not fast, inside of the `with` block."""
    real = durable.DurableFile.write

    def write(file: durable.DurableFile, data: bytes | memoryview) -> None:
        time.sleep(SLOW_WRITE_S)
        real(file, data)

    return patch.object(durable.DurableFile, "write", write)


def end_of(body: Any, *args: Any, **how: Any) -> str | None:
    """None if the ranks of `body` ended by a kill, else what was wrong with that."""
    try:
        run_on_ranks(RANKS, body, *args, **how)
    except AssertionError as error:
        return None if _KILLED.search(str(error)) else f"another failure: {error}"
    return "nobody was killed"


# Ours


class Ours:
    """Our own format, of a few tensors that are cut in every way, without a run."""

    span_s = 0.15

    def __init__(self, *, beside: bool) -> None:
        self.beside = beside
        self.spelled = "beside the training" if beside else "training waits"

    def moments(self, rank: int) -> list[str]:
        """As `Way.moments`."""
        return moments_of(rank, beside=self.beside)

    def killed(self, folder: Path, victim: int, when: str | float) -> str:
        """As `Way.killed`; then another number of ranks saves a third one."""
        args = (folder, self.beside, victim, when, self.span_s)
        if (wrong := end_of(save_and_die, *args)) is not None:
            return wrong
        alone = ParallelContext.single()
        try:
            found = loaded(folder, alone)
            snapshot = snapshot_at(1, 1, 0, seed=AFTER, iteration=AFTER)
            storage.save(folder, snapshot, iteration=AFTER, ctx=alone, retention=Retention(2))
            if loaded(folder, alone) != AFTER:
                return "the next save is not the latest"
        except (CheckpointError, AssertionError) as error:
            return f"lost: {' '.join(str(error).split())}"
        return tidied(folder) or ("new" if found == DURING else "former")


def save_and_die(folder: Path, beside: bool, victim: int, when: str | float, span_s: float) -> None:
    """A rank of a job that saves twice."""
    ctx = ParallelContext.build(Topology(dp=RANKS))
    log.configure(ctx.rank, RANKS, level="error")
    with slow_disk(), ExitStack() as hit:
        for iteration in (BEFORE, DURING):
            if iteration == DURING and ctx.rank == victim:
                lay_in_wait(hit, "sharded", when)
            snapshot = snapshot_at(1, RANKS, ctx.rank, seed=iteration, iteration=iteration)
            if beside:
                with BackgroundSaves(ctx) as saves:
                    saves.start(folder, snapshot, iteration=iteration, retention=Retention(1))
                    saves.wait()
            else:
                storage.save(folder, snapshot, iteration=iteration, ctx=ctx, retention=Retention(1))
    time.sleep(span_s if ctx.rank == victim else 0.0)


def loaded(folder: Path, ctx: ParallelContext) -> int:
    """The iteration that a load takes; AssertionError unless it is what was saved, to the bit."""
    target = rank_at(1, 1, 0, seed=None)
    opened = storage.open_checkpoint(folder, ctx=ctx)
    opened.read_into(target.tensors)
    iteration = opened.manifest.iteration
    differing = differences(target, rank_at(1, 1, 0, seed=iteration))
    assert not differing, f"iteration {iteration} differs in {differing}"
    return iteration


def tidied(folder: Path) -> str | None:
    """What a save that came after a kill has left behind, if it has; else the folder goes."""
    if left := [name for name in os.listdir(folder) if name.startswith(".")]:
        return f"left behind: {left}"
    shutil.rmtree(folder)
    return None


# Those of other frameworks

# With dropout, so that random states matter.
FOREIGN: Mapping[str, Mapping[str, Any]] = {
    "megatron": {"tensor_model_parallel_size": RANKS, "hidden_dropout": 0.1},
    "deepspeed": {"deepspeed": True, "zero_stage": "1", "fp64": False, "hidden_dropout": 0.1},
}
_SPELLED = {"megatron": "Megatron's layout", "deepspeed": "DeepSpeed's layout"}
STEPS, KILLED_AT = 3, 2


class Run:
    """A run that saves in the layout of another framework, and one that goes on from it."""

    span_s = 0.8

    def __init__(self, form: str, place: Path) -> None:
        self.form, self.spelled = form, _SPELLED[form]
        self._place, self._corpus = place, ""
        self._start = {"timeout_s": DEADLINE_S, "deepspeed": form == "deepspeed"}
        self._straight: list[Record] = []

    def moments(self, rank: int) -> list[str]:
        """As `Way.moments`."""
        return moments_of(rank, beside=False, of=self.form)

    def killed(self, folder: Path, victim: int, when: str | float) -> str:
        """As `Way.killed`; then a run goes on to its end, as if nothing had been, and saves."""
        config = self.config(save=str(folder), load=str(folder))
        args = (config, victim, when, self.span_s)
        if (wrong := end_of(train_and_die, *args, **self._start)) is not None:
            return wrong
        try:
            found = run_on_ranks(RANKS, train_all, [config], **self._start)
            resumed = [of_rank[0] for of_rank in found]
            at = STEPS - len(resumed[0].steps)
            assert_went_on(resumed, self.straight(), last=STEPS - at)
            assert named_by_tracker(folder) == STEPS, "the next save is not the latest"
        except AssertionError as error:
            return f"lost: {' '.join(str(error).split())}"
        if at not in (KILLED_AT, KILLED_AT - 1):
            return f"lost: the run went on from iteration {at}"
        return tidied(folder) or ("new" if at == KILLED_AT else "former")

    def straight(self) -> list[Record]:
        """What each rank of a run does that is never killed, and never saved."""
        if not self._straight:
            ranks = run_on_ranks(RANKS, train_all, [self.config()], **self._start)
            self._straight = [of_rank[0] for of_rank in ranks]
        return self._straight

    def config(self, **flags: Any) -> RunConfig:
        """The run, with more flags."""
        self._corpus = self._corpus or write_tiny_corpus(self._place)
        if "save" in flags:
            flags |= {"checkpoint_format": self.form, "save_interval": 1, "keep_last": 1}
        flags |= {"train_iters": STEPS, "log_level": "error"}
        return tiny_run(self._corpus, **FOREIGN[self.form], **flags)


def named_by_tracker(folder: Path) -> int:
    """The iteration that our tracker names."""
    return int((folder / folders.TRACKER).read_text())


def train_and_die(config: RunConfig, victim: int, when: str | float, span_s: float) -> None:
    """A rank of a run that saves after every step, until one is killed in the second save."""
    real, rank, saves = megatron.training.save_checkpoint, dist.get_rank(), 0
    with slow_disk(), ExitStack() as hit:

        def save(*args: Any, **kwargs: Any) -> None:
            nonlocal saves
            saves += 1
            if saves == KILLED_AT and rank == victim:
                lay_in_wait(hit, config.checkpoint.checkpoint_format.value, when)
            real(*args, **kwargs)
            if saves == KILLED_AT:  # neither goes on: the kill falls into this save, or right after
                time.sleep(span_s + (rank != victim))

        with patch.object(megatron.training, "save_checkpoint", save):
            train(config)


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind of kill."""
    lines = [
        "| a rank killed | times | former loaded | new one loaded | lost |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(result.kind for result in results):
        count = Counter(r.found if r.is_good else "lost" for r in results if r.kind == kind)
        numbers = [count.total(), *(count[name] for name in (*GOOD, "lost"))]
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    return lines


def write(page: Path, lines: Sequence[str]) -> None:
    """Put `lines` between the marks of a page."""
    write_between(page, lines, MARKS)


if __name__ == "__main__":
    main()
