"""What is left of checkpoints when a rank is killed at any moment of a save, in every format.

`python -m tests.laws.checkpoints.kill_grid` (or `make test-faults`) kills each rank at each named
moment of a save, then ranks at random moments (`--random 400`), half of them of the commit alone,
in each way of saving. It ends with 1 if a checkpoint was lost, or if no random kill of a way came
after the commit began. Ours are saved by the library alone, those of other frameworks by runs that
train, and a run goes on from what is left. `--write` keeps the table in docs/checkpoints.md.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
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
OVERTIME = 1.1  # of a save: random moments fall into the time just after it too
COMMIT_S = 0.03  # about as long as a commit takes
DEADLINE_S = 120.0
GOOD = ("former", "new")  # what is loaded after a kill; anything else is a loss
# Whether the victim's end or that of a rank waiting for it is reported first is random.
_KILLED = re.compile(r"died with exit code -9|Connection|Read error|closed")


class RandomMoment(NamedTuple):
    """A moment of a save, or of its commit alone, which is too short to be met otherwise.

    Of a save it is a share of the time that the save before it took, since formats differ; of a
    commit, which is rank 0's, a share of `COMMIT_S`.
    """

    share: float
    of_commit: bool = False

    def __str__(self) -> str:
        if self.of_commit:
            return f"{self.share * COMMIT_S:.4f} s after the commit began"
        return f"at {self.share * OVERTIME:.3f} of a save"


When = str | RandomMoment


class Result(NamedTuple):
    """What came of one kill."""

    kind: str
    what: str
    found: str
    in_commit: bool = False  # whether the commit had begun, or was over

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost."""
        return self.found in GOOD


class Way(Protocol):
    """One way to save, with a rank that is killed in its second save."""

    spelled: str

    def moments(self, rank: int) -> list[str]:
        """The named moments that come on a rank."""

    def killed(self, folder: Path, victim: int, when: When) -> str:
        """Kill a rank at a moment, by name or at random; one of `GOOD`, or the loss."""


