"""Whether this machine can run what the flags ask for: device, backend, dtype, a save folder."""

import json
import sys
from collections.abc import Iterator

import torch

from megatron import device
from megatron.checkpoint.load import storage
from megatron.config.fields import flag_name
from megatron.config.runtime import Backend, DeviceKind
from megatron.errors import ConfigError, MachineError, MegatronError
from megatron.launch import secrets_in_environment
from megatron.preflight.run import RunPlan

OLDEST_TORCH = (2, 10)  # older ones have known holes in safe loading
OLDEST_PYTHON = (3, 11)


def software_is_new_enough(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that Python and torch are at least the oldest tested versions."""
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        yield MachineError(
            "this torch is older than the oldest that is supported",
            found=f"torch {torch.__version__}",
            fix=f"install torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or newer",
        )
    if sys.version_info[:2] < OLDEST_PYTHON:
        yield MachineError(
            "this Python is older than the oldest that is supported",
            found=f"Python {sys.version.split()[0]}",
            fix=f"use Python {OLDEST_PYTHON[0]}.{OLDEST_PYTHON[1]} or newer",
        )


def flags_hold_no_secrets(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that no flag holds the value of a key or a password, which checkpoints would record."""
    secrets = secrets_in_environment()
    for fields in plan.config.to_plain().values() if secrets else ():
        for field, value in fields.items():
            text = value if isinstance(value, str) else json.dumps(value)
            for name in (name for name, secret in secrets.items() if secret in text):
                yield ConfigError(
                    "a flag holds a secret, which logs and checkpoints would record",
                    found=f"{flag_name(field)} holds the value of the variable {name}",
                    fix=f"leave it out: libraries read {name} themselves; or unset {name}, "
                    "if it is none",
                )


def repeated_passes_are_deterministic(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that a pass that is computed twice has the same bits, if that is to be checked."""
    training = plan.config.training
    on_cpu = plan.config.launch.device is DeviceKind.CPU or not device.cuda_is_available()
    if training.rerun_check_interval and not training.deterministic_mode and not on_cpu:
        yield ConfigError(
            "kernels of GPUs that are not deterministic differ from themselves",
            found=f"--rerun-check-interval {training.rerun_check_interval} on CUDA",
            fix="add --deterministic-mode, or leave --rerun-check-interval out",
        )


def backend_follows_device(plan: RunPlan) -> Iterator[MegatronError]:
    """Check that nccl is used for CUDA and gloo for CPU tensors, without silent fallback."""
    launch = plan.config.launch
    has_cuda = device.cuda_is_available()
    if launch.distributed_backend is Backend.NCCL and not has_cuda:
        yield ConfigError(
            "the nccl backend needs CUDA, and this machine has none",
            found=f"--distributed-backend nccl, torch {torch.__version__}, no CUDA device",
            fix="use --distributed-backend gloo, or drop it: the backend follows the device",
        )
    elif launch.device is DeviceKind.CUDA and not has_cuda:
        yield MachineError(
            "a CUDA device was asked for and there is none",
            found=f"--device cuda, torch {torch.__version__}, no CUDA device",
            fix="use --device cpu, or install a CUDA build of torch",
        )
    elif has_cuda and launch.device is not DeviceKind.CPU:
        if launch.distributed_backend is Backend.GLOO:
            yield ConfigError(
                "the gloo backend is for CPU tensors, and this run would use CUDA",
                found="--distributed-backend gloo on a machine with CUDA",
                fix="drop it for nccl, or add --device cpu",
            )
        shares = not plan.launch.has_own_device
        if shares and plan.launch.local_world_size > device.device_count():
            yield MachineError(
                "there are more ranks on this node than CUDA devices",
                found=f"{plan.launch.local_world_size} ranks, {device.device_count()} devices",
                fix=f"start at most {device.device_count()} processes per node",
            )


def save_folder_can_be_written(plan: RunPlan) -> Iterator[MegatronError]:
    """Check before training that the folder of --save can be written."""
    folder = plan.config.checkpoint.save
    if folder is not None and plan.launch.local_rank == 0:
        error = storage.probe_writable(folder)
        if error is not None:
            yield error
