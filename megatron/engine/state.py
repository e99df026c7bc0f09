"""What of an engine a checkpoint holds, under global names and as parts of whole tensors.

Keys are `model/<parameter>` and `optimizer/<kind>/<parameter>`. An optimizer's state has the shape
of its parameter and is placed like it, so any layout that can load the one can load the other.
"""

from collections.abc import Iterator

from torch import Tensor, nn

from megatron.checkpoint.sharded import Placement, ShardedTensor
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import init_of, partition_of
from megatron.optimizer.optimizer import MegatronOptimizer


def model_tensors(stage: nn.Module, context: ParallelContext) -> list[ShardedTensor]:
    """The parameters of a stage, as this rank's parts of whole tensors."""
    return [
        ShardedTensor.of(f"model/{name}", parameter, placement_of(parameter, context))
        for name, parameter in stage.named_parameters()
    ]


def optimizer_tensors(
    stage: nn.Module, optimizer: MegatronOptimizer, context: ParallelContext
) -> list[ShardedTensor]:
    """The optimizer's tensors, each placed like the parameter it belongs to."""
    parameters = dict(stage.named_parameters())
    return [
        ShardedTensor.of(key, tensor, placement_of(parameters[name], context))
        for name, key, tensor in _state(optimizer)
    ]


def placement_of(parameter: Tensor, context: ParallelContext) -> Placement:
    """Which part of the whole parameter this rank holds; padding rows are not part of it."""
    init = init_of(parameter)
    return Placement(
        partition_of(parameter),
        index=context.tp.rank,
        size=context.tp.size,
        true_rows=None if init is None else init.true_rows,
    )


def _state(optimizer: MegatronOptimizer) -> Iterator[tuple[str, str, Tensor]]:
    for name, tensors in optimizer.named_state().items():
        for kind, tensor in tensors.items():
            yield name, f"optimizer/{kind}/{name}", tensor