def ways(place: Path) -> list[Way]:
    """Every way; what runs need is made in `place`, when it is first needed."""
    return [
        Ours(beside=False),
        Ours(beside=True),
        *(Run(name, place / name) for name in FOREIGN),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run what the flags select; exit code 1 if anything was lost."""
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
    if missed := without_commit(results):
        print(f"no random kill came after the commit began: {', '.join(missed)}")
    if flags.write:
        write(PAGE, [*lines, "", f"{took}, on {os.cpu_count()} cores, {RANKS} ranks."])
    sys.exit(1 if bad or missed else 0)


def run_all(place: Path, flags: argparse.Namespace) -> Iterator[Result]:
    """Run every kill that the flags select, each in a folder of its own."""
    draw, every, at = random.Random(flags.seed), ways(place), 0
    for way in every:
        for victim in range(RANKS):
            for moment in () if flags.no_moments else way.moments(victim):
                at += 1
                kind, what = f"at a named moment, {way.spelled}", f"rank {victim}, {moment}"
                found = way.killed(place / str(at), victim, moment)
                yield Result(kind, what, found, in_commit=commit_began(place / str(at)))
    for way, victim, when in random_kills(every, flags.random, draw):
        at += 1
        folder = place / str(at)
        found = way.killed(folder, victim, when)
        kind, what = f"{_AT_RANDOM}, {way.spelled}", f"rank {victim}, {when}"
        yield Result(kind, what, found, in_commit=commit_began(folder))


_AT_RANDOM = "at a random moment"


def random_kills(
    every: Sequence[Way], number: int, draw: random.Random
) -> Iterator[tuple[Way, int, RandomMoment]]:
    """Each way in turn, a rank, and a moment: of all of a save, then of its commit, in turn."""
    for at in range(number):
        of_commit = at // len(every) % 2 == 1
        victim = 0 if of_commit else draw.randrange(RANKS)
        yield every[at % len(every)], victim, RandomMoment(draw.random(), of_commit)


def without_commit(results: Sequence[Result]) -> list[str]:
    """The ways whose random kills all came before the commit began."""
    at_random = [result for result in results if result.kind.startswith(_AT_RANDOM)]
    kinds = dict.fromkeys(result.kind for result in at_random)
    reached = {result.kind for result in at_random if result.in_commit}
    return [kind.removeprefix(f"{_AT_RANDOM}, ") for kind in kinds if kind not in reached]


def _commit_mark(folder: str | Path) -> Path:
    return Path(f"{folder}.committing")


def commit_began(folder: Path) -> bool:
    """Whether the commit of the save that was killed in `folder` had begun."""
    return _commit_mark(folder).exists()


def lay_in_wait(hit: ExitStack, form: str, when: When, former_s: float) -> None:
    """Kill this process at a moment of a save of this format; the one before took `former_s`."""
    if isinstance(when, str):
        hit.enter_context(MOMENTS_OF[form][when].put_in(kill_this_process))
    elif when.of_commit:
        soon = partial(kill_after, when.share * COMMIT_S)
        hit.enter_context(at_commit(soon))
    else:
        kill_after(when.share * OVERTIME * former_s)


def at_commit(act: Callable[[], None]) -> Any:
    """Call `act` when a commit begins, inside of the `with` block."""
    real = folders.publish

    def publish(*args: Any, **kwargs: Any) -> Path:
        act()
        return real(*args, **kwargs)

    return patch.object(folders, "publish", publish)


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

    def __init__(self, *, beside: bool) -> None:
        self.beside = beside
        self.spelled = "beside the training" if beside else "training waits"

    def moments(self, rank: int) -> list[str]:
        """As `Way.moments`."""
        return moments_of(rank, beside=self.beside)

    def killed(self, folder: Path, victim: int, when: When) -> str:
        """As `Way.killed`; then another number of ranks saves a third one."""
        args = (folder, self.beside, victim, when)
        if (wrong := end_of(save_and_die, *args)) is not None:
            return wrong
        alone = ParallelContext.single()
        try:
            found = loaded(folder, alone)
            snapshot = snapshot_at(1, 1, 0, seed=AFTER, iteration=AFTER)
            storage.save_snapshot(
                folder, snapshot, iteration=AFTER, ctx=alone, retention=Retention(2)
            )
            if loaded(folder, alone) != AFTER:
                return "the next save is not the latest"
        except (CheckpointError, AssertionError) as error:
            return f"lost: {' '.join(str(error).split())}"
        return tidied(folder) or ("new" if found == DURING else "former")


def save_and_die(folder: Path, beside: bool, victim: int, when: When) -> None:
    """A rank of a job that saves twice."""
    ctx = ParallelContext.build(Topology(dp=RANKS))
    log.configure(ctx.rank, RANKS, level="error")
    with slow_disk(), ExitStack() as hit:
        former_s = 0.0
        for iteration in (BEFORE, DURING):
            if iteration == DURING:
                if ctx.rank == victim:
                    lay_in_wait(hit, "sharded", when, former_s)
                hit.enter_context(at_commit(_commit_mark(folder).touch))
            began = time.monotonic()
            snapshot = snapshot_at(1, RANKS, ctx.rank, seed=iteration, iteration=iteration)
            if beside:
                with BackgroundSaves(ctx) as saves:
                    saves.start(folder, snapshot, iteration=iteration, retention=Retention(1))
                    saves.wait()
            else:
                storage.save_snapshot(
                    folder, snapshot, iteration=iteration, ctx=ctx, retention=Retention(1)
                )
            former_s = time.monotonic() - began
        wait_to_be_killed(ctx.rank == victim, when)


def wait_to_be_killed(is_victim: bool, when: When) -> None:
    """Let a random kill come just after the save; a named moment has come in it, or never will."""
    if is_victim and isinstance(when, RandomMoment):
        time.sleep(DEADLINE_S)


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

    def __init__(self, form: str, place: Path) -> None:
        self.form, self.spelled = form, _SPELLED[form]
        self._place, self._corpus = place, ""
        self._start = {"timeout_s": DEADLINE_S, "deepspeed": form == "deepspeed"}
        self._straight: list[Record] = []

    def moments(self, rank: int) -> list[str]:
        """As `Way.moments`."""
        return moments_of(rank, beside=False, of=self.form)

    def killed(self, folder: Path, victim: int, when: When) -> str:
        """As `Way.killed`; then a run goes on to its end, as if nothing had been, and saves."""
        config = self.config(save=str(folder), load=str(folder))
        args = (config, victim, when)
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
        flags |= {"train_iters": STEPS, "micro_batch_size": 4, "log_level": "error"}
        return tiny_run(self._corpus, **FOREIGN[self.form], **flags)


def named_by_tracker(folder: Path) -> int:
    """The iteration that our tracker names."""
    return int((folder / folders.TRACKER).read_text())


def train_and_die(config: RunConfig, victim: int, when: When) -> None:
    """A rank of a run that saves after every step, until one is killed in the second save."""
    real, rank, saves = megatron.training.save_checkpoint, dist.get_rank(), 0
    former_s = 0.0
    with slow_disk(), ExitStack() as hit:

        def save(*args: Any, **kwargs: Any) -> None:
            nonlocal saves, former_s
            saves += 1
            if saves == KILLED_AT:
                if rank == victim:
                    form = config.checkpoint.checkpoint_format.value
                    lay_in_wait(hit, form, when, former_s)
                hit.enter_context(at_commit(_commit_mark(config.checkpoint.save or "").touch))
            began = time.monotonic()
            real(*args, **kwargs)
            former_s = time.monotonic() - began
            if saves == KILLED_AT:  # no other rank goes on alone: the next step needs the victim
                wait_to_be_killed(rank == victim, when)

        with patch.object(megatron.training, "save_checkpoint", save):
            train(config)


def table(results: Sequence[Result]) -> list[str]:
    """A row for each kind of kill."""
    lines = [
        "| a rank killed | times | commit begun | former loaded | new one loaded | lost |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(result.kind for result in results):
        these = [result for result in results if result.kind == kind]
        count = Counter(result.found if result.is_good else "lost" for result in these)
        committing = sum(result.in_commit for result in these)
        numbers = [len(these), committing, *(count[name] for name in (*GOOD, "lost"))]
        lines.append(f"| {kind} | {' | '.join(map(str, numbers))} |")
    return lines


def write(page: Path, lines: Sequence[str]) -> None:
    """Put `lines` between the marks of a page."""
    write_between(page, lines, MARKS)


if __name__ == "__main__":
    main()
