"""Starts the ranks of one machine, and starts them again from the last checkpoint when they fail.

    python -m megatron.supervise --nproc-per-node 8 --max-restarts 3 pretrain_gpt.py <flags>

On clusters their scheduler does this (docs/launching.md). What a reader would get wrong: a rank
that ends because another one failed says so by its exit code, and is not taken for the cause.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from megatron import host, log
from megatron.checkpoint.files.store import place
from megatron.checkpoint.folder import run_folder
from megatron.checkpoint.local.layout import newest_iteration
from megatron.errors import FIX_OF_MEMORY, ConfigError, MegatronError, PeerError, is_retryable
from megatron.launch import environment_of_rank, free_port
from megatron.peers.goodput import accounts_in, goodput
from megatron.peers.stacks import ProcessName
from megatron.program import run_program

_POLL_S = 0.02
_OTHERS_S = 3.0  # for ranks whose peer has failed to say so and end by themselves
_STOPPED_S = 8.0  # a process that the kernel says is stopped (SIGSTOP) is not waited for longer
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of prctl(2)
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class SupervisedError(MegatronError):
    """The ranks failed, and starting them again does not help; it ends with their exit code."""

    def __init__(self, problem: str, *, found: object = None, fix: str, status: int = 1) -> None:
        super().__init__(problem, found=found, fix=fix)
        self.exit_code = status if status > 0 else 128 - status


class End(NamedTuple):
    """How one rank ended.

    Attributes:
        status: an exit code, or the negative of the signal's number where one ended it.
        for_memory: the kernel killed a process of this job because memory ran out.
    """

    rank: int
    status: int
    for_memory: bool = False

    def __str__(self) -> str:
        if self.status < 0:
            why = ": killed by the kernel because memory ran out" if self.for_memory else ""
            return f"rank {self.rank} was ended by {signal.Signals(-self.status).name}{why}"
        return f"rank {self.rank} ended with exit code {self.status}"

    @property
    def fix(self) -> str:
        """What to do about it; a process that the kernel killed has left no message."""
        return FIX_OF_MEMORY if self.for_memory else f"act on the message of rank {self.rank}"


class Job(NamedTuple):
    """What is started: the words after `python`, on how many ranks, and for how often in a row."""

    words: tuple[str, ...]
    ranks: int
    max_restarts: int
    grace_s: float
    save: str | None  # where the program's checkpoints are, as far as its flags say
    local: str | None = None  # the same of its local checkpoints
    accounts: str | None = None  # where accounts of the time are kept; None: nowhere


def cause_of(ends: Sequence[End]) -> End | None:
    """Return the end that made an attempt fail, of those in their order; None if all ended well.

    A rank that ended because another one failed counts only where no other end is known.
    """
    bad = [end for end in ends if end.status != 0]
    return next((end for end in bad if end.status != PeerError.exit_code), bad[0] if bad else None)


def job_of(argv: Sequence[str]) -> Job:
    """Return the job that a command line asks for.

    Raises:
        ConfigError: it names no program, a number makes no sense, or a restart would not resume.
    """
    parser = argparse.ArgumentParser(
        prog="python -m megatron.supervise", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--nproc-per-node", type=int, default=1, metavar="N", help="ranks to start")
    parser.add_argument(
        "--max-restarts",
        type=int,
        default=3,
        metavar="N",
        help="starts in a row that lead to no new checkpoint, before it gives up (default 3)",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="from a signal to end until ranks that still run are killed (default 30)",
    )
    parser.add_argument(
        "--accounts",
        metavar="FOLDER",
        help="keep there where the time of each start went, and count the starts that are there",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a program, and its flags")
    given = parser.parse_args(argv)
    words = given.program[1:] if given.program[:1] == ["--"] else given.program
    for flag, is_right, value in (
        ("--nproc-per-node", given.nproc_per_node > 0, given.nproc_per_node),
        ("--max-restarts", given.max_restarts >= 0, given.max_restarts),
        ("--grace", given.grace > 0, given.grace),
    ):
        if not is_right:
            raise ConfigError(f"{flag} makes no sense", found=f"{flag} {value}", fix=f"drop {flag}")
    if not words:
        raise ConfigError(
            "no program is named",
            found=" ".join(argv) or "nothing",
            fix="python -m megatron.supervise --nproc-per-node 2 pretrain_gpt.py <its flags>",
        )
    save, local = _folders_of_checkpoints(words)
    return Job(
        words=tuple(words),
        ranks=given.nproc_per_node,
        max_restarts=given.max_restarts,
        grace_s=given.grace,
        save=save,
        local=local,
        accounts=given.accounts,
    )


def _folders_of_checkpoints(words: Sequence[str]) -> tuple[str | None, str | None]:
    """Return the folders of the program's checkpoints and of its local ones.

    Refuses one that no restart would load.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in ("--save", "--load", "--non-persistent-local-ckpt-dir"):
        parser.add_argument(flag)
    flags, _ = parser.parse_known_args(words[1:])
    if flags.save is not None and flags.load != flags.save:
        raise ConfigError(
            "a run that is started again would begin anew, and not from its last checkpoint",
            found=f"--save {flags.save}, --load {flags.load or 'is not given'}",
            fix=f"use --save {flags.save} --load {flags.save}; weights to begin with are given by "
            "--pretrained-checkpoint",
        )
    if flags.save is None:
        log.warning(
            "the flags name no --save folder: what is started again begins anew, unless a config "
            "file names one"
        )
    return flags.save, flags.non_persistent_local_ckpt_dir


