"""Reports progress while a whole corpus is compared with its checksums, which may take hours.

The log gets a line at intervals; `report_progress` is called after every piece, so that waiting
ranks see that this one is at work. The caller decides how reports are sent.
"""

import time
from collections.abc import Callable

from megatron import log

_LOG_EVERY_S = 30.0

ReportProgress = Callable[[str], None]


def no_progress(doing: str) -> None:
    """Do nothing: no process waits for a report."""


class VerificationProgress:
    """Called with the bytes compared and the total; reports to the log and to waiting ranks."""

    def __init__(
        self, path: str, report_progress: ReportProgress, *, log_every_s: float = _LOG_EVERY_S
    ) -> None:
        self._path, self._report, self._log_every_s = path, report_progress, log_every_s
        self._started = self._logged_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        doing = f"verifying {self._path}: {done / 2**30:.2f} of {total / 2**30:.2f} GiB"
        self._report(doing)
        now = time.monotonic()
        if now - self._logged_at >= self._log_every_s:
            self._logged_at = now
            log.info(f"{doing}, for {now - self._started:.0f} s now")
