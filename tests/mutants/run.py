"""`python -m tests.mutants.run` puts mutants into a copy of the tree and demands that tests fail.

Tests run in processes forked from this one, which has imported torch and pytest and nothing of the
project. The working tree is never written to. First all tests run without a mutant, since one that
fails anyway proves nothing.
"""

import argparse
import compileall
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Imported once, for all that are forked; the optimizers of torch import torch._dynamo, in seconds.
import hypothesis  # noqa: F401
import pytest
import torch._dynamo
import torch.distributed  # noqa: F401

from tests.mutants.mutant import Mutant
from tests.mutants.mutants import MUTANTS

ROOT = Path(__file__).resolve().parents[2]
OWN_PACKAGES = (
    "megatron",
    "tools",
    "tasks",
    "tests",
    "pretrain_gpt",
    "pretrain_bert",
    "pretrain_prefix_lm",
    "pretrain_t5",
    "pretrain_ict",
    "pretrain_vit",
    "finetune_t0_non_causal_decoder",
)
DEADLINE_S = 180.0
# Errors of a mutant that does not run at all, and so shows nothing about its test.
BROKEN = ("ImportError", "ModuleNotFoundError", "NameError", "SyntaxError", "UnboundLocalError")
LOG, FAILURES = "mutant.log", "mutant.failures"  # files in a copy


@dataclass(frozen=True, slots=True)
class Job:
    """Tests that run in a copy of the tree, with one mutant in it or with none."""

    subject: str
    mutant: Mutant | None
    tests: tuple[str, ...]
    deadline_s: float = DEADLINE_S


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a job.

    Attributes:
        failures: name, seconds and first line of the error of each failed test, with tabs.
        trouble: why the tests show nothing; empty when they do.
        log: what pytest printed.
    """

    job: Job
    seconds: float
    failures: tuple[str, ...]
    trouble: str
    log: str

    @property
    def verdict(self) -> str:
        """One word; good ones are "caught", and "passed" without a mutant."""
        if self.trouble:
            return "BROKEN"
        if self.job.mutant is None:
            return "FAILED" if self.failures else "passed"
        return "caught" if self.failures else "SURVIVED"

    @property
    def is_good(self) -> bool:
        """Whether the verdict is the one that is wanted."""
        return self.verdict in ("caught", "passed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests of the chosen mutants without and with them; return 1 if one is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants.run", description=__doc__)
    parser.add_argument("--only", default="", help="a word of the subject, the promise or the file")
    parser.add_argument("--jobs", type=int, default=2, help="tests that run side by side")
    args = parser.parse_args(argv)
    chosen = [
        Job(subject, mutant, (mutant.test,))
        for subject, mutants in MUTANTS.items()
        for mutant in mutants
        if args.only in f"{subject} {mutant.promise} {mutant.file}"
    ]
    if not chosen:
        print(f"no mutant has {args.only!r} in its subject, promise or file")
        return 1
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = copy_tree(Path(folder), min(args.jobs, len(chosen)))
        outcomes = run_jobs([*without_mutants(chosen, len(copies)), *chosen], copies)
        bad = [outcome for outcome in outcomes if not _report(outcome)]
    seconds = time.perf_counter() - started
    if bad:
        print("\nnot caught:" if any(outcome.job.mutant for outcome in bad) else "\nfailed:")
    for outcome in bad:
        print(f"{outcome.verdict:<9} {outcome.job.subject}: {', '.join(outcome.job.tests[:3])}")
    print(f"{len(chosen)} mutants, {len(bad)} bad results, {seconds:.0f} s")
    return 1 if bad else 0


def without_mutants(jobs: Sequence[Job], parts: int) -> Iterator[Job]:
    """Return `parts` jobs that run all tests of `jobs` once in the tree as it is."""
    tests = sorted({test for job in jobs for test in job.tests})
    for part in range(min(parts, len(tests))):
        share = tuple(tests[part::parts])
        deadline_s = DEADLINE_S + 20 * len(share)
        yield Job(f"{len(share)} tests", None, share, deadline_s)


def copy_tree(folder: Path, copies: int) -> list[Path]:
    """Return `copies` folders with the files that git does not ignore, and the compiled modules."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = [os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    names += [str(path.relative_to(ROOT)) for path in ROOT.glob("megatron/**/*.so")]
    first = folder / "0"
    for name in names:
        if (ROOT / name).is_file():  # git also lists what was deleted
            (first / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, first / name)
    for package in ("megatron", "tools", "tasks"):
        compileall.compile_dir(str(first / package), quiet=1)
    return [first, *(shutil.copytree(first, folder / str(n)) for n in range(1, copies))]


