"""Norms and zero counts of tensors that are spread over a model replica.

What every rank holds must count once. A split parameter counts on each tensor-parallel rank, a
replicated one on the first only, and one that two pipeline stages share (a tied embedding) on the
first stage that holds it. Sums are in float64, so that a norm hardly depends on the layout.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron import device
from megatron.mpu.collectives import all_gather_object, all_reduce
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import partition_of
from megatron.optimizer.grad_buffer import HALF_DTYPES

_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_ and Megatron have the same


def owned_by_this_rank(
    named_parameters: Sequence[tuple[str, Parameter]], ctx: ParallelContext
) -> tuple[bool, ...]:
    """Return for each parameter whether this rank counts it (or its part of it).

    Gathers names over the pipeline group, so all its ranks must call it together.
    """
    stages = all_gather_object([name for name, _ in named_parameters], ctx.pp)
    earlier = {name for names in stages[: ctx.pp.rank] for name in names}
    return tuple(
        name not in earlier and ctx.counts(partition_of(parameter))
        for name, parameter in named_parameters
    )


def sum_of_squares(counted: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of this rank's tensors: a float64 scalar on their device.

    Norms of single tensors are taken in float32 (float64 for float64). Non-finite values, or a
    tensor with a norm beyond float32, make the result non-finite.

    Args:
        counted: the tensors that this rank counts, see `owned_by_this_rank`.
    """
    halves = [tensor for tensor in counted if tensor.dtype in HALF_DTYPES]
    wide = [tensor for tensor in counted if tensor.dtype not in HALF_DTYPES]
    total = torch.zeros((), dtype=torch.float64, device=_device_of(counted))
    for norms in (
        torch._foreach_norm(halves, 2.0, dtype=torch.float32) if halves else (),
        torch._foreach_norm(wide, 2.0) if wide else (),
    ):
        if norms:
            total += torch.stack(list(norms)).double().square().sum()
    return total


def global_norm(
    counted: Sequence[Tensor], ctx: ParallelContext, *, over_replicas: bool = False
) -> float:
    """Return the L2 norm of all tensors of a model replica; sums over the model group.

    Args:
        counted: the tensors that this rank counts, as for `sum_of_squares`.
        over_replicas: they are shares of a replica's, and those of all replicas add up to it.
    """
    total = sum_of_squares(counted)
    if over_replicas:
        total = all_reduce(total, ctx.dp_cp)
    return math.sqrt(float(all_reduce(total, ctx.model)))


def count_zeros(counted: Sequence[Tensor]) -> Tensor:
    """Return the number of exact zeros in this rank's tensors: an int64 scalar."""
    total = torch.zeros((), dtype=torch.int64, device=_device_of(counted))
    for tensor in counted:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return total


def parameters_norm(
    named_parameters: Sequence[tuple[str, Parameter]],
    ctx: ParallelContext,
    share: Callable[[Parameter], Tensor] | None = None,
) -> float:
    """Return the L2 norm of all parameters; gathers over pp, sums over all ranks.

    Args:
        share: what this rank keeps of a parameter where replicas share them out.
    """

    def is_counted(parameter: Parameter) -> bool:
        replicas = ctx.replicas.of(parameter)
        is_shared_out = share is not None and parameter.requires_grad
        return replicas.counts_share if is_shared_out else replicas.all.is_first

    counts = owned_by_this_rank(named_parameters, ctx)
    total = sum_of_squares(
        [
            parameter.detach() if share is None else share(parameter)
            for (_, parameter), is_own in zip(named_parameters, counts)
            if is_own and is_counted(parameter)
        ]
    )
    return math.sqrt(float(all_reduce(total, ctx.world)))


def clip_factor(norm: Tensor, max_norm: float) -> Tensor | float:
    """Return the factor on gradients that limits their norm to `max_norm` (0: no limit).

    min(1, max_norm / (norm + 1e-6)), as in Megatron and torch.
    """
    return torch.clamp(max_norm / (norm + _EPSILON), max=1.0) if max_norm > 0 else 1.0


def _device_of(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else device.current()
