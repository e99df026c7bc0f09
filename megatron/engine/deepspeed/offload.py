"""Which update rule works on weights that ZeRO has moved to the CPU.

DeepSpeed's CPUAdam is compiled at its first use. Where it does not build, torch's AdamW does the
same, slower; all ranks use the same of the two, because their roundings differ.
"""

import importlib
from pathlib import Path
from types import ModuleType

from megatron import log
from megatron.config.optimizer import OptimizerConfig, OptimizerKind
from megatron.engine.deepspeed.interface import CpuAdam
from megatron.engine.deepspeed.start import quietly
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group

_EXTENSION = "cpu_adam"


def cpu_adam_for(
    offloaded: bool, wanted: bool, optimizer: OptimizerConfig, world: Group
) -> CpuAdam | None:
    """Return DeepSpeed's CPUAdam class for offloaded weights; None to use torch's rule.

    Compiles it if it has to; all ranks call this together.
    """
    if not offloaded or optimizer.optimizer is not OptimizerKind.ADAM:
        return None
    if not wanted:
        log.info("offloaded weights are updated by torch's AdamW, as asked for")
        return None
    # First all look for a lock, then all build: the lock of one must not look stale to another.
    locked = [text for text in all_gather_object(_stale_lock(), world) if text is not None]
    reasons = locked or [
        text for text in all_gather_object(_why_not_built(), world) if text is not None
    ]
    if reasons:
        log.warning(
            f"DeepSpeed's CPUAdam cannot be used ({reasons[0]}): offloaded weights are updated by "
            "torch's AdamW, which takes longer"
        )
        return None
    log.info("offloaded weights are updated by DeepSpeed's CPUAdam")
    adam: ModuleType = importlib.import_module("deepspeed.ops.adam")
    cpu_adam: CpuAdam = adam.DeepSpeedCPUAdam
    return cpu_adam


def _stale_lock() -> str | None:
    """Return a message about a compiler's stale lock file; None where there is none."""
    from torch.utils import cpp_extension  # imports setuptools, which takes 0.09 s

    lock = Path(cpp_extension._get_build_directory(_EXTENSION, False), "lock")
    return f"{lock} is left from a compiler that died; remove it" if lock.exists() else None


def _why_not_built() -> str | None:
    builders: ModuleType = importlib.import_module("deepspeed.ops.op_builder")
    try:
        with quietly():
            builders.CPUAdamBuilder().load(verbose=False)
    except Exception as error:  # any failure of a compiler and its tools; the caller logs it
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None
