"""Stacks of native code, and both kinds of stacks of a process that cannot print its own.

A process that holds the interpreter's lock runs no Python code, so signal handlers write where it
is: `faulthandler` Python frames, csrc/peers native ones. They write into a file in memory, which
other processes of the machine find in /proc. What a reader would get wrong: the signals end a
process without the handlers, and `faulthandler` may crash one whose Python code runs, so neither is
asked.
"""

import bisect
import contextlib
import ctypes
import faulthandler
import fcntl
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from megatron import log
from megatron.peers.stacks import FRAMES_SHOWN, ProcessName

_LIBRARY = Path(__file__).with_name("_native_stacks.so")
_NOT_BUILT = "no native stacks: they need the compiled code (python setup.py build_ext --inplace)"
_OUTPUT = "megatron-stacks"
# Signals that nothing else uses, counted from the first real-time one: to ask for native stacks,
# for both kinds, and faulthandler's own, which the handler of the second one sends.
_NATIVE, _BOTH, _PYTHON = 7, 8, 9
_PULSE_BYTES = 21  # at the start of the file: when Python code ran last, by the monotonic clock
_PULSE_LIMIT_NS = 1_500_000_000  # three times as long as the thread that notes it pauses
_POLL_S, _POLLS = 0.02, 75  # 1.5 s; the handler stops after one
_QUIET_POLLS = 10  # twice as long as the handler waits for a thread
_NATIVE_FRAMES_SHOWN, _STACKS_SHOWN = 12, 12
_NATIVE_STACK = re.compile(r"^(\d+)((?: [0-9a-f]+)+)\n", re.MULTILINE)  # a thread, addresses
_LONGEST_NAME = 100
_INTERPRETER = "_PyEval_EvalFrame"  # frames from here on are those of Python code
# In whose code a thread, other than the main thread, is worth to be shown.
_SHOWN_LIBRARIES = ("/torch/", "/megatron/", "nccl", "cuda")


class Handlers(NamedTuple):
    """The handlers of this process: the file that they write, and the library of the native one.

    Attributes:
        output: appends to the file.
        pulse: writes at its start.
        library: None where it is not built.
    """

    output: int
    pulse: int
    library: ctypes.CDLL | None


@lru_cache(maxsize=1)
def install() -> Handlers | None:
    """Let this process be asked for its stacks, for the rest of its life.

    Returns None, and changes nothing, on other systems than Linux, and where a signal is in use.
    """
    if sys.platform != "linux":
        return None
    native, both, python = _signals()
    try:
        if any(_catches(os.getpid(), number) for number in (native, both, python)):
            raise OSError(f"one of the signals {native}, {both} and {python} is not free")
        output = os.memfd_create(_OUTPUT)
        pulse = os.open(f"/proc/self/fd/{output}", os.O_RDWR | os.O_CLOEXEC)
        fcntl.fcntl(output, fcntl.F_SETFL, os.O_APPEND)
    except OSError as error:
        log.debug(f"this process cannot be asked for its stacks: {error}")
        return None
    library = _load(_LIBRARY)
    if library is not None and library.megatron_stacks_install(output, native, both, python) != 0:
        library = None
    handlers = Handlers(output, pulse, library)
    _write_pulse(handlers)
    faulthandler.register(both if library is None else python, file=output, all_threads=True)
    return handlers


def note_python_runs() -> None:
    """Note that Python code of this process runs; call it from a thread that waits for nothing."""
    handlers = install()
    if handlers is not None:
        with contextlib.suppress(OSError):  # something closed all files of this process
            _write_pulse(handlers)


def native_stacks() -> str:
    """Return the native stacks of this process's threads, or why there are none."""
    handlers = install()
    if handlers is None:
        return "no native stacks on this system"
    library = handlers.library
    if library is None:
        return _NOT_BUILT
    found: list[str] = []

    def collect() -> None:
        text = _written(Path(f"/proc/self/fd/{handlers.output}"), library.megatron_stacks_write)
        found.append(_native_text(os.getpid(), text))

    # Finding a name waits for a thread that loads a library, so that this thread may never end.
    thread = threading.Thread(target=collect, name="native-stacks", daemon=True)
    thread.start()
    thread.join(_POLL_S * _POLLS)
    return found[0] if found else "no native stacks: finding them takes too long"


def stacks_of(process: ProcessName) -> str:
    """Return Python and native stacks of another process of this machine, or why there are none."""
    if process.is_stopped:
        return "no stacks: it is stopped"
    pid, (native, both, _) = process.pid, _signals()
    try:
        outputs = [path for path in Path(f"/proc/{pid}/fd").iterdir() if _is_output(path)]
        if not outputs or not _catches(pid, both) or not process.is_here:
            return "no stacks: it cannot be asked for them"
        has_native, runs_python = _catches(pid, native), _runs_python(outputs[0])
        first = "its Python code runs, so that its frames cannot be read from outside"
        if has_native or not runs_python:
            asked = native if runs_python else both
            written = _written(outputs[0], lambda: os.kill(pid, asked))
            if not written:
                return "no stacks: it does not answer"
            if not runs_python:
                first = _python_text(written)
        return f"{first}\n{_native_text(pid, written) if has_native else _NOT_BUILT}"
    except (OSError, ValueError) as error:  # it ended meanwhile, or belongs to another user
        return f"no stacks: {error}"


