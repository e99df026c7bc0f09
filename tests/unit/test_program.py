"""How a program ends: with which output, on which rank, and with which status."""

import subprocess
import sys
from pathlib import Path

import pytest

from megatron import program
from megatron.errors import PeerError
from tests.architecture.source_tree import ROOT
from tests.support.output import without_times

CONFIG_ERROR, DATA_ERROR, MACHINE_ERROR = 64, 65, 75
FRAME = """
import sys
from megatron import log, program
from megatron.errors import ConfigError, DataError, Finding, MachineError, PreflightError

def main():
{body}

program.run_program(main)
"""


def end_of(body: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program whose main is `body`; the times of its log are left out."""
    text = FRAME.format(body="\n".join(f"    {line}" for line in body.splitlines()))
    end = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    end.stdout, end.stderr = without_times(end.stdout), without_times(end.stderr)
    return end


def as_rank(rank: int) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, (str(rank), "2", str(rank), "localhost", "29500")))


def test_a_program_that_returns_ends_well() -> None:
    end = end_of("log.info('done')")
    assert (end.returncode, end.stdout, end.stderr) == (0, "done\n", "")


def test_a_known_error_is_said_once_without_a_traceback() -> None:
    end = end_of("raise DataError('the corpus is empty', found='x.bin', fix='give another')")
    assert end.returncode == DATA_ERROR
    assert end.stderr == ("ERROR: the corpus is empty\n  found: x.bin\n  fix: give another\n")


def test_a_bug_is_said_with_its_traceback() -> None:
    end = end_of("print('before')\n{}['missing']")
    assert end.returncode == 1
    assert end.stdout == "before\n"
    assert end.stderr.startswith("ERROR: unexpected failure\nTraceback")
    assert "KeyError: 'missing'" in end.stderr


def test_an_interrupt_ends_as_shells_count_it() -> None:
    end = end_of("raise KeyboardInterrupt")
    assert (end.returncode, end.stderr) == (130, "")


def test_help_and_version_end_as_argparse_says() -> None:
    assert end_of("raise SystemExit(0)").returncode == 0
    assert end_of("sys.exit(2)").returncode == 2


def test_what_every_rank_finds_is_said_by_rank_zero_alone() -> None:
    body = "raise PreflightError([Finding('a', ConfigError('wrong', fix='mend it'))])"
    first, second = end_of(body, **as_rank(0)), end_of(body, **as_rank(1))
    assert first.returncode == second.returncode == CONFIG_ERROR
    assert "[rank 0] ERROR: 1 check failed before training\n[a] wrong" in first.stderr
    assert second.stderr == ""


def test_what_one_rank_finds_is_said_by_that_rank() -> None:
    end = end_of("raise MachineError('the disk is full', fix='free some')", **as_rank(1))
    assert end.returncode == MACHINE_ERROR
    assert end.stderr.startswith("[rank 1] ERROR: the disk is full")


def test_a_launcher_that_set_half_of_it_is_told_like_any_error() -> None:
    end = end_of("log.info('never')", RANK="0")
    assert end.returncode == CONFIG_ERROR
    assert "the launcher set only part of what ranks need" in end.stderr
    assert end.stdout == ""


def test_others_are_told_of_a_failure_before_the_end() -> None:
    body = (
        "program.on_failure(lambda reason: print('told:', reason.splitlines()[0]))\n"
        "raise DataError('the corpus is empty', fix='give another')"
    )
    assert end_of(body).stdout == "told: DataError: the corpus is empty\n"
    bug = body.rpartition("\n")[0] + "\nraise ValueError('x')"
    assert end_of(bug).stdout == "told: a bug; see that rank's traceback\n"


def test_others_are_told_what_is_noted_on_an_error_and_where_a_bug_is() -> None:
    listen = "program.on_failure(lambda reason: print('told:', reason))\n"
    noted = (
        "error = DataError('the corpus is empty', fix='give another')\n"
        "error.add_note('in a data-loader worker:\\nTraceback of the worker')\n"
        "raise error"
    )
    end = end_of(listen + noted)
    assert end.returncode == DATA_ERROR
    assert end.stdout.endswith("in a data-loader worker:\nTraceback of the worker\n")
    assert end.stderr.endswith("in a data-loader worker:\nTraceback of the worker\n")
    bug = end_of(listen + "def inner():\n    return 1 / 0\ninner()")
    assert "told: a bug; see that rank's traceback\nTraceback" in bug.stdout
    assert bug.stdout.endswith("ZeroDivisionError: division by zero\n\n")


def test_threads_that_never_end_do_not_keep_a_failed_process() -> None:
    body = (
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(300,)).start()\n"
        "raise ConfigError('wrong', fix='mend it')"
    )
    assert end_of(body).returncode == CONFIG_ERROR


def test_secrets_of_the_environment_are_not_in_what_a_failure_says() -> None:
    listen = "program.on_failure(lambda reason: print('told:', reason))\n"
    end = end_of(f"{listen}raise ValueError('refused: f4ke-key')", **{"HF_TOKEN": "f4ke-key"})
    assert "ValueError: refused: (redacted)" in end.stderr
    assert "ValueError: refused: (redacted)" in end.stdout
    assert "f4ke-key" not in end.stdout + end.stderr


def test_a_report_to_torchrun_that_cannot_be_written_keeps_the_exit_code(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing" / "error.json")
    end = end_of("raise DataError('empty', fix='give another')", TORCHELASTIC_ERROR_FILE=missing)
    assert end.returncode == DATA_ERROR
    assert "ERROR: empty" in end.stderr
    assert "torchrun's summary will lack this failure" in end.stderr


def test_a_failure_of_communication_without_a_message_is_one_of_a_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "raised_in_communication", lambda error: True)
    monkeypatch.setattr(program, "_REASON_S", 0.0)
    known = program._meaning(RuntimeError())
    assert isinstance(known, PeerError)
    assert known.found == "RuntimeError"


def test_memory_that_ran_out_is_no_bug() -> None:
    end = end_of("import torch\ntorch.empty(2**46, dtype=torch.uint8)")
    assert end.returncode == MACHINE_ERROR
    assert end.stderr.startswith("ERROR: memory ran out\n  found: ")
    assert "can't allocate memory" in end.stderr
    assert "Traceback" in end.stderr
