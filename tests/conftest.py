"""What every test run is held to: something ran, and nothing but tests of a GPU was passed over.

Only one thread per process computes, since many processes share few cores. Optional data may lie
in the folder that MEGATRON_SHARED_DATA names; no test may need it.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported, here or in a process that a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A job in the background (`nohup make test &`) ignores Ctrl-C, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest

from megatron import log

# The machines are shared: how long one example takes says nothing. Whole tests have a deadline.
hypothesis.settings.register_profile("by no clock", deadline=None)
hypothesis.settings.load_profile("by no clock")

ROOT = Path(__file__).resolve().parents[1]
MAY_SKIP = ("tests/gpu/",)
RED_BECAUSE_OF_SKIPS = 1


@pytest.fixture(autouse=True)
def _the_speaker_of_other_tests() -> Iterator[None]:
    """A test that runs a program's code in this process leaves its rank and level behind."""
    yield
    log.configure(0, 1)
    log._SPEAKER.said.clear()


def optional_data_folder() -> Path | None:
    """Return the folder of public corpora and golden files, or None where there is none.

    MEGATRON_SHARED_DATA names it; otherwise it is shared/data beside the checkout.
    """
    folder = Path(os.environ.get("MEGATRON_SHARED_DATA", ROOT.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def pytest_configure(config: pytest.Config) -> None:
    """Watch for skips for the whole run, in the process that reports (xdist has others)."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(SkipWatch(), "skip-watch")


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


def _gates_ran(terminalreporter: pytest.TerminalReporter) -> bool:
    passed = terminalreporter.stats.get("passed", [])
    return any(report.nodeid.startswith("tests/architecture/") for report in passed)
