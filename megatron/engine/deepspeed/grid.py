"""The parallel groups in DeepSpeed's interface: the methods of Megatron's old `mpu` module.

DeepSpeed takes the norm of a gradient over the "model" group, which is one whole replica, and
shards over the data-parallel group.
"""

from collections.abc import Iterable

import torch.distributed as dist
from torch.nn import Parameter

from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import is_split_over


class DeepSpeedGrid:
    """A `ParallelContext` under the method names that DeepSpeed expects."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context

    def get_model_parallel_rank(self) -> int:
        """Return the index of this rank in its replica."""
        return self._context.model.rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of a replica."""
        return self._context.model.size

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the handle of the group of one replica."""
        return self._context.model.handle

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the index of this rank among those that share each layer."""
        return self._context.tp.rank

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the number of ranks that share each layer."""
        return self._context.tp.size

    def get_tensor_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the handle of the group that shares each layer."""
        return self._context.tp.handle

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the global rank of the first rank that shares each layer."""
        return self._context.tp.ranks[0]

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the index of the stage of this rank."""
        return self._context.pp.rank

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the number of pipeline stages."""
        return self._context.pp.size

    def get_pipeline_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the handle of the group of the stages of one replica."""
        return self._context.pp.handle

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank among the replicas."""
        return self._context.dp.rank

    def get_data_parallel_world_size(self) -> int:
        """Return the number of replicas."""
        return self._context.dp.size

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the handle of the group of replicas."""
        return self._context.dp.handle

    def get_data_parallel_group_ranks(self) -> tuple[int, ...]:
        """Return global ranks of the group of replicas."""
        return self._context.dp.ranks


def mark_tensor_parallel(parameters: Iterable[Parameter]) -> None:
    """Mark the parameters split over tp, so that DeepSpeed counts the others once in a norm."""
    for parameter in parameters:
        vars(parameter)["tensor_model_parallel"] = is_split_over(parameter, "tp")
