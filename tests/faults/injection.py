"""Faults that a rank does to itself, at a stated phase of a run, once.

A phase is a call of one named function of the library, so that it stays what it is when code moves.
What a reader would get wrong: a fault leaves a mark before it acts, and never acts again, however
often the ranks are started; a fault of the restart is preceded by a kill.
"""

import ctypes
import errno
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import time as real_time  # which a fault may replace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import megatron.loop.data_feed
import megatron.loop.training_loop
import megatron.training
from megatron.checkpoint.files import durable
from megatron.checkpoint.folder.run_folder import TRACKER, iteration_name
from megatron.data.gpt_dataset import GPTDataset
from megatron.engine.native import NativeEngine
from megatron.loop import step_plan
from tests.faults import memory_group

START, STEP, SAVE, EVALUATION, RESTART = PHASES = (
    *("start", "mid-step", "mid-save", "evaluation", "restart"),
)
SAVED, FAULTY_SAVE, FAULTY_STEP = 10, 20, 25  # iterations
NAN = "gradient is NaN"
LOCAL, MEMORY = 4, "memory"  # iterations of each local checkpoint, and the folder of those
NETWORK, NETWORK_IS_DOWN_S = "network drops", 15  # of a run in a network namespace of its own
FOR_MEMORY = "killed for memory"  # by the kernel, in a group that has little of it
NOTHING = "nothing"  # for faults that come from outside
FIRED, STEPS = "fired", "steps.jsonl"
_FOREVER_S = 600.0
_YEAR_S = 365 * 86400.0


class Plan(NamedTuple):
    """What goes wrong, in which phase, on which rank, and where the run's files are."""

    fault: str
    phase: str
    rank: int
    folder: str  # of the run: its marks, `save` and `corpus`

    @classmethod
    def from_environment(cls) -> "Plan":
        """Return the plan of this process."""
        return cls(*json.loads(os.environ["FAULT"]))

    def variables(self) -> dict[str, str]:
        """Return the environment that hands it to a program."""
        return {"FAULT": json.dumps(self)}


@contextmanager
def put_in(plan: Plan) -> Iterator[None]:
    """Let the fault of a plan happen within the block."""
    with ExitStack() as patches:
        patches.enter_context(_noted_steps(Path(plan.folder)))
        if plan.fault != NOTHING and int(os.environ["RANK"]) == plan.rank:
            at = _PHASES[plan.phase]
            if plan.phase == RESTART:
                kill = _once(plan, f"{FIRED}-first", _signalled(signal.SIGKILL))
                patches.enter_context(_at_step(kill))
            if plan.fault in IN_WORKERS:
                patches.enter_context(_in_workers(plan))
            elif plan.fault == NAN:  # before gradients are reduced, which is while others follow
                act = _once(plan, FIRED, FAULTS[plan.fault](plan))
                patches.enter_context(
                    _before(NativeEngine, "start_step", act, when=_is_faulty_step)
                )
            else:
                patches.enter_context(at(_once(plan, FIRED, FAULTS[plan.fault](plan))))
        yield


Act = Callable[[], None]


def _once(plan: Plan, mark: str, act: Act) -> Act:
    def acted() -> None:
        path = Path(plan.folder, mark)
        if not path.exists():
            path.write_text(str(real_time()))
            act()

    return acted


@contextmanager
def _noted_steps(folder: Path) -> Iterator[None]:
    """Note on rank 0 when each step was planned, and by which process."""
    real = step_plan.plan_step

    def plan_step(config: Any, duration: Any, progress: Any, curriculum: Any) -> Any:
        _AT.iteration = progress.iteration + 1
        if os.environ["RANK"] == "0":
            with open(folder / STEPS, "a") as file:
                file.write(json.dumps([os.getpid(), _AT.iteration, real_time()]) + "\n")
        return real(config, duration, progress, curriculum)

    with patch.object(megatron.loop.training_loop, "plan_step", plan_step):
        yield


class _At:
    iteration = 0


_AT = _At()