def run_jobs(jobs: Iterable[Job], copies: Sequence[Path]) -> Iterator[Outcome]:
    """Run one job at a time in each copy; yield their outcomes as they end."""
    waiting, free = list(jobs), list(copies)
    running: dict[int, _Run] = {}
    try:
        while waiting or running:
            while waiting and free:
                run = _Run(waiting.pop(0), free.pop())
                running[run.process] = run
            for process, run in list(running.items()):
                if (outcome := run.poll()) is not None:
                    del running[process]
                    free.append(run.copy)
                    yield outcome
            time.sleep(0.02)
    finally:
        for process in running:
            _kill_group(process)


class _Run:
    """A job in progress, in a process group of its own."""

    def __init__(self, job: Job, copy: Path) -> None:
        self.job, self.copy = job, copy
        self._restore = _put_in(job.mutant, copy) if job.mutant else None
        self._started = time.perf_counter()
        self.process = _fork(job.tests, copy)

    def poll(self) -> Outcome | None:
        """Return the outcome and clean up if the process has ended or is overdue, else None."""
        seconds = time.perf_counter() - self._started
        overdue = seconds > self.job.deadline_s
        if not overdue and os.waitpid(self.process, os.WNOHANG) == (0, 0):
            return None
        _kill_group(self.process)
        if overdue:
            os.waitpid(self.process, 0)
        if self._restore:
            self._restore()
        return self._outcome(seconds, overdue)

    def _outcome(self, seconds: float, overdue: bool) -> Outcome:
        log = (self.copy / LOG).read_text(encoding="utf-8", errors="replace")
        notes = self.copy / FAILURES
        failures = notes.read_text(encoding="utf-8").splitlines() if notes.exists() else None
        trouble = ""
        if overdue:
            trouble = f"the tests did not end within {self.job.deadline_s:.0f} s"
        elif failures is None:
            trouble = "the process of the tests ended before they did"
        elif not failures and " passed" not in log:
            trouble = "no test ran"
        elif any(failure.split("\t")[2].startswith(BROKEN) for failure in failures):
            trouble = "the mutant does not run"
        return Outcome(self.job, seconds, tuple(failures or ()), trouble, log)


def _put_in(mutant: Mutant, copy: Path) -> Callable[[], None]:
    """Write the mutated file into the copy; return a function that undoes it."""
    path = copy / mutant.file
    original, state = path.read_bytes(), path.stat()
    path.write_text(mutant.mutated(copy), encoding="utf-8")
    # Python takes compiled modules by the time of their source.
    os.utime(path, (state.st_atime, state.st_mtime + 10))

    def restore() -> None:
        path.write_bytes(original)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))

    return restore


def _fork(tests: Sequence[str], copy: Path) -> int:
    """Start a process that runs the tests of the copy; return its id, which its group has too."""
    (copy / FAILURES).unlink(missing_ok=True)
    (copy / LOG).touch()
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.setsid()
        code = _run_tests(tests, copy)
    finally:
        os._exit(code)


def _run_tests(tests: Sequence[str], copy: Path) -> int:
    """Run the tests of the copy in this process, which can do nothing else afterwards."""
    sink = os.open(copy / LOG, os.O_WRONLY | os.O_TRUNC)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    for name in [name for name in sys.modules if name.partition(".")[0] in OWN_PACKAGES]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # or spawned processes would import it
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT)))]
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(copy)
    watch = _FailureWatch()
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--rootdir={copy}"]
    status = int(pytest.main([*options, *tests], plugins=[watch]))
    (copy / FAILURES).write_text("\n".join(watch.failures), encoding="utf-8")
    sys.stdout.flush()
    return status


class _FailureWatch:
    """A plugin that keeps the failures of tests, but not errors of fixtures and of collection."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a failed test, its seconds and the first line of its error."""
        if report.when == "call" and report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = (crash.message.splitlines() or [""])[0] if crash else ""
            self.failures.append(f"{report.nodeid}\t{report.duration:.2f}\t{message}")


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)


def _report(outcome: Outcome) -> bool:
    """Print a line, and all that is known of a bad outcome; return whether it is a good one."""
    job, mutant = outcome.job, outcome.job.mutant
    title = mutant.promise if mutant else "without a mutant"
    print(f"{outcome.verdict:<9}{outcome.seconds:6.1f} s  {job.subject}: {title}", flush=True)
    if not outcome.is_good:
        if mutant:
            print(f"    {mutant.file}: {mutant.before!r} -> {mutant.after!r}, {mutant.test}")
        for line in (outcome.trouble, *outcome.failures, *outcome.log.splitlines()[-15:]):
            print(f"    {line}" if line else "", end="\n" if line else "")
    return outcome.is_good


if __name__ == "__main__":
    sys.exit(main())
