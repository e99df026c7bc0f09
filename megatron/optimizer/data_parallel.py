"""Data parallelism: one module per rank, gradients summed over ranks.

Unlike torch's class of the same name it neither broadcasts parameters (initial values depend on
seed and name only) nor divides by the number of ranks (losses are sums, divided by a count of
tokens). `check_replicas_agree` verifies the first of the two.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.config.parallel import ShardingStrategy
from megatron.mpu.context import ReplicaGroups
from megatron.optimizer.agreement import check_bitwise_equal
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.param_buffer import ParameterBuffer
from megatron.optimizer.sharded_grads import ShardedGradBuffer
from megatron.optimizer.sharded_parameters import ShardedParameters

Shards: TypeAlias = ParameterBuffer | ShardedParameters
"""What of the parameters a replica updates."""


class DistributedDataParallel(nn.Module):
    """A module whose gradients live in contiguous buffers and are summed over replicas.

    Args:
        replicas: the ranks that hold the same parameters.
        gradient_dtype: in which the gradients of half-precision parameters are accumulated and
            reduced; the others' are kept in the parameter's own dtype.
        bucket_elements: how many gradients are reduced in one collective, at least.
        fuse_accumulation: linear layers add their products to the buffers themselves.
        overlap_grad_reduce: reduce buckets while the backward pass goes on; the sums are the same.
        overlap_param_gather: gather parameters while the next forward pass goes on; they may be
            read elsewhere only after `wait_for_parameters`.
        sharding: what replicas share out: nothing; updates, of which every rank does its share of
            each bucket and gathers the rest; what is kept of gradients too. Or the parameters of
            the module, which are shared out already.
    """

    def __init__(
        self,
        module: nn.Module,
        replicas: ReplicaGroups,
        *,
        gradient_dtype: torch.dtype = torch.float32,
        bucket_elements: int | None = None,
        fuse_accumulation: bool = False,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        sharding: ShardingStrategy | ShardedParameters = ShardingStrategy.NO_SHARD,
    ) -> None:
        super().__init__()
        self.module = module
        self._replicas = replicas
        parameters = sharding if isinstance(sharding, ShardedParameters) else None
        strategy = (
            ShardingStrategy.OPTIM_GRADS_PARAMS
            if isinstance(sharding, ShardedParameters)
            else sharding
        )
        kind = ShardedGradBuffer if strategy.shards_gradients else GradBuffer
        self.gradients = kind(
            module.named_parameters(),
            replicas,
            gradient_dtype=gradient_dtype,
            bucket_elements=bucket_elements,
            fuse_accumulation=fuse_accumulation,
            overlap=overlap_grad_reduce,
            sharded=strategy.shards_state,
        )
        self.shards: Shards | None = parameters
        if parameters is not None and isinstance(self.gradients, ShardedGradBuffer):
            self.gradients.after_unit = parameters.after_gradients
        elif strategy.shards_state:
            self.shards = ParameterBuffer(
                module, self.gradients.flats, overlap=overlap_param_gather
            )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; nothing is communicated."""
        return self.module(*args, **kwargs)

    def start_step(self, num_passes: int | None = None) -> None:
        """Forget the gradients, before the first backward pass of a step.

        Args:
            num_passes: backward passes through every parameter, one per micro-batch; None
                when that is not known, and then nothing is reduced before `finish`.
        """
        self.gradients.start_step(num_passes)

    def finish(self, before: Callable[[], None] | None = None) -> None:
        """Return once the gradients are summed over replicas; after the last backward pass.

        Args:
            before: sums what has to be summed over other ranks first: the gradients of parameters
                with the attribute `reduce_first` or `sequence_parallel`. Called on every rank, once
                all gradients are there.
        """
        self.gradients.finish(before)
        self.wait_for_parameters()  # of modules that were not called: they are to be updated now

    def wait_for_parameters(self) -> None:
        """Return once the parameters of the last update have arrived, to read them all."""
        if self.shards is not None:
            self.shards.wait()

    def values(self, parameter: Parameter) -> Tensor:
        """Return what this rank keeps of `parameter`: all of it, or its elements of it, flat."""
        if isinstance(self.shards, ShardedParameters):
            return self.shards.values(parameter)
        return parameter.detach()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Do as `start_step`, under torch's name; `set_to_none` has no effect.

        What `main_grad` shows is zero then too, for callers that read it before a backward pass.
        """
        del set_to_none
        self.start_step()
        for flat in self.gradients.flats:
            flat.data.zero_()

    def check_replicas_agree(self) -> None:
        """Compare all parameters bit by bit over data-parallel ranks, by digest.

        Raises:
            NumericsError: on every rank, naming parameters that differ.
        """
        self.wait_for_parameters()
        named = list(self.module.named_parameters())
        shared_out = isinstance(self.shards, ShardedParameters)
        for replicas in dict.fromkeys((self._replicas.dense, self._replicas.experts)):
            group = replicas.across if shared_out else replicas.all
            held = [
                (name, self.values(parameter))
                for name, parameter in named
                if self._replicas.of(parameter) == replicas
            ]
            if held and group is not None:
                check_bitwise_equal(
                    held, group, problem="the data-parallel replicas hold different weights"
                )
