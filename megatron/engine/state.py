"""What of an engine a checkpoint holds, under global names and as parts of whole tensors.

Keys are `model/<parameter>`, `optimizer/<kind>/<parameter>` and `fp8/<layer>`. An optimizer's state
has the shape of its parameter and is placed like it, or is a range of it where the distributed
optimizer shares it out over replicas. So any layout that can load the one can load the other. A
history of FP8 is whole on every rank.
"""

from collections.abc import Iterable

from torch import Tensor, nn
from torch.nn import Parameter

from megatron.checkpoint.sharded import Placement, ShardedTensor
from megatron.engine.amax_history import AmaxHistories
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import init_of, partition_of
from megatron.optimizer.optimizer import MegatronOptimizer
from megatron.optimizer.sharded_parameters import ShardedParameters

HISTORY_PREFIX = "fp8/"
FP8_SCALARS = "fp8"


def model_tensors(
    stage: nn.Module, context: ParallelContext, weights: ShardedParameters | None = None
) -> list[ShardedTensor]:
    """Return the parameters of a stage, as this rank's parts of whole tensors.

    Args:
        weights: the parameters where replicas share them out.
    """
    if weights is None:
        return parameter_tensors(stage.named_parameters(), context)
    return [
        ShardedTensor.of_range(
            f"model/{name}",
            weights.values(parameter),
            start=weights.owned(parameter).start,
            local_shape=parameter.shape,
            placement=placement_of(parameter, context),
        )
        for name, parameter in stage.named_parameters()
    ]


def parameter_tensors(
    named: Iterable[tuple[str, Parameter]], context: ParallelContext
) -> list[ShardedTensor]:
    """Return parameters with their global names, as this rank's parts of whole tensors."""
    return [
        ShardedTensor.of(f"model/{name}", parameter, placement_of(parameter, context))
        for name, parameter in named
    ]


def optimizer_tensors(
    named: Iterable[tuple[str, Parameter]],
    optimizer: MegatronOptimizer,
    context: ParallelContext,
) -> list[ShardedTensor]:
    """Return the optimizer's tensors, each placed like its parameter or a part of it."""
    parameters, owned = dict(named), optimizer.owned_ranges()
    found = []
    for name, tensors in optimizer.named_state().items():
        parameter = parameters[name]
        placement = placement_of(parameter, context)
        for kind, tensor in tensors.items():
            key = f"optimizer/{kind}/{name}"
            if name not in owned:
                found.append(ShardedTensor.of(key, tensor, placement))
                continue
            start, shape = owned[name].start, parameter.shape
            found.append(
                ShardedTensor.of_range(
                    key, tensor, start=start, local_shape=shape, placement=placement
                )
            )
    return found


def history_tensors(histories: AmaxHistories) -> list[ShardedTensor]:
    """Return the histories of the largest values of every layer in FP8: [3, steps] each."""
    return [
        ShardedTensor.of(f"{HISTORY_PREFIX}{name}", values)
        for name, values in histories.by_layer().items()
    ]


def placement_of(parameter: Tensor, context: ParallelContext) -> Placement:
    """Return which part of the whole parameter this rank holds; padding rows are not part of it."""
    partition, init = partition_of(parameter), init_of(parameter)
    index, size = context.share(partition)
    return Placement(
        partition,
        index=index,
        size=size,
        true_rows=None if init is None else init.true_rows,
    )
