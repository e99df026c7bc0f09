"""Calls a function in a process forked from the Python of tests/support/warm_python.py.

What the function returns, or the traceback of what it raises, is in a file before the process ends.
"""

import copyreg
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.support.warm_python import ROOT, Program, WarmProcess

if TYPE_CHECKING:
    import torch
    from torch import Tensor


_START = "import sys; from tests.support.call import main; main(*sys.argv[1:])"


class Outcome(NamedTuple):
    """What a function returned, or the traceback of what it raised."""

    at: float  # CLOCK_MONOTONIC, which all processes of a machine share
    ok: bool
    value: Any


class Call:
    """A module-level function that runs in a process of its own.

    Args:
        folder: keeps what travels between the processes, and what the function prints.
        name: tells the call from others of that folder.
        deepspeed: the process has imported DeepSpeed.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        body: Callable[..., Any],
        *args: Any,
        deepspeed: bool = False,
    ) -> None:
        self._result, self._output = folder / f"{name}.result", folder / f"{name}.output"
        task = folder / f"{name}.task"
        task.write_bytes(pickle.dumps((body, args)))
        self._output.touch()
        words = ["-c", _START, str(task), str(self._result)]
        output = str(self._output)
        program = Program(words, str(ROOT), dict(os.environ), output, output)
        self.process = WarmProcess(program, deepspeed=deepspeed)

    @property
    def outcome(self) -> Outcome | None:
        """What the function came to, or None where it has not ended, or died."""
        if not self._result.exists():
            return None
        return Outcome(*pickle.loads(self._result.read_bytes()))

    def value(self, within_s: float) -> Any:
        """Wait for the end; return what the function returned, AssertionError if it failed."""
        try:
            self.process.wait(within_s)
        finally:
            self.end()
        outcome = self.outcome
        assert outcome is not None, "the process died"
        assert outcome.ok, outcome.value
        return outcome.value

    def end(self) -> None:
        """Kill the process if it still runs, and print what it has printed."""
        self.process.kill()
        self.process.wait()
        sys.stdout.write(self._output.read_text(errors="replace"))


def main(task: str, result: str) -> None:
    """Call the function of a file, write what it came to into another, and end this process."""
    code = 0
    body, args = pickle.loads(Path(task).read_bytes())
    try:
        _write(result, True, body(*args))
    except BaseException:  # SystemExit and KeyboardInterrupt are outcomes of a body, too
        _write(result, False, traceback.format_exc())
        code = 1
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # A gloo thread that drops a tensor while the interpreter shuts down aborts the process
    # (seen in 16 of 200 exits, torch 2.13), so there is no shutdown.
    os._exit(code)


def _write(path: str, ok: bool, value: Any) -> None:
    import torch  # here, since pytest reads this module too and need not wait for torch

    partial = Path(f"{path}.partial")
    with open(partial, "wb") as file:
        pickler = pickle.Pickler(file)
        # Torch writes each tensor as a file of its own, which takes longer than all else.
        pickler.dispatch_table = {**copyreg.dispatch_table, torch.Tensor: _reduced}
        pickler.dump((time.monotonic(), ok, value))
    partial.rename(path)


def _reduced(tensor: "Tensor") -> Any:
    import torch

    if tensor.requires_grad or tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return tensor.__reduce_ex__(pickle.DEFAULT_PROTOCOL)  # type: ignore[no-untyped-call]
    values = tensor.contiguous().reshape(-1).view(torch.uint8)
    return _tensor, (bytes(values.numpy()), tensor.dtype, tensor.shape)


def _tensor(values: bytes, dtype: "torch.dtype", shape: Sequence[int]) -> "Tensor":
    import torch

    if not values:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)
