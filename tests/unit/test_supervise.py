"""Tests of megatron.supervise, with ranks that are scripts of a few lines."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron import log, supervise
from megatron.checkpoint.folder import run_folder
from megatron.errors import FIX_OF_MEMORY, ConfigError, MachineError, NumericsError, PeerError
from megatron.peers.activity import START, STEP
from megatron.peers.goodput import Account
from megatron.supervise import (
    End,
    Job,
    SupervisedError,
    Supervisor,
    _latest_iteration,
    cause_of,
    job_of,
)
from tests.architecture.source_tree import ROOT
from tests.support.deadlines import HANG_S

RANK = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
COUNT = "with open(f'starts-{rank}', 'a') as file: file.write('x')\n"
STARTS = "starts = len(pathlib.Path(f'starts-{rank}').read_text())\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(supervise, "_OTHERS_S", 0.3)


def job(text: str, *, ranks: int = 2, max_restarts: int = 2, grace_s: float = HANG_S) -> Job:
    """A job whose ranks are scripts that count their starts."""
    Path("rank.py").write_text(RANK + COUNT + STARTS + text)
    return Job(("rank.py",), ranks, max_restarts, grace_s, save=None)


def starts(rank: int = 0) -> int:
    return len(Path(f"starts-{rank}").read_text())


def test_ranks_that_end_well_are_started_once() -> None:
    Supervisor(job("assert os.environ['WORLD_SIZE'] == '2' and os.environ['MASTER_PORT']")).run()
    assert (starts(0), starts(1)) == (1, 1)


@pytest.mark.parametrize("how", ["sys.exit(75)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_what_may_pass_is_started_again_on_all_ranks(how: str) -> None:
    Supervisor(job(f"if rank == 1 and starts < 3: {how}\nif starts < 3: time.sleep(60)\n")).run()
    assert (starts(0), starts(1)) == (3, 3)


def test_a_kill_by_the_kernel_is_told_from_others_by_its_counter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kill = "if starts < 3: os.kill(os.getpid(), signal.SIGKILL)\n"
    first = "if starts == 1: pathlib.Path('kills').write_text('')\n"
    monkeypatch.setattr("megatron.host.kills_for_memory", lambda: 7 + Path("kills").exists())
    told: list[str] = []
    monkeypatch.setattr(log, "warning", told.append)
    Supervisor(job(first + kill, ranks=1)).run()
    assert [text.splitlines() for text in told[-2:]] == [
        [
            "rank 0 was ended by SIGKILL: killed by the kernel because memory ran out; start 2: "
            "no checkpoint",
            f"  fix: {FIX_OF_MEMORY}",
        ],
        ["rank 0 was ended by SIGKILL; start 3: no checkpoint"],
    ]


def test_another_end_is_not_the_kernel_s_whatever_its_counter_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = iter(range(100))
    monkeypatch.setattr("megatron.host.kills_for_memory", lambda: next(counts))
    with pytest.raises(SupervisedError) as caught:
        Supervisor(job("os.kill(os.getpid(), signal.SIGINT)", ranks=1)).run()
    assert caught.value.found == "rank 0 was ended by SIGINT; no checkpoint"
    with pytest.raises(SupervisedError) as caught:
        Supervisor(job("os.kill(os.getpid(), 9)", ranks=1, max_restarts=0)).run()
    assert caught.value.fix == f"{FIX_OF_MEMORY}, or raise --max-restarts"


def test_what_is_wrong_for_good_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "_OTHERS_S", HANG_S)  # the other rank may start much later
    wrong = job(f"sys.exit({NumericsError.exit_code} if rank else {PeerError.exit_code})")
    with pytest.raises(SupervisedError, match="ended for good") as caught:
        Supervisor(wrong).run()
    assert caught.value.exit_code == NumericsError.exit_code
    assert "rank 1 ended with exit code 67; no checkpoint" in str(caught.value.found)
    assert starts() == 1


def test_starts_that_lead_nowhere_come_to_an_end() -> None:
    with pytest.raises(SupervisedError, match="again and again without a new") as caught:
        Supervisor(job("sys.exit(75)")).run()
    assert caught.value.exit_code == MachineError.exit_code
    assert starts() == 3


def test_starts_that_lead_to_a_new_checkpoint_are_not_counted() -> None:
    latest = iter(range(100))
    Supervisor(job("sys.exit(0 if starts == 6 else 75)"), latest=lambda: next(latest)).run()
    assert starts() == 6


def started(job: Job) -> "subprocess.Popen[bytes]":
    """Run a job in a supervisor of its own; return once all ranks have started."""
    words = ["--max-restarts", str(job.max_restarts), "--grace", str(job.grace_s), *job.words]
    process = subprocess.Popen(
        [sys.executable, "-m", "megatron.supervise", "--nproc-per-node", str(job.ranks), *words],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + HANG_S
    while not all(Path(f"ready-{rank}").exists() for rank in range(job.ranks)):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


READY = "pathlib.Path(f'ready-{rank}').write_text(str(os.getpid()))\n"


def pids(ranks: int) -> list[int]:
    return [int(Path(f"ready-{rank}").read_text()) for rank in range(ranks)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(all_pids: list[int]) -> bool:
    deadline = time.monotonic() + HANG_S
    while any(map(is_running, all_pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_running, all_pids))


def test_a_signal_to_end_reaches_the_ranks_and_is_no_failure() -> None:
    obeys = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n" + READY + "time.sleep(60)\n"
    process = started(job(obeys))
    process.terminate()
    assert process.wait(HANG_S) == 0
    assert starts() == 1
    assert gone(pids(2))


def test_ranks_that_do_not_obey_are_killed_and_not_started_again() -> None:
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "time.sleep(60)\n"
    process = started(job(ignores, grace_s=0.3))
    process.terminate()
    _, errors = process.communicate(timeout=HANG_S)
    assert process.returncode == 128 + signal.SIGKILL
    assert b"ranks still run 0.3 s after the signal: killed" in errors
    assert b"the run ended after a signal to end" in errors
    assert starts() == 1
    assert gone(pids(2))


def test_no_rank_outlives_its_supervisor() -> None:
    process = started(job(READY + f"time.sleep({2 * HANG_S})\n"))
    process.kill()
    process.communicate(timeout=HANG_S)
    assert gone(pids(2))


def test_processes_that_a_rank_started_end_with_it() -> None:
    forks = (
        "child = os.fork()\n"
        f"if child == 0: time.sleep({2 * HANG_S})\n"
        "pathlib.Path(f'child-{rank}').write_text(str(child))\n"
        "sys.exit(67 if rank else 0)\n"
    )
    with pytest.raises(SupervisedError):
        Supervisor(job(forks)).run()
    assert gone([int(Path(f"child-{rank}").read_text()) for rank in (0, 1)])


def test_a_rank_that_is_stopped_is_killed_and_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervise, "_STOPPED_S", 0.2)
    Supervisor(job("if starts == 1: os.kill(os.getpid(), signal.SIGSTOP)\n", ranks=1)).run()
    assert starts() == 2


@pytest.mark.parametrize(
    ("statuses", "rank"),
    [((0, 0), None), ((76, 75), 1), ((76, 76), 0), ((0, -9), 1), ((67, 75), 0)],
)
def test_the_cause_is_the_first_end_that_no_other_caused(
    statuses: tuple[int, ...], rank: int | None
) -> None:
    cause = cause_of([End(*each) for each in enumerate(statuses)])
    assert (cause and cause.rank) == rank


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("", "no program is named"),
        ("--nproc-per-node 0 a.py", "--nproc-per-node makes no sense"),
        ("--max-restarts -1 a.py", "--max-restarts makes no sense"),
        ("--grace 0 a.py", "--grace makes no sense"),
        ("a.py --save there", "would begin anew"),
        ("a.py --save there --load elsewhere", "would begin anew"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        job_of(words.split())


def test_the_flags_of_the_program_are_its_own() -> None:
    words = [
        "--nproc-per-node",
        "4",
        "--",
        "a.py",
        "--grace",
        "3",
        "--save",
        "there",
        "--load",
        "there",
    ]
    assert job_of(words) == Job(tuple(words[3:]), 4, 3, 30.0, "there")


def test_accounts_that_are_kept_count_starts_of_earlier_commands() -> None:
    there = Path("runs", "accounts")
    kept = job("time.sleep(0.01)", ranks=1)._replace(accounts=str(there))
    Supervisor(kept).run()
    assert list(there.iterdir()) == []  # these ranks have written none
    earlier = time.time() - 1000
    seconds = {STEP: 500.0, START: 100.0}
    account = Account(earlier, earlier + 700, 0, 50, seconds)
    (there / "1.json").write_text(json.dumps(account._asdict()))
    told: list[str] = []
    with patch.object(log, "info", told.append):
        Supervisor(kept).run()
    assert len(told) == 1
    found = re.match(r"goodput (.*)% of (.*) s in 1 start; seconds: steps kept 500", told[0])
    assert found is not None
    share, of_seconds = map(float, found.groups())
    assert 1000 <= of_seconds < 1010  # and what this start took
    assert share == pytest.approx(100 * 500 / of_seconds, abs=0.1)
    assert (there / "1.json").exists()


def test_accounts_that_cannot_be_kept_are_an_error_before_the_first_start() -> None:
    Path("file").write_text("")
    with pytest.raises(ConfigError, match="the folder for accounts of the time cannot be made"):
        Supervisor(job("pass")._replace(accounts="file/accounts")).run()
    assert not Path("starts-0").exists()


def test_a_local_checkpoint_counts_as_one_that_a_start_led_to(tmp_path: Path) -> None:
    save, local = tmp_path / "save", tmp_path / "memory"
    words = ["--", "program.py", "--save", str(save), "--load", str(save)]
    job = job_of([*words, "--non-persistent-local-ckpt-dir", str(local)])
    assert job.local == str(local)
    assert _latest_iteration(job) is None
    state = local / run_folder.run_id(save) / "rank-00000-of-00001" / "iter_0000007"
    state.mkdir(parents=True)
    assert _latest_iteration(job) == 7
    (save / "iter_0000009").mkdir()
    assert _latest_iteration(job) == 9
    assert _latest_iteration(job_of(words)) == 9