def _before(owner: Any, name: str, act: Act, *, when: Callable[[], bool] = lambda: True) -> Any:
    real = getattr(owner, name)

    def there(*args: Any, **kwargs: Any) -> Any:
        if when():
            act()
        return real(*args, **kwargs)

    return patch.object(owner, name, there)


def _at_start(act: Act) -> Any:
    return _before(megatron.training, "build_engine", act)


def _is_faulty_step() -> bool:
    return _AT.iteration == FAULTY_STEP


def _at_step(act: Act) -> Any:
    return _before(NativeEngine, "_reduce_held", act, when=lambda: _AT.iteration == FAULTY_STEP)


def _at_save(act: Act) -> Any:
    real = durable.DurableFile.write

    def write(file: Any, data: Any) -> None:
        if _AT.iteration < FAULTY_SAVE or not file._path.name.startswith("shard"):
            return real(file, data)
        view = memoryview(data).cast("B")
        real(file, view[: len(view) // 2])
        act()
        return real(file, view[len(view) // 2 :])

    return patch.object(durable.DurableFile, "write", write)


def _at_evaluation(act: Act) -> Any:
    return _before(
        megatron.loop.data_feed, "evaluate", act, when=lambda: _AT.iteration == FAULTY_SAVE
    )


def _at_restart(act: Act) -> Any:
    def is_again() -> bool:
        return Path(Plan.from_environment().folder, f"{FIRED}-first").exists()

    return _before(megatron.training, "load_checkpoint", act, when=is_again)


_PHASES: Mapping[str, Callable[[Act], Any]] = {
    START: _at_start,
    STEP: _at_step,
    SAVE: _at_save,
    EVALUATION: _at_evaluation,
    RESTART: _at_restart,
}


def _signalled(number: signal.Signals) -> Act:
    return lambda: os.kill(os.getpid(), number)


def _raised(error: Callable[[], Exception]) -> Act:
    def act() -> None:
        raise error()

    return act


def _hold_the_lock() -> None:
    # PyDLL keeps the interpreter's lock, unlike CDLL. A signal handler ends a sleep, and no read.
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)


def _run_out_of_memory() -> None:
    torch.empty(2**46, dtype=torch.uint8)


def _drop_the_network() -> None:
    text = f"ip link set lo down; sleep {NETWORK_IS_DOWN_S}; ip link set lo up"
    # In a session of its own, because it has to outlive the ranks.
    subprocess.Popen(["sh", "-c", text], start_new_session=True)


def _let_the_clock_jump() -> None:
    real = time.time
    patch.object(time, "time", lambda: real() + _YEAR_S).start()


def _each_parameter(change: Callable[[torch.Tensor], None]) -> Act:
    def act() -> None:
        engine = _ENGINES[-1]
        parameter = engine.stage.get_parameter("final_norm.weight")
        change(parameter)

    return act


_ENGINES: list[NativeEngine] = []


def remember_engines() -> None:
    """Let faults of parameters find the engine."""
    real = NativeEngine.__init__

    def init(self: NativeEngine, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        _ENGINES.append(self)

    patch.object(NativeEngine, "__init__", init).start()


@torch.no_grad()
def _flip(parameter: torch.Tensor) -> None:
    parameter.view(torch.int32)[0] ^= 1 << 20


def _spoil_gradient(parameter: torch.Tensor) -> None:
    parameter.register_hook(lambda gradient: gradient * float("nan"))


def _of_file(find: Callable[[Path], Path], damage: Callable[[Path], None]) -> Callable[[Plan], Act]:
    return lambda plan: lambda: damage(find(Path(plan.folder)))


def flip_a_bit(path: Path) -> None:
    """Flip a bit in the middle of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 8]))


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _replace(path: Path) -> None:
    new = path.with_suffix(".new")
    new.write_bytes(path.read_bytes()[::-1])
    os.replace(new, path)


def _garble(path: Path) -> None:
    path.write_text("garbage\n")


def _corpus(folder: Path) -> Path:
    return next(folder.glob("corpus/*.bin"))


def _checkpoint(folder: Path) -> Path:
    return folder / "save" / iteration_name(FAULTY_SAVE)


def _shard(folder: Path) -> Path:
    return max(_checkpoint(folder).glob("shard*"), key=lambda path: path.stat().st_size)


def _cache(folder: Path) -> Path:
    return max(folder.glob("corpus/index-cache/*.npy"), key=lambda path: path.stat().st_size)


def _local(folder: Path) -> Path:
    found = folder.glob(f"{MEMORY}/*/rank-00001-*/{iteration_name(FAULTY_STEP // LOCAL * LOCAL)}")
    return next(iter(found))


WITH_LOCAL: Mapping[str, Callable[[Plan], Act]] = {
    "SIGKILL with local checkpoints": lambda plan: _signalled(signal.SIGKILL),
    "no space left for a local checkpoint": lambda plan: _raised(
        lambda: OSError(errno.ENOSPC, "No space left")
    ),
    "bit of a local checkpoint flipped": _of_file(
        lambda folder: next(_local(folder).glob("shard*")), flip_a_bit
    ),
    "local checkpoint removed": _of_file(_local, shutil.rmtree),
}

FAULTS: Mapping[str, Callable[[Plan], Act]] = {
    **WITH_LOCAL,
    **{
        number.name: (lambda plan, number=number: _signalled(number))  # type: ignore[misc]
        for number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM, signal.SIGUSR1)
    },
    "exception": lambda plan: _raised(lambda: ZeroDivisionError("a bug")),
    "hang": lambda plan: lambda: time.sleep(_FOREVER_S),
    "interpreter lock held": lambda plan: _hold_the_lock,
    "out of memory": lambda plan: _run_out_of_memory,
    FOR_MEMORY: lambda plan: lambda: memory_group.join_and_fill(Path(plan.folder)),
    NETWORK: lambda plan: _drop_the_network,
    "clock jumps": lambda plan: _let_the_clock_jump,
    "no space left": lambda plan: _raised(lambda: OSError(errno.ENOSPC, "No space left")),
    "input/output error": lambda plan: _raised(lambda: OSError(errno.EIO, "Input/output error")),
    "bit of a parameter flipped": lambda plan: _each_parameter(_flip),
    NAN: lambda plan: _each_parameter(_spoil_gradient),
    "corpus truncated": _of_file(_corpus, _truncate),
    "bit of the corpus flipped": _of_file(_corpus, flip_a_bit),
    "corpus removed": _of_file(_corpus, os.unlink),
    "corpus replaced": _of_file(_corpus, _replace),
    "bit of the checkpoint flipped": _of_file(_shard, flip_a_bit),
    "checkpoint truncated": _of_file(_shard, _truncate),
    "shard removed": _of_file(_shard, os.unlink),
    "manifest removed": _of_file(lambda folder: _checkpoint(folder) / "manifest.json", os.unlink),
    "checkpoint removed": _of_file(_checkpoint, shutil.rmtree),
    "tracker garbled": _of_file(lambda folder: folder / "save" / TRACKER, _garble),
    "bit of the index cache flipped": _of_file(_cache, flip_a_bit),
    "index cache truncated": _of_file(_cache, _truncate),
    "index cache removed": _of_file(lambda folder: _cache(folder).parent, shutil.rmtree),
}

IN_WORKERS: Mapping[str, Act] = {
    "data worker hangs": lambda: time.sleep(_FOREVER_S),
    "data worker killed": _signalled(signal.SIGKILL),
    "data worker raises": _raised(lambda: ZeroDivisionError("a bug")),
}


@contextmanager
def _in_workers(plan: Plan) -> Iterator[None]:
    """Let the fault happen where samples are read, in the phase's reader."""
    real, count = GPTDataset.__getitem__, 0
    act = _once(plan, FIRED, IN_WORKERS[plan.fault])

    def read(self: GPTDataset, index: Any) -> Any:
        nonlocal count
        count += 1  # of this reader: training has read more than evaluations ever do
        is_training = count > FAULTY_STEP
        if is_training if plan.phase == STEP else self.name != "train":
            act()
        return real(self, index)

    with patch.object(GPTDataset, "__getitem__", read):
        yield
