"""Starts programs as a user or a launcher does, and never waits longer than its limit.

Output goes to files, so a program that talks much never blocks. A reader might miss that torchrun
gives every rank a session of its own: what is left at the end is found as descendants in /proc.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from megatron.launch import free_port
from tests.support.deadlines import HANG_S
from tests.support.warm_python import Program, WarmProcess, can_fork, python_that_forks
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "pretrain_gpt.py")
_POLL_S = 0.02
_END_S = 5.0  # from SIGTERM to SIGKILL, for what a test leaves running

# What is in the way of a fresh start: a rank's identity, and paths that a user does not have.
_NOT_INHERITED = {
    *("PYTHONPATH", "PYTEST_CURRENT_TEST", "MASTER_ADDR", "MASTER_PORT"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    *("LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE"),
}

_WORDS = "the cat sat on a mat and saw two dogs run over green hills far away while rain fell"

# A GPT that trains in milliseconds; every test adds what it is about.
_SMALL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-2 --split 80,10,10 "
    "--eval-iters 1 --log-interval 1 --num-workers 0 --tokenizer-type ByteTokenizer"
)


class Ended(NamedTuple):
    """How a program ended, and its output."""

    status: int  # minus the signal's number when a signal ended it
    out: str
    err: str
    seconds: float

    @property
    def text(self) -> str:
        """All of its output."""
        return self.out + self.err


class Started:
    """A running program; leaving the context ends it and everything it started.

    A program of Python's is forked from one that has imported torch, unless it is to start `fresh`:
    where the start itself is what a test is about. With `warm_children` so are the programs that it
    starts as `sys.executable` or $PYTHON; signals reach them by way of another process. `deepspeed`
    says that they need DeepSpeed, which --deepspeed among the words says, too.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
        warm_children: bool = False,
        deepspeed: bool = False,
    ) -> None:
        inherited = {k: v for k, v in os.environ.items() if k not in _NOT_INHERITED}
        # Without CUDA, a machine that has it runs the same tests as one that has not.
        fixed = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
        self._outputs = tempfile.TemporaryDirectory()
        self._out, self._err = Path(self._outputs.name, "out"), Path(self._outputs.name, "err")
        self._began = time.monotonic()
        deepspeed = deepspeed or "--deepspeed" in words
        if warm_children:
            fixed |= python_that_forks(deepspeed=deepspeed)
        variables = inherited | fixed | dict(environment or {})
        self.process: subprocess.Popen[bytes] | WarmProcess
        with open(self._out, "wb") as out, open(self._err, "wb") as err:
            if not fresh and can_fork(words, environment or {}):
                program = Program(list(words[1:]), str(cwd), variables, out.name, err.name)
                self.process = WarmProcess(program, deepspeed=deepspeed)
                return
            self.process = subprocess.Popen(
                list(words),
                cwd=cwd,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> "Started":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        left = self.descendants()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for pid in left:  # found while their ancestor lived, so they are ours
            if _is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self._outputs.cleanup()

    @property
    def text(self) -> str:
        """All of its output so far."""
        return self._out.read_text(errors="replace") + self._err.read_text(errors="replace")

    def wait_for(self, words: str, *, within_s: float = HANG_S) -> None:
        """Return once it has printed `words`; AssertionError when it ends or takes too long."""
        deadline = time.monotonic() + within_s
        while words not in self.text:
            ended = self.process.poll() is not None and words not in self.text
            assert not ended, f"it ended without saying {words!r}:\n{self.text}"
            assert time.monotonic() < deadline, f"no {words!r} in {within_s} s:\n{self.text}"
            time.sleep(_POLL_S)

    def ended(self, *, within_s: float = HANG_S) -> Ended:
        """Wait for its end; AssertionError, and the end of it, when that takes too long."""
        try:
            status = self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within_s} s:\n{self.text}") from None
        seconds = time.monotonic() - self._began
        out, err = (path.read_text(errors="replace") for path in (self._out, self._err))
        return Ended(status, out, err, seconds)

    def descendants(self) -> list[int]:
        """Processes that it started, and those that they started."""
        return list(_descendants(self.process.pid))

    def ranks(self) -> list[int]:
        """Processes of pretrain_gpt.py among them, in the order of their start."""
        return self.running(PRETRAIN)

    def running(self, program: str) -> list[int]:
        """Processes of a program among them, in the order of their start."""
        name = Path(program).name
        return sorted(
            pid
            for pid in self.descendants()
            if name in {Path(word).name for word in _command_line(pid)[:3]}
        )