def _load(path: Path) -> ctypes.CDLL | None:
    """Return the library; None where it is not built, or was built from other source."""
    try:
        library = ctypes.CDLL(str(path))
        parameters = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
        library.megatron_stacks_name.argtypes = parameters
        for function in (library.megatron_stacks_install, library.megatron_stacks_write):
            function.restype = ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


def _signals() -> tuple[int, int, int]:
    first = signal.SIGRTMIN
    return first + _NATIVE, first + _BOTH, first + _PYTHON


def _catches(pid: int, number: int) -> bool:
    """Return whether a process has a handler for a signal."""
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _is_output(path: Path) -> bool:
    try:
        return os.readlink(path).startswith(f"/memfd:{_OUTPUT} ")
    except FileNotFoundError:  # closed meanwhile
        return False


def _write_pulse(handlers: Handlers) -> None:
    os.pwrite(handlers.pulse, f"{time.monotonic_ns():020}\n".encode(), 0)


def _runs_python(output: Path) -> bool:
    """Return whether Python code of a process runs; wait until that is known."""
    first = _read_pulse(output)
    while time.monotonic_ns() - first < _PULSE_LIMIT_NS:
        if _read_pulse(output) != first:
            return True
        time.sleep(_POLL_S)
    return False


def _read_pulse(output: Path) -> int:
    with open(output, "rb") as file:
        return int(file.read(_PULSE_BYTES))


def _written(output: Path, ask: Callable[[], object]) -> str:
    """Ask for stacks; return what handlers wrote until the end, or until they write no more."""
    with open(output, "r+b", buffering=0) as file:
        file.truncate(_PULSE_BYTES)
        ask()
        text, quiet = b"", 0
        for _ in range(_POLLS):
            time.sleep(_POLL_S)
            file.seek(_PULSE_BYTES)
            before, text = text, file.read()
            quiet = quiet + 1 if text and text == before else 0
            if text.endswith(b"end\n") or quiet == _QUIET_POLLS:
                break
    return text.decode(errors="replace")


def _python_text(written: str) -> str:
    """Return the innermost frames of each thread, but for the threads of this package."""
    text = _NATIVE_STACK.sub("", written).removesuffix("end\n")
    threads = [thread for thread in text.split("\n\n") if "/megatron/peers/" not in thread]
    shown = [line for each in threads for line in each.strip().splitlines()[: 1 + FRAMES_SHOWN]]
    return "\n".join(["Python code, innermost frame first:", *shown])


class _Libraries:
    """The files that are mapped into the memory of a process."""

    def __init__(self, pid: int) -> None:
        self.starts: dict[str, int] = {}
        self._spans: list[tuple[int, int, str]] = []
        for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
            span, *_, path = line.split(maxsplit=5)
            if path.startswith("/"):
                start, end = (int(number, 16) for number in span.split("-"))
                self.starts.setdefault(path, start)
                self._spans.append((start, end, path))

    def file_of(self, address: int) -> str | None:
        """Return the path of the file at an address."""
        at = bisect.bisect(self._spans, address, key=lambda span: span[0]) - 1
        _, end, path = self._spans[at]
        return path if at >= 0 and address < end else None


def _native_text(pid: int, written: str) -> str:
    """Return the stacks that the handler wrote with their names, equal ones together."""
    handlers = install()
    there, here = _Libraries(pid), _Libraries(os.getpid())
    threads: dict[tuple[str, str], list[str]] = {}  # by title and stack
    for number, words in _NATIVE_STACK.findall(written):
        thread, addresses = int(number), [int(word, 16) for word in words.split()]
        files = [there.file_of(address) for address in addresses]
        own = (file is not None and file.endswith(f"/{_LIBRARY.name}") for file in files)
        # First the handler, then the frame that the kernel puts between it and what it interrupted.
        first = 1 + sum(itertools.takewhile(bool, own))
        inner = list(zip(addresses, files, strict=True))[first:]
        is_shown = any(part in (file or "") for _, file in inner for part in _SHOWN_LIBRARIES)
        if thread != pid and not is_shown:
            continue
        lines: list[str] = []
        for address, file in inner[:_NATIVE_FRAMES_SHOWN]:
            # A return address may be that of the next function.
            name = _name(address - bool(lines), file, there, here, handlers)
            if name.startswith(_INTERPRETER):
                break
            lines.append(f"    {name}\n")
        threads.setdefault((_title(pid, thread), "".join(lines)), []).append(number)
    shown = [
        f"thread {', '.join(numbers)} ({title}):\n{text}"
        for (title, text), numbers in list(threads.items())[:_STACKS_SHOWN]
    ]
    if not shown:
        return "no native stacks: no answer"
    return "".join(["native code, innermost frame first:\n", *shown]).rstrip()


def _name(
    address: int, file: str | None, there: _Libraries, here: _Libraries, handlers: Handlers | None
) -> str:
    """Return the function at an address of a process, found in the same file of this process."""
    if file is None:
        return f"{address:#x}"
    offset, library = address - there.starts[file], Path(file).name
    if handlers is not None and handlers.library is not None and file in here.starts:
        text = ctypes.create_string_buffer(1 + _LONGEST_NAME)
        at = here.starts[file] + offset
        if handlers.library.megatron_stacks_name(at, text, len(text)):
            return f"{text.value.decode(errors='replace')} ({library})"
    return f"{library}+{offset:#x}"


def _title(pid: int, thread: int) -> str:
    if thread == pid:
        return "main"
    try:
        return Path(f"/proc/{pid}/task/{thread}/comm").read_text(errors="replace").strip()
    except OSError:
        return "has ended"
