"""The part of DeepSpeed's interface that the engine uses, as protocols: DeepSpeed has no types.

Importing this module does not import DeepSpeed. What differs between its optimizers stays untyped.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.engine.base import MicroBatch

CpuAdam = Callable[..., torch.optim.Optimizer]  # DeepSpeed's class


class Monitor(Protocol):
    """The writers of events in DeepSpeed's engine."""

    enabled: bool

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        """Write (name, value, samples consumed) of each event."""


class CheckpointWriter(Protocol):
    """The object that writes the files of a DeepSpeed checkpoint."""

    def save(self, state_dict: object, path: str) -> None:
        """Write one file."""


class DeepSpeedRuntime(Protocol):
    """DeepSpeed's engine, as `deepspeed.initialize` returns it."""

    module: Any
    optimizer: Any
    monitor: Monitor
    checkpoint_engine: CheckpointWriter
    global_samples: int
    allreduce_no_retain: Callable[..., None]

    def __call__(self, *inputs: object) -> tuple[Tensor, Tensor]:
        """Run the module."""

    def train(self) -> object:
        """Set training."""

    def eval(self) -> object:
        """Set evaluation."""

    def train_batch_size(self) -> int:
        """Return the global batch size."""

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the global batch size by the number of micro-batches."""

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Set whether the next micro-batch is the last of its step."""

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool) -> object:
        """Run a backward pass."""

    def step(self) -> None:
        """Update the weights, if the last micro-batch was the last of its step."""

    def was_step_applied(self) -> bool:
        """Return whether the last step has changed the weights."""

    def get_global_grad_norm(self) -> float:
        """Return the norm of the gradients of the last step."""

    def zero_reduce_bucket_size(self) -> int:
        """Return how many gradients are reduced at once."""

    def save_checkpoint(
        self, save_dir: str, *, tag: str, client_state: Mapping[str, object], save_latest: bool
    ) -> object:
        """Write a checkpoint; all ranks call it together."""


class PipelineRuntime(DeepSpeedRuntime, Protocol):
    """The interface of `pipe_engine.PatchedPipelineEngine`."""

    def train_on(
        self, batches: Sequence[MicroBatch], of: Callable[[int], AbstractContextManager[object]]
    ) -> None:
        """Do one optimizer step."""

    def evaluate_on(self, batches: Sequence[MicroBatch]) -> None:
        """Run forward passes alone."""


class PartitionedParameter(Protocol):
    """A parameter of ZeRO stage 3, of which this rank stores a part."""

    ds_shape: tuple[int, ...]
    ds_numel: int
    ds_tensor: Tensor
    ds_zero_partition_rank: int

    def partition_numel(self) -> int:
        """Return the number of elements of each rank's part, padding of the last one included."""


def partitioned(parameter: Parameter) -> PartitionedParameter:
    """Return a parameter of ZeRO stage 3 with the attributes that DeepSpeed has given it."""
    with_attributes: Any = parameter
    found: PartitionedParameter = with_attributes
    return found
