"""Data parallelism: one module per rank, gradients summed over ranks.

Unlike torch's class of the same name it neither broadcasts parameters (initial values depend on
seed and name only) nor divides by the number of ranks (losses are sums, divided by a count of
tokens). `check_replicas_agree` proves the first of the two instead of assuming it.
"""

from collections.abc import Collection
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from megatron.errors import NumericsError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.optimizer.grad_buffer import GradBuffer

_NAMES_SHOWN = 5


class DistributedDataParallel(nn.Module):
    """A module whose gradients live in contiguous buffers and are summed over `dp_group`.

    Args:
        gradient_dtype: in which the gradients of half-precision parameters are accumulated and
            reduced; the others' are kept in the parameter's own dtype.
        optional: names of parameters that may go without a gradient in an iteration.
    """

    def __init__(
        self,
        module: nn.Module,
        dp_group: Group,
        *,
        gradient_dtype: torch.dtype = torch.float32,
        optional: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.module = module
        self.dp_group = dp_group
        self.gradients = GradBuffer(
            module.named_parameters(), gradient_dtype=gradient_dtype, optional=optional
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module; nothing is communicated."""
        return self.module(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Zero the gradient buffers, before the first backward pass of an iteration.

        The gradients stay views of the buffers; `set_to_none` is part of torch's signature only.
        """
        del set_to_none
        self.gradients.zero()

    def all_reduce(self) -> None:
        """Sum the gradients over data-parallel ranks, after the last backward pass."""
        self.gradients.all_reduce(self.dp_group)

    def check_replicas_agree(self) -> None:
        """Compare all parameters bit by bit over data-parallel ranks, by digest.

        Costs a copy of the parameters to the CPU; gathers 8 bytes per parameter.

        Raises:
            NumericsError: on every rank, naming parameters that differ.
        """
        if self.dp_group.size == 1:
            return
        mine = [(name, _digest(parameter)) for name, parameter in self.module.named_parameters()]
        everyone = all_gather_object(mine, self.dp_group)
        differing = [
            name
            for index, (name, _) in enumerate(mine)
            if any(
                len(other) != len(mine) or other[index] != everyone[0][index] for other in everyone
            )
        ]
        if differing:
            odd = [
                rank for rank, theirs in zip(self.dp_group.ranks, everyone) if theirs != everyone[0]
            ]
            raise NumericsError(
                "the data-parallel replicas hold different weights",
                found=f"{len(differing)} of {len(mine)} parameters, "
                f"{', '.join(differing[:_NAMES_SHOWN])}, on ranks {odd} against "
                f"rank {self.dp_group.ranks[0]}",
                fix="resume from the last checkpoint; if it comes back on the same rank, take that "
                "machine out",
            )


def _digest(tensor: Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1)
    if not flat.numel():
        return 0
    return xxhash.xxh3_64_intdigest(flat.cpu().view(torch.uint8).numpy().data)
