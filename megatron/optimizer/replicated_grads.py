"""What tensor-parallel ranks hold whole: its partial gradients are summed, its values compared.

Under sequence parallelism each rank applies norms, row biases and the position table to its own
part of the sequence (`is_sequence_parallel`), so each has a summand of their gradients; norms of
heads are applied to a rank's own heads in any case. The gradients of all others are equal by
construction, and nothing here may touch them.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group
from megatron.mpu.partition import is_sequence_parallel, partition_of
from megatron.optimizer.agreement import check_bitwise_equal


def reduce_replicated(parameters: Iterable[Parameter], tp: Group) -> None:
    """Sum the gradients of `sequence_parallel` parameters over `tp`, in one collective per dtype.

    Call it once per step, after the last backward pass: twice would multiply by the ranks. The sum
    is taken in the dtype that gradients are kept in (`main_grad`), and is bit-equal on all ranks.
    """
    if tp.size == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if is_sequence_parallel(parameter) and parameter.requires_grad:
            gradient: Tensor = parameter.main_grad  # type: ignore[attr-defined]  # of GradBuffer
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        whole = all_reduce(torch.cat([gradient.view(-1) for gradient in gradients]), tp)
        sums = torch.split(whole, [gradient.numel() for gradient in gradients])
        for gradient, total in zip(gradients, sums):
            gradient.view(-1).copy_(total)


def check_replicated_agree(
    named_parameters: Iterable[tuple[str, Parameter]],
    tp: Group,
    values: Callable[[Parameter], Tensor] = Tensor.detach,
) -> None:
    """Compare the parameters that are not split over `tp` bit by bit.

    Args:
        values: what a rank keeps of a parameter.

    Raises:
        NumericsError: on every rank, naming parameters that differ.
    """
    check_bitwise_equal(
        (
            (name, values(parameter))
            for name, parameter in named_parameters
            if partition_of(parameter) is None
        ),
        tp,
        problem="tensor-parallel ranks hold different values of weights that are not split",
    )
