"""Brings DeepSpeed up in a process whose groups exist already: its import, its words, its compiler.

DeepSpeed is imported when a run asks for it and never before. Left alone it compiles an extension
at its first collective (and waits for ever on the lock of a compiler that died), chooses a device
by itself and prints; none of this happens here.
"""

import importlib
import io
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType

import torch

from megatron import device, log
from megatron.config.deepspeed.version import version_problem
from megatron.errors import MachineError
from megatron.mpu.context import ParallelContext

# Messages of DeepSpeed at every normal start of a run.
_EXPECTED = (
    "untested optimizer",
    "ZeRO leaf module configuration did not match",
    "Pipeline parallelism does not support overlapped communication",
)
_OLD_NAMES = r".*(all_gather_into_tensor|reduce_scatter_tensor|_all_gather_base).*"


def start_deepspeed(context: ParallelContext) -> ModuleType:
    """Import DeepSpeed, and let it use the groups of `context`; may be called again.

    Raises:
        MachineError: it is not installed, of an untested version, or for another device.
    """
    deepspeed = import_deepspeed()
    _log_through_ours()
    # Its probe of what could be compiled runs the compiler; "nothing" keeps shm_comm from it.
    vars(importlib.import_module("deepspeed.ops"))["__compatible_ops__"] = defaultdict(bool)
    _check_accelerator(deepspeed)
    if context.world.handle is None:
        raise MachineError(
            "DeepSpeed needs a process group, also for one rank",
            found="a context without torch.distributed",
            fix="start the run through initialize_megatron(), which makes one",
        )
    groups = importlib.import_module("deepspeed.utils.groups")
    vars(groups).update(mpu=None, mesh_device=None)  # of an engine that this process had before
    deepspeed.init_distributed(verbose=False)
    return deepspeed


def import_deepspeed() -> ModuleType:
    """Return the package in a tested version; otherwise MachineError names both versions."""
    problem = version_problem()
    if problem is not None:
        raise problem
    logger = logging.getLogger("DeepSpeed")
    logger.disabled = True  # its import sets level and stream, and logs
    try:
        return importlib.import_module("deepspeed")
    finally:
        logger.disabled = False


@contextmanager
def quietly() -> Iterator[None]:
    """Redirect prints inside the block, as DeepSpeed makes beside its logger, to our debug log."""
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        for line in printed.getvalue().splitlines():
            log.debug(f"DeepSpeed: {line.rstrip()}")


def fp16_is_supported() -> bool:
    """Return whether DeepSpeed computes in float16 on the device of this process."""
    return bool(import_deepspeed().get_accelerator().is_fp16_supported())


class _ToOurLog(logging.Handler):
    """A handler that passes DeepSpeed's log records to our log, with its name in front."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if any(words in text for words in _EXPECTED):
            return
        if record.levelno >= logging.ERROR:
            log.error(f"DeepSpeed: {text}")
        elif record.levelno >= logging.WARNING:
            log.warning(f"DeepSpeed: {text}")
        else:
            log.debug(f"DeepSpeed: {text}")


def _log_through_ours() -> None:
    logger = logging.getLogger("DeepSpeed")
    logger.handlers = [_ToOurLog()]
    logger.setLevel(logging.WARNING)
    # torch 2.13 warns of every call by an old name; DeepSpeed uses no other.
    warnings.filterwarnings("ignore", message=_OLD_NAMES, category=FutureWarning)


def _check_accelerator(deepspeed: ModuleType) -> None:
    wanted, chosen = device.current().type, deepspeed.get_accelerator().device_name()
    if chosen == wanted:
        return
    if wanted == "cpu":  # DeepSpeed takes a GPU where there is one, whatever --device is
        cpu = importlib.import_module("deepspeed.accelerator.cpu_accelerator").CPU_Accelerator
        importlib.import_module("deepspeed.accelerator").set_accelerator(cpu())
        return
    raise MachineError(
        "DeepSpeed and this run are for different devices",
        found=f"DeepSpeed computes on {chosen}, --device {wanted}, torch {torch.__version__}",
        fix=f"unset DS_ACCELERATOR, or set it to {wanted}",
    )
