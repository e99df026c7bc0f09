"""Tests of megatron.peers.native_stacks, on processes that hang in C; it is compiled here."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.peers import native_stacks
from megatron.peers.native_stacks import Handlers, install, stacks_of
from megatron.peers.stacks import ProcessName
from tests.support.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[3]
START = """
import ctypes, os, signal, sys, threading, time
from pathlib import Path
from megatron.peers import native_stacks
native_stacks._LIBRARY = Path(sys.argv[1])
ASK = native_stacks._signals()[0]
"""
HANGS = """
native_stacks.install()
def hold_the_lock():
    library = ctypes.PyDLL(None)  # which keeps the interpreter's lock
    os.write(1, b"ready\\n")
    library.sleep(60)
    os.write(1, b"awake\\n")
    os.write(1, b"read %d\\n" % library.read(0, ctypes.create_string_buffer(1), 1))
hold_the_lock()
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("built") / native_stacks._LIBRARY.name
    compiler = [os.environ.get("CXX", "c++"), "-std=c++17", "-fPIC", "-shared"]
    checks = ["-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    made = subprocess.run(
        [*compiler, *checks, ROOT / "csrc/peers/native_stacks.cpp", "-o", path],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    return path


@contextmanager
def running(text: str, library: Path) -> Iterator["subprocess.Popen[str]"]:
    """Run a program that has imported the module, with the compiled library or without."""
    with subprocess.Popen(
        [sys.executable, "-c", START + text, library],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def until_it_sleeps(process: "subprocess.Popen[str]") -> None:
    """Wait until the kernel says that a process of one thread waits."""
    deadline = time.monotonic() + HANG_S
    while ProcessName.of(process.pid).state() != "sleeps":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def waiting_in(process: "subprocess.Popen[str]", function: str) -> str:
    """Ask for stacks until the process has come to a function of C; return them."""
    deadline = time.monotonic() + HANG_S
    while function not in (text := stacks_of(ProcessName.of(process.pid))):
        assert time.monotonic() < deadline, text
    return text


@pytest.fixture
def _names(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find names with the library that is compiled here."""
    functions = native_stacks._load(library)
    monkeypatch.setattr(native_stacks, "install", lambda: Handlers(-1, -1, functions))
    monkeypatch.setattr(native_stacks, "_PULSE_LIMIT_NS", 0)


@pytest.mark.usefixtures("_names")
def test_a_process_that_holds_the_interpreters_lock_shows_python_and_native_stacks(
    library: Path,
) -> None:
    with running(HANGS, library) as process:
        assert line_of(process) == "ready\n"
        until_it_sleeps(process)
        text = stacks_of(ProcessName.of(process.pid))
        assert re.search(r'^  File "<string>", line \d+ in hold_the_lock$', text, re.MULTILINE)
        assert f"thread {process.pid} (main):\n    clock_nanosleep (libc" in text
        assert "_PyEval" not in text
        assert "megatron_stacks" not in text
        assert line_of(process) == "awake\n", "a sleep is not restarted"
        # A call that reads is.
        for _ in range(3):
            waiting_in(process, "    read (libc")
        out, _ = process.communicate("x", timeout=HANG_S)
    assert (out, process.returncode) == ("read 1\n", 0)


@pytest.mark.usefixtures("_names")
def test_python_frames_of_a_process_whose_python_code_runs_are_not_read(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = """
native_stacks.install()
print("ready", flush=True)
while True:
    native_stacks.note_python_runs()
    time.sleep(0.05)
"""
    monkeypatch.setattr(native_stacks, "_PULSE_LIMIT_NS", HANG_S * 1e9)
    with running(text, library) as process:
        assert line_of(process) == "ready\n"
        text = waiting_in(process, "clock_nanosleep (libc")
    assert text.startswith("its Python code runs, so that its frames cannot be read")
    assert "  File " not in text


def test_without_the_library_python_stacks_remain(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(native_stacks, "install", lambda: Handlers(-1, -1, None))
    monkeypatch.setattr(native_stacks, "_PULSE_LIMIT_NS", 0)
    with running(HANGS, tmp_path / "missing.so") as process:
        assert line_of(process) == "ready\n"
        text = stacks_of(ProcessName.of(process.pid))
    assert "in hold_the_lock\n" in text
    assert text.endswith(f"\n{native_stacks._NOT_BUILT}")
    assert native_stacks.native_stacks() == native_stacks._NOT_BUILT


def test_a_process_shows_its_own_threads_while_the_lock_is_free(library: Path) -> None:
    text = """
native_stacks.install()
def deaf():
    signal.pthread_sigmask(signal.SIG_BLOCK, {ASK})
    heard.wait()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {ASK})
    idle.wait()
def look():
    time.sleep(0.1)
    print(native_stacks.native_stacks())
    heard.set()
    time.sleep(0.1)
    native_stacks._SHOWN_LIBRARIES = ("",)
    print("again", native_stacks.native_stacks(), sep="\\n", flush=True)
    os._exit(0)
heard, idle = threading.Event(), threading.Event()
for work in (deaf, look):
    threading.Thread(target=work, daemon=True).start()
while True:
    ctypes.CDLL(None).sleep(60)  # without the lock
"""
    with running(text, library) as process:
        out, _ = process.communicate(timeout=HANG_S)
    first, again = out.split("again\n")
    stack = f"thread {process.pid} (main):\n    clock_nanosleep (libc"
    assert process.returncode == 0, out
    assert stack in first
    assert first.count("thread ") == 1, "the others run neither our code nor torch's"
    assert stack in again
    assert again.count("thread ") == 3, "but the one that collects"


def test_a_process_that_has_no_handlers_is_not_signalled() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            named = ProcessName.of(process.pid)
            assert stacks_of(named) == "no stacks: it cannot be asked for them"
            time.sleep(0.1)
            assert process.poll() is None
        finally:
            process.kill()
    assert stacks_of(named).startswith("no stacks: ")


def test_a_stopped_process_is_not_asked(library: Path) -> None:
    with running(HANGS, library) as process:
        assert line_of(process) == "ready\n"
        process.send_signal(signal.SIGSTOP)
        named, deadline = ProcessName.of(process.pid), time.monotonic() + HANG_S
        while not named.is_stopped and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stacks_of(named) == "no stacks: it is stopped"


def test_a_signal_that_is_in_use_is_left_alone(library: Path) -> None:
    text = """
signal.signal(ASK, lambda *_: print("theirs"))
print(native_stacks.install(), native_stacks.native_stacks())
signal.raise_signal(ASK)
"""
    with running(text, library) as process:
        out, _ = process.communicate(timeout=HANG_S)
    assert out == "None no native stacks on this system\ntheirs\n"


def test_on_other_systems_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert install.__wrapped__() is None


@pytest.mark.parametrize("text", ["", "int megatron_stacks_write() { return 0; }"])
def test_a_library_of_other_source_is_not_used(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.c").write_text(text)
    subprocess.run(["cc", "-shared", "-o", "other.so", "other.c"], cwd=tmp_path, check=True)
    assert native_stacks._load(tmp_path / "other.so") is None


def test_few_frames_are_shown_and_equal_stacks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    own, frames = os.getpid(), list(range(1, 40))
    monkeypatch.setattr(native_stacks, "_SHOWN_LIBRARIES", ("",))
    stacks = [[own, *frames], [2**30, *frames], [2**30 + 1, *frames], [2**30 + 2, 9, 9]]
    written = "".join(f"{thread} {' '.join(map('{:x}'.format, at))}\n" for thread, *at in stacks)
    lines = native_stacks._native_text(own, f"{written}end\n").splitlines()
    assert lines[1:4] == [f"thread {own} (main):", "    0x2", "    0x2"], "a call, and its caller"
    assert lines[14] == f"thread {2**30}, {2**30 + 1} (has ended):"
    assert lines[27:] == [f"thread {2**30 + 2} (has ended):", "    0x9"]