def run_program(
    words: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str] | None = None,
    within_s: float = HANG_S,
    fresh: bool = False,
    warm_children: bool = False,
    deepspeed: bool = False,
) -> Ended:
    """Start a program and wait for its end."""
    with Started(
        words,
        cwd=cwd,
        environment=environment,
        fresh=fresh,
        warm_children=warm_children,
        deepspeed=deepspeed,
    ) as program:
        return program.ended(within_s=within_s)


def pretrain_words(*flags: str) -> list[str]:
    """`python pretrain_gpt.py <flags>`."""
    return [sys.executable, PRETRAIN, *flags]


def torchrun_words(ranks: int, program: str, *flags: str) -> list[str]:
    """`torchrun --standalone --nproc-per-node N PROGRAM <flags>`."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(ranks), program, *flags]


@contextmanager
def each_rank(
    ranks: int,
    flags: Sequence[str],
    *,
    cwds: Sequence[Path],
    program: str | None = None,
    fresh: bool = False,
) -> Iterator[list[Started]]:
    """A program on several ranks as Slurm starts them: the end of one does not end another.

    It is `pretrain_gpt.py` unless another is named.
    """
    port = str(free_port())
    with ExitStack() as started:
        yield [
            started.enter_context(
                Started(
                    [sys.executable, program or PRETRAIN, *flags],
                    cwd=cwds[rank % len(cwds)],
                    environment={
                        "RANK": str(rank),
                        "WORLD_SIZE": str(ranks),
                        "LOCAL_RANK": str(rank),
                        "LOCAL_WORLD_SIZE": str(ranks),
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    },
                    fresh=fresh,
                )
            )
            for rank in range(ranks)
        ]


def all_ended(started: Sequence[Started], *, within_s: float = HANG_S) -> list[Ended]:
    """How each of several programs ended; all of them have `within_s` together."""
    deadline = time.monotonic() + within_s
    return [one.ended(within_s=max(0.1, deadline - time.monotonic())) for one in started]


def write_text(path: Path, documents: int = 300, *, words: int = 30) -> Path:
    """A .jsonl, or a .txt of one paragraph per document, that is the same each time."""
    draw = random.Random(0)
    texts = [" ".join(draw.choices(_WORDS.split(), k=words)) for _ in range(documents)]
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    else:
        path.write_text("\n\n".join(texts) + "\n")
    return path


def byte_corpus(folder: Path, name: str = "corpus", *, documents: int = 300) -> str:
    """Preprocess a corpus of bytes into `folder`; returns the prefix for --data-path."""
    text = write_text(folder / f"{name}.jsonl", documents)
    flags = f"--tokenizer-type ByteTokenizer --append-eod --output-prefix {folder / name}"
    preprocess_data.main(["--input", str(text), *flags.split()])
    return str(folder / f"{name}_text_document")


def small_run(prefix: str | None, *flags: str) -> list[str]:
    """Flags of a small run over `prefix`, or over made-up samples; `flags` win over it."""
    data = ("--mock-data",) if prefix is None else ("--data-path", prefix)
    return [*_SMALL.split(), *data, *flags]


def unfinished(folder: Path) -> list[str]:
    """Files and folders that a program writes first and renames when they are whole."""
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if any(word in path.name for word in (".tmp", ".partial", ".probe", ".replaced"))
    )


def _descendants(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _descendants(child)


def _children(pid: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, spaces and parentheses among it.
            parent = path.read_text().rpartition(")")[2].split()[1]
        except OSError:  # it ended meanwhile
            continue
        if int(parent) == pid:
            found.append(int(path.parent.name))
    return found


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
