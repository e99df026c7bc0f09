"""A Python that has imported torch already: it forks programs, which so start in milliseconds.

`python -m tests.support.warm_python SOCKET MODULE ...` imports the modules and listens. Whoever
connects sends a `Program` as JSON, reads its process id and then its exit status, a line each. A
forked program has a session, a working folder, an environment and an output of its own, and ends as
any interpreter does, but for giving its memory back. What it does not have is a fresh start: what
starting itself does (import order, time, settings of the interpreter) is for programs that are
started without this. What a reader would get wrong: all processes of a test run share two servers,
one with DeepSpeed and one without, which the first to need one starts; a server ends with the
process that owns its folder, by the end of its stdin.
"""

import atexit
import ctypes
import fcntl
import gc
import importlib
import importlib.util
import json
import os
import runpy
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ROOT = Path(__file__).resolve().parents[2]
READY_WITHIN_S = 120.0  # torch's import, on a machine with much else to do

# What programs and ranks of this repository import, in the order of what takes longest.
PRELOAD = (
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which the first optimizer of a process imports, in seconds
    "torch.utils.tensorboard",
    "torch.distributed.launcher.api",
    "torch.profiler._cupti_monitor",
    "pytest",
    "megatron.training",
    "megatron.data.loading.gpt_batch",
    "megatron.data.loading.bert_batch",
    "megatron.engine.datasets",
    "megatron.model.bert_model",  # operators are registered in 0.2 s
    "megatron.model.gpt_model",
    "megatron.tokenizer.plain",
    "pretrain_bert",
    "pretrain_gpt",
    "pretrain_prefix_lm",
    "pretrain_t5",
    "pretrain_ict",
    "pretrain_vit",
    "tests.support.call",
    "tests.support.ranks",
    "tests.support.tiny",
    "sklearn.metrics",  # of tasks
    "scipy.stats",
)
# What converters come to, in a second.
PRELOAD_TOOLS = ("transformers",)
# DeepSpeed takes seconds to import, and as many again when it first makes an engine.
PRELOAD_DEEPSPEED = (
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_repack",
    "deepspeed.ops.triton_ops",
    "deepspeed.runtime.engine",
    "deepspeed.runtime.pipe.engine",
    "deepspeed.runtime.bf16_optimizer",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "megatron.engine.deepspeed.engine",
    "megatron.engine.deepspeed.pipe_engine",
)


class Program(NamedTuple):
    """What to run: the words after `python`, where its output goes and its input comes from."""

    words: list[str]
    cwd: str
    environment: dict[str, str]
    out: str
    err: str
    input: str = os.devnull


class WarmProcess:
    """A program forked by the server, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, program: Program, *, deepspeed: bool = False) -> None:
        self.args = program.words
        self.returncode: int | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server_folder(deepspeed) / "socket"))
        self._socket.sendall(json.dumps(program).encode() + b"\n")
        self._lines = self._socket.makefile("r")
        self.pid = int(self._lines.readline())

    def fileno(self) -> int:
        """Return a descriptor that can be read from once the process has ended."""
        return self._socket.fileno()

    def poll(self) -> int | None:
        """Return its status if it has ended: minus the signal's number when a signal ended it."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """Return its status; subprocess.TimeoutExpired if it does not end in time."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._lines.readline())
            self._lines.close()
            self._socket.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it may end meanwhile
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send it SIGKILL."""
        self.send_signal(signal.SIGKILL)


def can_fork(words: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Whether a program is Python's with no settings of the interpreter: a script, or a module."""
    settings = any(name.startswith("PYTHON") and name != "PYTHON" for name in environment)
    if settings or len(words) < 2 or words[0] != sys.executable:
        return False
    return words[1] == "-m" or not words[1].startswith("-")


def python_that_forks(*, deepspeed: bool = False) -> dict[str, str]:
    """Return variables with which a launcher or a script takes its `python` from the server."""
    python = str(server_folder(deepspeed) / "python")
    return {"PYTHON": python, "PYTHON_EXEC": python, _CHILDREN: python}


_CHILDREN = "WARM_PYTHON"  # what a forked program takes for `sys.executable`


def use_servers(folder: Path) -> None:
    """Take programs from the servers in a folder that another process owns."""
    _FOLDERS[:] = [folder]


