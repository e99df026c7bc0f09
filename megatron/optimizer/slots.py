"""A rank's part of the update of one parameter: its values, and what the optimizer keeps of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.ops.adamw import join_halves, split_halves
from megatron.optimizer.buckets import ElementRange

MASTER = "master"


class StepScalars(NamedTuple):
    """What the device knows of an update, as scalars of it.

    `factor` turns gradients into those that count, `applied` is whether the update counts, `steps`
    how many have, this one included.
    """

    factor: Tensor
    applied: Tensor
    steps: Tensor

    def counted(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """Return a gradient as it counts, in shape and dtype of the weight; not in place."""
        return gradient.view_as(weight).to(weight.dtype) * self.factor.to(weight.dtype)


@dataclass(frozen=True, slots=True)
class Slot:
    """This rank's part of the update of a parameter, and the tensors the update rule works on.

    `values` is the parameter itself or, of a sharded one, `owned` elements of it, flat. `weight` is
    `values` or its fp32 master, and `state` what the rule keeps of it. State and master of a slot
    that is `on_host` are in host memory. With a `room`, memory that nothing else needs between two
    steps, `weight` is the lower half of the master (`ops/adamw.py`), of which the upper half is
    `values`; whoever reads or writes the master finds it in the room.
    """

    name: str
    parameter: Parameter
    owned: ElementRange | None
    values: Tensor
    weight: Tensor
    state: dict[str, Tensor]
    on_host: bool = False
    room: Tensor | None = None

    @property
    def has_master(self) -> bool:
        """Whether the rule works on a wider copy of the values."""
        return self.weight is not self.values

    def take(self, weight: Tensor, applied: Tensor) -> None:
        """Take over a new weight where the update counts, and round it into the model."""
        self.weight.copy_(torch.where(applied, weight, self.weight))
        if self.has_master:
            self.values.copy_(self.weight)

    def refresh_master(self) -> None:
        """Take the values for the master."""
        if self.room is not None:
            self.weight.zero_()
        elif self.has_master:
            self.weight.copy_(self.values)

    def put_together(self) -> None:
        """Write the master into the room, if there is one."""
        if self.room is not None:
            join_halves(self.values, self.weight, out=self.room)

    def take_apart(self) -> None:
        """Take over the master in the room, if there is one, and round it into the model."""
        if self.room is not None:
            split_halves(self.room, self.values, self.weight)

    def kept(self) -> Iterator[Tensor]:
        """Yield the tensors that the optimizer has memory for."""
        for kind, tensor in self.tensors().items():
            yield self.weight if kind == MASTER else tensor

    def tensors(self) -> dict[str, Tensor]:
        """Return the state as others see it, by kind; the master in the room, if there is one."""
        # torch's SGD notes the momentum that it does not have.
        state = {kind: tensor for kind, tensor in self.state.items() if isinstance(tensor, Tensor)}
        if not self.has_master:
            return state
        return {**state, MASTER: self.weight if self.room is None else self.room}
