"""What every test run is held to: something ran, and only what needs a GPU or a browser may skip.

Each run ends with its slowest tests, its time by folder, the number of tests that it left out, and
what the processors did.

Only one thread per process computes, since many processes share few cores. Optional data may lie
in the folder that MEGATRON_SHARED_DATA names; no test may need it.
"""

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# Before torch is imported, here or in a process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background (`nohup make test &`) ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import psutil
import pytest

from megatron import log

pytest_plugins = ["tests.support.workers"]

# The machines are shared: how long one example takes says nothing. Whole tests have a deadline.
# How many examples each profile draws: tests/support/examples.py.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)
hypothesis.settings.register_profile("full", deadline=None)
hypothesis.settings.load_profile("quick")

ROOT = Path(__file__).resolve().parents[1]
MAY_SKIP = ("tests/gpu/", "tests/browser/")
RED_BECAUSE_OF_SKIPS = 1
SLOWEST = 10  # tests that are named at the end, and any other that takes longer than
LONG_S = 10.0
LEFT_OUT = "tests left out"  # the key under which an xdist worker hands on its number


@pytest.fixture(autouse=True)
def _the_speaker_of_other_tests() -> Iterator[None]:
    """A test that runs a program's code in this process leaves its rank and level behind."""
    yield
    log.configure(0, 1)
    log._OUTPUT.warned.clear()


class Clock:
    """A monotonic clock that is moved by the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace time.monotonic by a clock that stands still."""
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def optional_data_folder() -> Path | None:
    """Return the folder of public corpora and golden files, or None where there is none.

    MEGATRON_SHARED_DATA names it; otherwise it is shared/data beside the checkout.
    """
    folder = Path(os.environ.get("MEGATRON_SHARED_DATA", ROOT.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def pytest_configure(config: pytest.Config) -> None:
    """Watch skips and times for the whole run, in the process that reports (xdist has others)."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipWatch(), "skip-watch")
        config.pluginmanager.register(TimeWatch(), "time-watch")


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    """Count what -m or -k leaves out; an xdist worker hands its number on."""
    if items:
        config = items[0].config
        watch = config.pluginmanager.get_plugin("time-watch")
        if watch is not None:
            watch.left_out += len(items)
        else:
            output = config.workeroutput  # type: ignore[attr-defined]  # xdist's
            output[LEFT_OUT] = output.get(LEFT_OUT, 0) + len(items)


class SkipWatch:
    """Counts skips with their reasons; one outside of `MAY_SKIP` makes the run red."""

    def __init__(self) -> None:
        self.reasons: Counter[tuple[str, bool]] = Counter()  # (reason, whether it is allowed)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test that was skipped, but not one that is expected to fail."""
        if report.skipped and not hasattr(report, "wasxfail"):
            self._count(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A whole file that was skipped while it was read."""
        if report.skipped:
            self._count(report)

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Iterator[None]:
        """A green run that skipped what it must not skip is red."""
        yield
        if self.refused and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = RED_BECAUSE_OF_SKIPS

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say how many tests were skipped and why, and how large the library is."""
        if self.reasons:
            terminalreporter.section(f"{self.reasons.total()} skipped")
        for (reason, allowed), count in self.reasons.most_common():
            verdict = "" if allowed else f"RED, only {', '.join(MAY_SKIP)} may skip: "
            terminalreporter.write_line(f"{count} x {verdict}{reason}")
        if _gates_ran(terminalreporter):
            from tests.architecture.sizes import size_report

            terminalreporter.section("sizes, for the reviewer")
            for line in size_report(ROOT / "megatron"):
                terminalreporter.write_line(line)

    @property
    def refused(self) -> int:
        """Skips that make the run red."""
        return sum(count for (_, allowed), count in self.reasons.items() if not allowed)

    def _count(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        longrepr = report.longrepr
        reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
        allowed = report.nodeid.startswith(MAY_SKIP)
        self.reasons[reason.removeprefix("Skipped: "), allowed] += 1


class TimeWatch:
    """Sums what tests take, their fixtures included, by test and by folder."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.left_out = 0
        self._began = time.monotonic()
        self._processors = processor_seconds()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add a test's set-up, call or tear-down."""
        self.seconds[report.nodeid] += report.duration

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the number of tests left out from an xdist worker: all of them count the same."""
        self.left_out = max(self.left_out, getattr(node, "workeroutput", {}).get(LEFT_OUT, 0))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the slowest tests, then the folders, then how many tests were left out."""
        ranked = self.seconds.most_common()
        named = [one for at, one in enumerate(ranked) if at < SLOWEST or one[1] > LONG_S]
        if named:
            terminalreporter.section(f"the {SLOWEST} slowest tests, and those above {LONG_S:.0f} s")
        for name, seconds in named:
            terminalreporter.write_line(f"{seconds:7.1f} s {name}")
        folders: Counter[str] = Counter()
        tests: Counter[str] = Counter()
        for name, seconds in ranked:
            folder = _budget_folder(name)
            folders[folder] += seconds
            tests[folder] += 1
        if folders:
            terminalreporter.section("time by folder, summed over processes")
        whole = sum(folders.values()) or 1.0
        for folder, seconds in folders.most_common():
            share = f"{100 * seconds / whole:3.0f}%"
            terminalreporter.write_line(f"{seconds:7.1f} s {share} {tests[folder]:5} {folder}")
        if self.left_out:
            terminalreporter.write_line(
                f"{self.left_out} tests were left out of this run; `make test-all` runs all"
            )
        wall_s, now = time.monotonic() - self._began, processor_seconds()
        spent = {state: now[state] - before for state, before in self._processors.items()}
        states = ", ".join(f"{seconds:.0f} s {state}" for state, seconds in spent.items())
        terminalreporter.write_line(f"{wall_s:.0f} s; processors of this machine: {states}")


def processor_seconds() -> dict[str, float]:
    """Return what all processors of this machine have done since it started, by state.

    `taken away` is the time in which a host gave the processor to another machine while there was
    work here (steal): with much of it, the same tests take longer than on an idle host.
    """
    times = psutil.cpu_times()
    return {
        "computing": times.user + times.system + getattr(times, "nice", 0.0),
        "idle": times.idle + getattr(times, "iowait", 0.0),
        "taken away": getattr(times, "steal", 0.0),
    }


def _budget_folder(nodeid: str) -> str:
    """The folder of a test that has a budget of its own in CONTRIBUTING.md."""
    folders = nodeid.partition("::")[0].split("/")[:-1]
    return "/".join(folders[: 3 if folders[1:2] == ["laws"] else 2])


def _gates_ran(terminalreporter: pytest.TerminalReporter) -> bool:
    passed = terminalreporter.stats.get("passed", [])
    return any(report.nodeid.startswith("tests/architecture/") for report in passed)