def servers() -> Path:
    """Return the folder of the servers; this process owns it unless `use_servers` named one."""
    if not _FOLDERS:
        folder = Path(tempfile.mkdtemp(prefix="warm-python-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.mkfifo(folder / _LIFE)
        # The descriptor stays open as long as this process runs.
        os.open(folder / _LIFE, os.O_RDWR)
        _FOLDERS.append(folder)
    return _FOLDERS[0]


_FOLDERS: list[Path] = []
_LIFE = "life"  # the stdin of servers, which ends when the owner of their folder does


@cache
def server_folder(deepspeed: bool) -> Path:
    """Return the folder of a running server, which holds its socket and a `python`.

    The first process of the test run that asks for a server starts it.
    """
    folder = servers() / ("deepspeed" if deepspeed else "plain")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            _start_server(folder, [*PRELOAD, *(PRELOAD_DEEPSPEED if deepspeed else PRELOAD_TOOLS)])
    return folder


def _start_server(folder: Path, modules: Sequence[str]) -> None:
    made = folder.with_suffix(".made")
    made.mkdir()
    python, path = made / "python", folder / "socket"
    client = shlex.join([sys.executable, "-SE", str(Path(__file__).with_name("warm_client.py"))])
    python.write_text(f'#!/bin/sh\nexec {client} {shlex.quote(str(path))} "$@"\n')
    python.chmod(0o755)
    listens, ready = os.pipe()
    # As a program of a user without CUDA: a machine that has it runs the same tests.
    fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "-m", "tests.support.warm_python", str(made / "socket"), str(ready)]
    with open(folder.parent / _LIFE, "rb") as life:
        server = subprocess.Popen(
            [*words, *modules],
            cwd=ROOT,
            env=os.environ | fixed,
            stdin=life,
            stdout=subprocess.DEVNULL,
            pass_fds=[ready],
            start_new_session=True,
        )
    os.close(ready)
    _SERVERS.append(server)
    with selectors.DefaultSelector() as selector, open(listens, "rb") as pipe:
        selector.register(pipe, selectors.EVENT_READ)
        assert selector.select(READY_WITHIN_S), "the server of programs is not ready"
        assert pipe.read(1), "the server of programs has ended"
    made.rename(folder)


_SERVERS: list[subprocess.Popen[bytes]] = []  # or they would be waited for when forgotten


def serve(path: str, ready: int, modules: Sequence[str]) -> Program:
    """Fork a process for every `Program` that arrives; returns in the forked one, with its own."""
    for name in modules:
        if importlib.util.find_spec(name) is not None:  # other versions lack private modules
            importlib.import_module(name)
    _name_no_methods()
    gc.collect()
    gc.freeze()  # or every collection of a child would copy the pages of all modules
    _join_pages()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(ready, b"1")
    os.close(ready)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ, _accept)
    selector.register(sys.stdin, selectors.EVENT_READ, partial(_leave, Path(path).parents[1]))
    while True:
        for key, _ in selector.select():
            program: Program | None = key.data(selector, key.fileobj)
            if program is not None:
                return program


def _join_pages() -> None:
    """Join the pages of this process to large ones, where the kernel can.

    Otherwise a fork copies an entry for each small page, and its end frees them: 16 ms of a core.
    """
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, _, *name = line.split(maxsplit=5)
        if "w" in rights and name in ([], ["[heap]"]):
            start, end = (int(at, 16) for at in place.split("-"))
            for at in range(-(-start // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
                madvise(at, _LARGE, _MADV_COLLAPSE)


_LARGE = 2 << 20
_MADV_COLLAPSE = 25  # of Linux 6.1; an older one refuses it, and pages stay as they are


def _name_no_methods() -> None:
    """Let torchrun's events go without the name of the method that records them.

    It looks for the source of every frame of its stack in every module: 1.6 s of a launch.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: "unnamed"


def _accept(selector: selectors.BaseSelector, listener: socket.socket) -> Program | None:
    connection, _ = listener.accept()
    descriptor = connection.fileno()
    with connection.makefile("r") as lines:
        program = Program(*json.loads(lines.readline()))
    pid = os.fork()
    if not pid:
        # Nothing of the server stays open in a program.
        for key in list(selector.get_map().values()):
            if key.fileobj is not sys.stdin:
                os.close(key.fd)
        selector.close()
        for other in (connection, *_RUNNING.values()):
            other.detach()
        os.close(descriptor)
        return program
    _RUNNING[pid] = connection
    with suppress(OSError):
        connection.sendall(f"{pid}\n".encode())
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, partial(_tell, pid))
    selector.register(connection, selectors.EVENT_READ, partial(_end, pid))
    return None


_RUNNING: dict[int, socket.socket] = {}  # process ids, and the receivers of their status


def _tell(pid: int, selector: selectors.BaseSelector, handle: int) -> None:
    selector.unregister(handle)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    connection = _RUNNING.pop(pid)
    with suppress(KeyError):
        selector.unregister(connection)
    with suppress(OSError), connection:  # its test may have ended
        connection.sendall(f"{status}\n".encode())


def _end(pid: int, selector: selectors.BaseSelector, connection: socket.socket) -> None:
    """Kill a program whose end no process waits for."""
    if pid in _RUNNING:
        selector.unregister(connection)
        os.kill(pid, signal.SIGKILL)


def _leave(servers: Path, selector: selectors.BaseSelector, stdin: Any) -> NoReturn:
    shutil.rmtree(servers, ignore_errors=True)  # their owner may have been killed
    os._exit(0)


def run(program: Program) -> None:
    """Be the program: as the interpreter does it after its own start."""
    os.setsid()
    os.chdir(program.cwd)
    for path, descriptor, flags in (
        (program.input, 0, os.O_RDONLY),
        (program.out, 1, os.O_WRONLY | os.O_APPEND),
        (program.err, 2, os.O_WRONLY | os.O_APPEND),
    ):
        opened = os.open(path, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(program.environment)
    sys.executable = program.environment.get(_CHILDREN, sys.executable)
    if program.words[0] == "-m":
        _, module, *sys.argv[1:] = program.words
        sys.path[0] = program.cwd
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif program.words[0] == "-c":
        _, code, *sys.argv[1:] = program.words
        sys.path[0] = program.cwd
        exec(code, {"__name__": "__main__"})  # noqa: S102
    else:
        sys.argv[:] = program.words
        sys.path[0] = str(Path(program.words[0]).resolve().parent)
        runpy.run_path(program.words[0], run_name="__main__")


def leave(program: Program) -> NoReturn:
    """Be the program, and end as the interpreter does, but for giving its memory back.

    That would copy and free every page of the modules that the server has: more time than most
    programs take.
    """
    status = 0
    try:
        run(program)
    except SystemExit as leaving:
        status = _status(leaving.code)
    except KeyboardInterrupt:
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as at every exit
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(code: str | int | None) -> int:
    """Return the status that an interpreter ends with for sys.exit(code)."""
    if isinstance(code, str):
        print(code, file=sys.stderr)
        return 1
    return (code or 0) & 0xFF


if __name__ == "__main__":
    leave(serve(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