@dataclass
class Attempt:
    """One start of all ranks; use it as a context manager, which leaves no process behind."""

    job: Job
    accounts: str
    ends: list[End] = field(default_factory=list)
    _kills_before: int = 0  # of the kernel, for memory
    _processes: dict[int, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _stopped_since: dict[int, float] = field(default_factory=dict)

    def __enter__(self) -> "Attempt":
        port = free_port()
        self._kills_before = host.kills_for_memory()
        for rank in range(self.job.ranks):
            self._processes[rank] = subprocess.Popen(
                [sys.executable, *self.job.words],
                env=environment_of_rank(rank, self.job.ranks, port=port, accounts=self.accounts),
                stdin=subprocess.DEVNULL,
                # A group of its own, which is ended as a whole: data workers belong to it.
                start_new_session=True,
                preexec_fn=_die_with(os.getpid()),  # no thread runs here
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def poll(self) -> bool:
        """Note which ranks have ended; return whether any still runs."""
        ended = {end.rank for end in self.ends}
        for rank, process in self._processes.items():
            if rank not in ended and (status := process.poll()) is not None:
                was_killed = status == -signal.SIGKILL
                for_memory = was_killed and host.kills_for_memory() > self._kills_before
                self.ends.append(End(rank, status, for_memory))
        return len(self.ends) < self.job.ranks

    def signal(self, number: int) -> None:
        """Pass a signal on to all ranks that still run."""
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """Kill the ranks that still run, with all processes that they started."""
        for process in self._processes.values():
            _kill_group(process)
        for process in self._processes.values():
            process.wait()
        self.poll()

    def kill_stopped(self) -> None:
        """Kill ranks that the kernel says are stopped for long; a rank alone has no peer for it."""
        now = time.monotonic()
        for rank, process in self._processes.items():
            name = ProcessName.of(process.pid)
            if process.returncode is not None or not name.is_stopped:
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) > _STOPPED_S:
                log.error(f"rank {rank} ({name}) is stopped (SIGSTOP) and is killed")
                _kill_group(process)


@contextmanager
def _accounts_folder(wanted: str | None) -> Iterator[str]:
    """Give the folder for accounts: the one that is wanted, or one that is removed afterwards."""
    if wanted is None:
        with tempfile.TemporaryDirectory(prefix="megatron-accounts-") as folder:
            yield folder
        return
    try:
        os.makedirs(wanted, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            "the folder for accounts of the time cannot be made",
            found=f"--accounts {wanted}: {error.strerror}",
            fix="name a folder that can be written to",
        ) from error
    yield wanted


class Supervisor:
    """Runs a job until it ends well, is told to end, or makes no progress any more."""

    def __init__(self, job: Job, latest: Callable[[], int | None] | None = None) -> None:
        """Take a job, and how the iteration of its last checkpoint is found out."""
        self._job = job
        self._latest = latest or (lambda: _latest_iteration(job))
        self._accounts = ""
        self._told_to_end: int | None = None
        self._told_at = 0.0

    def run(self) -> None:
        """Start the ranks, again and again where that may help.

        Raises:
            SupervisedError: they failed for good; it has the exit code of the rank that failed.
        """
        handlers = {number: signal.signal(number, self._on_signal) for number in _FORWARDED}
        began = time.time()
        try:
            with _accounts_folder(self._job.accounts) as self._accounts:
                before = accounts_in(self._accounts)
                if before:  # of commands that have ended
                    began = before[0].began
                try:
                    self._run()
                finally:
                    accounts = accounts_in(self._accounts)
                    if accounts:
                        log.info(str(goodput(accounts, began=began, ended=time.time())))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self) -> None:
        in_vain, starts, before = 0, 1, self._latest()
        while True:
            with Attempt(self._job, self._accounts) as attempt:
                cause = self._wait(attempt)
            if cause is None:
                return
            after = self._latest()
            in_vain = 0 if after != before else in_vain + 1
            reached = f"the last checkpoint is of iteration {after}" if after else "no checkpoint"
            if self._told_to_end is not None or not is_retryable(cause.status):
                why = "after a signal to end" if self._told_to_end is not None else "for good"
                raise SupervisedError(
                    f"the run ended {why}",
                    found=f"{cause}; {reached}",
                    fix=f"{cause.fix}, and start the command again",
                    status=cause.status,
                )
            if in_vain > self._job.max_restarts:
                raise SupervisedError(
                    "the run fails again and again without a new checkpoint",
                    found=f"{in_vain} starts in a row; {cause} at last; {reached}",
                    fix=f"{cause.fix}, or raise --max-restarts",
                    status=cause.status,
                )
            starts, before = starts + 1, after
            fix = f"\n  fix: {cause.fix}" if cause.for_memory else ""
            log.warning(f"{cause}; start {starts}: {reached}{fix}")

    def _wait(self, attempt: Attempt) -> End | None:
        """Wait until all ranks have ended, and end those that do not; return what went wrong."""
        failed_at: float | None = None
        forwarded = False
        while attempt.poll():
            time.sleep(_POLL_S)
            now = time.monotonic()
            attempt.kill_stopped()
            if self._told_to_end is not None:
                if not forwarded:
                    attempt.signal(self._told_to_end)
                    forwarded = True
                if now - self._told_at > self._job.grace_s:
                    log.error(f"ranks still run {self._job.grace_s:g} s after the signal: killed")
                    attempt.kill()
                    return attempt.ends[-1]
            cause = cause_of(attempt.ends)
            if cause is not None and failed_at is None:
                failed_at = now
            # A rank that was killed has told the others nothing, so that they would only guess.
            was_killed = cause is not None and cause.status < 0
            if failed_at is not None and (was_killed or now - failed_at > _OTHERS_S):
                break
        return cause_of(attempt.ends)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._told_to_end is None:
            self._told_at = time.monotonic()
            self._told_to_end = signal.SIGTERM if number == signal.SIGINT else number


def main(argv: Sequence[str] | None = None) -> None:
    """Read the command line and run the job."""
    Supervisor(job_of(sys.argv[1:] if argv is None else argv)).run()


def program() -> None:
    """Be the console script."""
    run_program(main)


def _latest_iteration(job: Job) -> int | None:
    """Return the iteration of the last checkpoint; None where there is none, or no one knows."""
    if job.save is None:
        return None
    save = place(job.save)
    found = run_folder.saved_iterations(save)
    if job.local is not None and (local := newest_iteration(Path(job.local), save)) is not None:
        found.append(local)
    return max(found, default=None)


def _kill_group(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _die_with(parent: int) -> Callable[[], None]:
    """Return what a child calls first, so that it is killed when its supervisor is."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # not on macOS

    def die_with_parent() -> None:
        if prctl is not None:
            prctl(_DIE_WITH_PARENT, signal.SIGKILL)
            if os.getppid() != parent:  # it is gone already
                os.kill(os.getpid(), signal.SIGKILL)

    return die_with_parent


if __name__ == "__main__":
    program()
