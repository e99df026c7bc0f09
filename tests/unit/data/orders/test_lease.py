"""A lock is held by one process, renewed while held, and taken over when its holder has ended."""

import errno
import os
import threading
import time
from pathlib import Path

import pytest

from megatron import log
from megatron.data.orders import lease
from megatron.data.orders.lease import LeaseTiming, leased, report_while, wait_while_leased
from megatron.errors import MachineError
from tests.support.deadlines import HANG_S

FAST = LeaseTiming(renew_s=0.02, lease_s=0.2, poll_s=0.01, log_every_s=0.05, give_up_s=20.0)
STALE = b'{"process": 7, "host": "elsewhere", "time": "then", "report_progress": 3}'


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    monkeypatch.setattr(log._OUTPUT, "warned", set())


def test_a_lock_says_its_holder_while_it_is_held_and_is_gone_afterwards(tmp_path: Path):
    path = tmp_path / "x.lock"
    with leased(path, "working", FAST):
        assert f'"process": {os.getpid()}' in path.read_text()
        first = path.read_bytes()
        time.sleep(0.3)
        assert path.read_bytes() != first, "it is renewed"
        assert len(path.read_bytes()) == len(first)
    assert list(tmp_path.iterdir()) == []


def test_an_error_inside_frees_the_lock(tmp_path: Path):
    with pytest.raises(ZeroDivisionError), leased(tmp_path / "x.lock", "working", FAST):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_second_holder_waits_for_the_first_however_long_its_lease(tmp_path: Path, capsys):
    path, order, held = tmp_path / "x.lock", [], threading.Event()

    def first():
        with leased(path, "working", FAST):
            held.set()
            time.sleep(0.6)  # three leases
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(HANG_S)
    with leased(path, "working", FAST):
        order.append("second")
    thread.join()
    assert order == ["first", "second"]
    output = capsys.readouterr()
    assert f"waiting for process {os.getpid()} on" in output.out
    assert output.err == "", "nothing was taken over"


@pytest.mark.parametrize(
    ("content", "holder"), [(STALE, "process 7 on elsewhere"), (b"", "an unknown process")]
)
def test_a_lock_that_nobody_renews_is_taken_over_and_that_is_said(
    tmp_path: Path, capsys, content, holder
):
    path = tmp_path / "x.lock"
    path.write_bytes(content)
    with leased(path, "working", FAST):
        assert f'"process": {os.getpid()}' in path.read_text()
    assert f"of {holder} was not renewed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_whoever_was_taken_over_leaves_the_lock_to_its_successor(tmp_path: Path):
    path = tmp_path / "x.lock"
    with leased(path, "working", FAST):
        path.unlink()
        path.write_bytes(STALE)
    assert path.read_bytes() == STALE
    path.unlink()
    with leased(path, "working", FAST):
        path.unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_renewed_at_the_last_moment_is_given_back(tmp_path: Path, capsys):
    path = tmp_path / "x.lock"
    path.write_bytes(b"renewed")
    lease._take_over(path, STALE, "working", 1.0)
    assert path.read_bytes() == b"renewed"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.lock"]
    assert capsys.readouterr().err == ""
    path.unlink()
    lease._take_over(path, STALE, "working", 1.0)  # another process was faster
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_cannot_be_given_back_is_said(tmp_path: Path, capsys, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    (tmp_path / "x.lock").write_bytes(b"renewed")
    lease._take_over(tmp_path / "x.lock", STALE, "working", 1.0)
    assert "may be done twice" in capsys.readouterr().err


def test_waiting_has_an_end_that_names_the_holder(tmp_path: Path):
    path = tmp_path / "x.lock"
    path.write_bytes(STALE)
    timing = LeaseTiming(lease_s=60.0, poll_s=0.01, give_up_s=0.1)
    with (
        pytest.raises(MachineError, match=r"waited too long .* is building") as raised,
        leased(path, "building", timing),
    ):
        pass
    assert "process 7 on elsewhere" in str(raised.value)
    assert path.read_bytes() == STALE


def test_whoever_waits_stops_when_the_work_is_done(tmp_path: Path):
    path = tmp_path / "x.lock"
    path.write_bytes(STALE)
    answers = iter([False, False, True])
    with leased(path, "building", LeaseTiming(poll_s=0.01), is_done=lambda: next(answers)):
        assert path.read_bytes() == STALE
    assert path.read_bytes() == STALE


def never():
    return False


def test_whoever_only_waits_returns_when_the_work_is_done_or_nobody_works(tmp_path: Path):
    timing = LeaseTiming(lease_s=0.2, poll_s=0.01, settle_s=0.1)
    path = tmp_path / "x.lock"
    path.write_bytes(STALE)
    answers = iter([False, False, True])
    wait_while_leased([path], "building", timing, is_done=lambda: next(answers))
    began = time.monotonic()
    wait_while_leased([path], "building", timing, is_done=never)
    assert time.monotonic() - began >= 0.2, "a lock that nobody renews, and then nothing"
    path.unlink()
    wait_while_leased([path], "building", timing, is_done=never)


def test_whoever_only_waits_does_so_while_the_lock_is_held(tmp_path: Path, capsys):
    path, order, held = tmp_path / "x.lock", [], threading.Event()

    def first():
        with leased(path, "working", FAST):
            held.set()
            time.sleep(0.6)
            order.append("first")

    thread = threading.Thread(target=first)
    thread.start()
    assert held.wait(HANG_S)
    timing = LeaseTiming(lease_s=0.2, poll_s=0.01, log_every_s=0.05, settle_s=0.05)
    wait_while_leased([tmp_path / "none", path], "working", timing, is_done=never)
    order.append("second")
    thread.join()
    assert order == ["first", "second"]
    assert f"waiting for process {os.getpid()} on" in capsys.readouterr().out
    timing = LeaseTiming(poll_s=0.01, give_up_s=0.1)
    with (
        leased(path, "working", FAST),
        pytest.raises(MachineError, match="waited too long"),
    ):
        wait_while_leased([path], "working", timing, is_done=never)


def test_a_full_disk_leaves_no_lock(tmp_path: Path, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    with (
        pytest.raises(OSError, match="No space left"),
        leased(tmp_path / "x.lock", "working", FAST),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_renewal_that_fails_is_said_once(tmp_path: Path, monkeypatch, capsys):
    real, count = os.pwrite, []

    def fail_later(*args):
        count.append(1)
        if len(count) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args)

    monkeypatch.setattr(os, "pwrite", fail_later)
    with leased(tmp_path / "x.lock", "working", FAST):
        time.sleep(0.2)
    assert capsys.readouterr().err.count("a lock cannot be renewed") == 1


def test_a_file_that_vanishes_is_no_content_and_another_error_is_one(tmp_path: Path):
    assert lease._read(tmp_path / "none") is None
    with pytest.raises(IsADirectoryError):
        lease._read(tmp_path)


def test_long_work_is_said_every_so_often(capsys):
    with report_while("counting", 0.05):
        time.sleep(0.3)
    assert "still counting, for 0 s now" in capsys.readouterr().out
    reports = []
    with report_while("counting", 0.05, reports.append):
        time.sleep(0.3)
    assert reports[0] == "counting, for 0 s now"
    assert capsys.readouterr().out.count("still counting") == len(reports)
    with report_while("counting", 60.0):
        pass
    assert capsys.readouterr().out == ""
