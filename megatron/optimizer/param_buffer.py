"""Parameters in flat buffers, of which every replica updates its own share and gathers the rest.

The layout is that of the gradients, so a rank owns the same elements of both. A parameter's `data`
becomes a view of its buffer: build optimizers after this, and give a parameter no other `data`.
While a gather is under way the shares of other ranks must not be read; call `wait_for` before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.mpu.collectives import Pending, start_all_gather
from megatron.mpu.context import Group
from megatron.optimizer.buckets import Bucket, ElementRange, owned_ranges
from megatron.optimizer.grad_buffer import Flat


@dataclass(slots=True, eq=False)
class _Gather:
    """One bucket of parameters, and the collective that updates it, if one runs."""

    values: Tensor
    bucket: Bucket
    group: Group
    pending: Pending | None = None

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class ParameterBuffer:
    """The parameters of `flats`, and which of their elements this rank owns among their group.

    Args:
        module: holds the parameters; whatever reads them in its forward pass is a module.
        overlap: gather buckets during the next forward pass: a module that has parameters waits
            for them when it is called. Parameters that are `held` (tied ones, which are also read
            without calling their module) are waited for at once.
    """

    def __init__(self, module: nn.Module, flats: Sequence[Flat], *, overlap: bool) -> None:
        self._overlap = overlap
        self._gathers: list[_Gather] = []  # in the order of their first use in a forward pass
        self._gather_of: dict[Parameter, _Gather] = {}
        self._owned: dict[Parameter, ElementRange] = {}
        for flat in flats:
            values, group = _move(flat), flat.group
            self._owned |= zip(flat.parameters, owned_ranges(flat.plan, group.rank, group.size))
            for bucket in reversed(flat.plan.buckets):
                gather = _Gather(values, bucket, group)
                self._gathers.append(gather)
                self._gather_of |= dict.fromkeys(
                    (flat.parameters[member] for member in bucket.members), gather
                )
        self._gathers.sort(key=lambda gather: not gather.bucket.held)
        if overlap:
            for part in module.modules():
                if any(parameter in self._gather_of for parameter in part._parameters.values()):
                    part.register_forward_pre_hook(self._before_forward)

    def owned(self, parameter: Parameter) -> ElementRange:
        """Return the flattened elements of `parameter` that this rank updates; may be none."""
        return self._owned[parameter]

    def values(self, parameter: Parameter) -> Tensor:
        """Return those elements: [owned], a view."""
        return parameter.detach().view(-1)[slice(*self._owned[parameter])]

    def gather(self) -> None:
        """Send every rank's share to all others after an update; may return early."""
        for gather in self._gathers:
            start, stop = gather.bucket.share(gather.group.rank, gather.group.size)
            whole = gather.values[slice(*gather.bucket.range)]
            gather.pending = start_all_gather(gather.values[start:stop], gather.group, out=whole)
        for gather in self._gathers:
            if gather.bucket.held or not self._overlap:
                gather.wait()

    def wait_for(self, parameters: Iterable[Parameter | None]) -> None:
        """Return once `parameters` may be read; others, and None, are ignored."""
        for parameter in parameters:
            gather = self._gather_of.get(parameter) if parameter is not None else None
            if gather is not None:
                gather.wait()

    def wait(self) -> None:
        """Return once all parameters may be read."""
        for gather in self._gathers:
            gather.wait()

    def _before_forward(self, module: nn.Module, inputs: object) -> None:
        del inputs
        self.wait_for(module._parameters.values())


def _move(flat: Flat) -> Tensor:
    """Move the parameters of `flat` into a new buffer of its layout, and return it."""
    first = flat.parameters[0]
    values = torch.zeros(flat.plan.elements, dtype=first.dtype, device=first.device)
    for index, parameter in enumerate(flat.parameters):
        view = flat.place(index, values)
        view.copy_(parameter.detach())
        parameter.data = view
    return values
