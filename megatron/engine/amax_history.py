"""Histories of the largest values of operands, from which the scales of the next step come.

The recipe is Transformer Engine's delayed scaling (its documentation, "FP8 Delayed Scaling"): a
scale is that of the largest value in the last steps, or of the newest one. What a reader would get
wrong: a step that is void leaves the histories as they are, which is decided on the device.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron import device
from megatron.config.fp8 import AmaxAlgorithm, Fp8Config
from megatron.json_values import JsonObject
from megatron.mpu.collectives import all_reduce
from megatron.mpu.context import Group
from megatron.ops.fp8_products import Fp8Products, OperandHistory

_STEPS = "steps"
_OPERANDS = 3  # input, weight and gradient of the output


class AmaxHistories:
    """The histories of all layers of a model, which every rank holds.

    So one reduction over all ranks serves tensor- and data-parallel ranks, and a checkpoint does
    not depend on the layout.

    Args:
        names: of the layers of the whole model, in the same order on all ranks.
        products: those of this rank's layers, by the same names.
        world: all ranks.
    """

    def __init__(
        self,
        names: Sequence[str],
        products: Mapping[str, Fp8Products],
        config: Fp8Config,
        world: Group,
    ) -> None:
        self._names, self._world = tuple(names), world
        self._algorithm = config.amax_algorithm
        self._started = 0  # steps, whether they were void or not
        here, shape = device.current(), (len(names), _OPERANDS)
        self._values = torch.zeros(*shape, config.history_length, device=here)  # newest first
        self._before, self._seen = torch.zeros(shape, device=here), torch.zeros(shape, device=here)
        self._histories = dict[int, OperandHistory]()
        for at, name in enumerate(names):
            if name in products:
                self._histories[at] = products[name].history = OperandHistory(self._seen[at])

    def advance(self, applied: Tensor) -> None:
        """Add the largest values of a step over all ranks, unless it was void.

        Args:
            applied: whether it was not, on the device.
        """
        all_reduce(self._seen, self._world, op="max")
        moved = torch.cat((self._seen[..., None], self._values[..., :-1]), dim=-1)
        self._values.copy_(torch.where(applied, moved, self._values))
        self._seen.zero_()
        self._started += 1
        self._publish()

    def forget(self) -> None:
        """Forget the largest values of passes that belong to no step."""
        self._seen.zero_()

    def by_layer(self) -> dict[str, Tensor]:
        """Return the live histories [3, steps] by layer, newest first."""
        return dict(zip(self._names, self._values))

    def scalars(self) -> JsonObject:
        """Return how many steps were started: with none, the histories say nothing."""
        return {_STEPS: self._started}

    def restored(self, scalars: JsonObject) -> None:
        """Take over histories that were filled in place; without scalars they are empty."""
        started = scalars.get(_STEPS, 0)
        assert isinstance(started, int)  # noqa: S101  # invariant: `scalars` wrote it
        self._started = started
        if started:
            self._publish()

    def _publish(self) -> None:
        is_max = self._algorithm is AmaxAlgorithm.MAX
        self._before.copy_(self._values.amax(dim=-1) if is_max else self._values[..., 0])
        for at, history in self._histories.items():
            if history.before is None:
                history.before = self._before[at]
