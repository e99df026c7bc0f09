"""Tests of megatron.peers.stacks."""

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from megatron.peers import stacks
from megatron.peers.stacks import (
    COMMUNICATION,
    ProcessName,
    main_thread_place,
    main_thread_stack,
    main_thread_waits_for,
    raised_in_communication,
    thread_stacks,
)
from tests.architecture.test_homes import COMMUNICATION_HOMES
from tests.support.deadlines import HANG_S

T = TypeVar("T")


def seen_from_another_thread(look: Callable[[], T]) -> list[T]:
    seen: list[T] = []

    def wait_here(thread: threading.Thread) -> None:
        thread.start()
        thread.join()

    wait_here(threading.Thread(target=lambda: seen.append(look())))
    return seen


def test_the_stack_of_the_main_thread_is_seen_from_another() -> None:
    (seen,) = seen_from_another_thread(main_thread_stack)
    assert "in wait_here\n    thread." in seen
    assert seen.count("  File ") == 8


def test_the_place_is_a_line_of_ours_and_what_it_called() -> None:
    (place,) = seen_from_another_thread(main_thread_place)
    assert "peers/test_stacks.py:" in place
    assert "in wait_here, which called " in place


def test_all_threads_are_shown_and_the_main_thread_first() -> None:
    waiting = threading.Event()
    worker = threading.Thread(target=lambda: waiting.wait(HANG_S), name="a worker")
    worker.start()
    (seen,) = seen_from_another_thread(thread_stacks)
    waiting.set()
    worker.join()
    assert seen.startswith("thread MainThread:")
    assert "thread a worker:" in seen


def test_a_rank_waits_where_its_stack_leads_through_a_module_that_communicates(
    tmp_path: Path,
) -> None:
    assert seen_from_another_thread(main_thread_waits_for) == [None]
    module = tmp_path / COMMUNICATION[0]  # the file's name alone decides
    module.parent.mkdir(parents=True)
    module.write_text("def wait(block):\n    return block()\n")
    wait = runpy.run_path(str(module))["wait"]
    (found,) = wait(lambda: seen_from_another_thread(main_thread_waits_for))
    assert found == "other ranks, in wait (mpu/collectives.py:2)"


def test_an_error_of_a_module_that_communicates_is_one_of_communication(tmp_path: Path) -> None:
    module = tmp_path / COMMUNICATION[0]
    module.parent.mkdir(parents=True)
    module.write_text("def fail(error):\n    raise error\n")
    fail = runpy.run_path(str(module))["fail"]
    for error, expected in ((RuntimeError("closed by peer"), True), (ValueError("ours"), False)):
        with pytest.raises(type(error)) as caught:
            fail(error)
        assert raised_in_communication(caught.value) == expected


def test_every_home_of_communication_is_a_place_to_wait() -> None:
    assert set(COMMUNICATION_HOMES) <= set(COMMUNICATION)


def test_an_error_of_communication_is_told_from_others() -> None:
    def wrong() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError) as caught:
        wrong()
    assert not raised_in_communication(caught.value)


def test_a_process_is_known_by_its_pid_and_its_start() -> None:
    own = ProcessName.own()
    assert own.pid == os.getpid()
    assert own.is_here
    assert not own.has_ended
    assert own._replace(started=own.started + 1).has_ended, "another one with its pid"
    elsewhere = own._replace(host="elsewhere 1 2")
    assert not elsewhere.is_here
    assert not elsewhere.has_ended
    assert elsewhere.state() is None
    assert str(elsewhere) == f"process {own.pid} on elsewhere"


def test_a_stopped_process_is_said_to_be_stopped() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        named = ProcessName(stacks._host(), child.pid, stacks._stat(child.pid)[1])
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + HANG_S
        while named.state() != "is stopped (SIGSTOP)" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert named.state() == "is stopped (SIGSTOP)"
        assert named.is_stopped
        assert not ProcessName.own().is_stopped
    finally:
        child.kill()
        child.wait()
    assert named.has_ended
    assert named.state() == "has ended"
