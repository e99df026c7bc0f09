"""Tells a batch script whether a failed job is worth another start: status 0 if so, otherwise 1.

`python examples/is_retryable.py STATUS FOLDER` reads the reports of the ranks in FOLDER, each of
which TORCHELASTIC_ERROR_FILE named for its rank. STATUS counts where there is no report: launchers
give the highest status of all ranks, which says little when some were ended because another failed.
"""

import json
import sys
from pathlib import Path

from megatron.errors import is_retryable


def main(status: str, folder: str) -> int:
    """Return 0 if no rank failed in a way that the same command would repeat."""
    reports = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    statuses = [report["message"]["errorCode"] for report in reports] or [int(status)]
    return 0 if all(map(is_retryable, statuses)) else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
