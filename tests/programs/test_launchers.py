"""What launchers make of a failure: the summary of torchrun, its error file and its exit status."""

import json
import runpy
import signal
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousConnectionError

from megatron.errors import DataError
from tests.support.launch import ROOT, run_program, torchrun_words

pytestmark = pytest.mark.slow

# Rank 1 fails, and rank 0 notices within the same second. Rank 0 ends last, as `PeerWatch` has it.
FAILS = """
import sys, time
from pathlib import Path
from megatron import log, program
from megatron.errors import DataError, PeerError

noticed = Path(sys.argv[1])

def main():
    if not log.is_rank_zero():
        program.on_failure(lambda reason: noticed.touch())
        raise DataError("the corpus is empty", found="x.bin of f4ke-key", fix="give another")
    while not noticed.exists():
        time.sleep(0.01)
    program.on_failure(lambda reason: time.sleep(0.3))
    raise PeerError("rank 1 failed, so this rank ends too", fix="act on the message of rank 1")

program.run_program(main)
"""


def test_the_summary_of_torchrun_is_the_error_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    program, report = tmp_path / "fails.py", tmp_path / "error.json"
    program.write_text(FAILS)
    words = torchrun_words(2, str(program), str(tmp_path / "noticed"))
    at = words.index("--standalone")
    ended = run_program(
        [*words[:at], "--monitor-interval", "2", *words[at:]],  # so that it sees both at once
        cwd=tmp_path,
        environment={
            "PYTHONPATH": str(ROOT),
            "TORCHELASTIC_ERROR_FILE": str(report),
            "HF_TOKEN": "f4ke-key",
        },
        warm_children=True,
    )
    assert ended.status == 1, "torchrun has one status for all failures"
    others, _, root = ended.err.partition("Root Cause (first observed failure):")
    assert "exitcode  : 76" in others.rpartition("Failures:")[2]
    assert "PeerError: rank 1 failed" in others
    assert "rank      : 1 (local_rank: 1)\n  exitcode  : 65" in root
    message = "DataError: the corpus is empty\n  found: x.bin of (redacted)\n  fix: give another"
    assert message in root.replace("\n    ", "\n  ")
    recorded = json.loads(report.read_text())["message"]
    assert (recorded["message"], recorded["errorCode"]) == (message, DataError.exit_code)


def test_our_torchrun_ends_with_the_status_of_the_rank_that_failed_first(tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(FAILS)
    words = [sys.executable, str(ROOT / "examples" / "torchrun.py"), "--standalone"]
    words += ["--nproc-per-node", "2", str(program), str(tmp_path / "noticed")]
    variables = {"PYTHONPATH": str(ROOT), "HF_TOKEN": "f4ke-key"}
    ended = run_program(words, cwd=tmp_path, environment=variables, warm_children=True)
    assert ended.status == DataError.exit_code, ended.text
    assert "Root Cause (first observed failure)" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (None, 0),
        (ChildFailedError("x", {0: ProcessFailure(0, 1, 75, "none")}), 75),
        (ChildFailedError("x", {0: ProcessFailure(0, 1, -signal.SIGKILL, "none")}), 137),
        (SignalException("ended", signal.SIGTERM), 143),
        (RendezvousConnectionError("no answer"), 75),
    ],
)
def test_our_torchrun_ends_as_shells_count(
    raised: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(argv: list[str]) -> None:
        if raised is not None:
            raise raised

    program = runpy.run_path(str(ROOT / "examples" / "torchrun.py"))
    monkeypatch.setitem(program["main"].__globals__, "torchrun", run)
    assert program["main"]([]) == status
