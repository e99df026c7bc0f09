"""Collectives with gradients: the two conjugate pairs of tensor parallelism, and sequence's.

Each function is the identity on a group of one. The names are Megatron's: "tp" functions act on
the last dimension, "sequence" functions on the first (Korthikanti et al. 2022, arXiv 2205.05198,
section 4.2.2). Sums are of equal dtypes; nothing is cast.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from megatron.errors import ConfigError
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import all_gather, all_reduce, reduce_scatter
from megatron.mpu.context import Group


def copy_to_tp(tensor: Tensor, group: Group) -> Tensor:
    """Use a replicated tensor on every rank of `group`: identity; its gradient is summed."""
    return tensor if group.size == 1 else _COPY(tensor, group)


def reduce_from_tp(tensor: Tensor, group: Group) -> Tensor:
    """Sum partial results over `group`; the gradient, equal on all ranks, passes unchanged."""
    return tensor if group.size == 1 else _REDUCE(tensor, group)


def gather_from_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Concatenate [s/tp, ..] into [s, ..]; the gradient is summed and split again.

    For an input of split computation, where each rank's gradient is partial (operator g).
    """
    return tensor if group.size == 1 else _GATHER_SEQUENCE(tensor, group)


def reduce_scatter_to_sequence(tensor: Tensor, group: Group) -> Tensor:
    """Sum partial [s, ..] over `group` and keep [s/tp, ..]; the gradient is gathered (g-bar).

    Raises:
        ConfigError: the sequence does not divide over the group.
    """
    if group.size == 1:
        return tensor
    sequence_part(tensor.shape[0], group)
    return _REDUCE_SCATTER_SEQUENCE(tensor, group)


def sequence_part(length: int, group: Group) -> slice:
    """Return the slice of a sequence of `length` tokens that this rank holds when it is split.

    Raises:
        ConfigError: the sequence does not divide over the group.
    """
    part, rest = divmod(length, group.size)
    if rest:
        raise ConfigError(
            "a sequence cannot be shared out evenly over the tensor-parallel ranks",
            found=f"{length} tokens over {group.size} ranks under --sequence-parallel",
            fix=f"use sequences of a multiple of {group.size} tokens, such as "
            f"{length - rest + group.size}, or leave out --sequence-parallel",
        )
    return slice(group.rank * part, (group.rank + 1) * part)


def _own_part(tensor: Tensor, group: Group) -> Tensor:
    assert tensor.shape[-1] % group.size == 0, tensor.shape  # noqa: S101  # invariant: checked
    return tensor.chunk(group.size, dim=-1)[group.rank].contiguous()


class _GroupContext(FunctionContext):
    group: Group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:
        # Cloned: autograd may hand the same gradient to other consumers.
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: Group) -> Tensor:
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_gather(tensor, group, dim=0)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(grad, ctx.group, dim=0), None


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GroupContext, tensor: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return reduce_scatter(tensor, group, dim=0)

    @staticmethod
    def backward(ctx: _GroupContext, grad: Tensor) -> tuple[Tensor, None]:
        return all_gather(grad, ctx.group, dim=0), None


# Function.apply is untyped in torch; these are its types here.
_Mapping = Callable[[Tensor, Group], Tensor]
_COPY: _Mapping = _Copy.apply
_REDUCE: _Mapping = _Reduce.apply
_GATHER_SEQUENCE: _Mapping = _GatherSequence.apply
_REDUCE_SCATTER_SEQUENCE: _Mapping = _ReduceScatterSequence.apply
