"""Weights that several pipeline stages hold: one sum of gradients, and equal bits for ever.

Initial values are equal by name, and equal gradients keep them so. The sum is taken before that
over data-parallel ranks, in the order of the stages, so that every holder gets the same bits.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.errors import NumericsError
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group
from megatron.pipeline.p2p import Exchanger, GroupExchanger, PipelineMessage


class _Shared(NamedTuple):
    name: str
    parameter: Parameter
    holders: tuple[int, ...]  # stages, in order


class TiedParameters:
    """The parameters that this stage shares with other stages, found by global name.

    Marks them `reduce_first`, which a gradient buffer reads when it is built: build this before.
    Gathers names over the pipeline group, so all its ranks must construct it together.

    Args:
        named: what may be shared; which of it is, depends on the other stages.
    """

    def __init__(
        self, named: Mapping[str, Parameter], group: Group, exchanger: Exchanger | None = None
    ) -> None:
        self._group = group
        self._exchanger = exchanger or GroupExchanger(group)
        by_stage = all_gather_object(sorted(named), group)
        self._shared = [
            _Shared(name, named[name], holders)
            for name in sorted(named)
            if len(holders := tuple(s for s, names in enumerate(by_stage) if name in names)) > 1
        ]
        for shared in self._shared:
            shared.parameter.reduce_first = True  # type: ignore[attr-defined]  # our vocabulary

    @property
    def names(self) -> tuple[str, ...]:
        """Global names of the parameters that other stages hold too."""
        return tuple(shared.name for shared in self._shared)

    def sum_gradients(self) -> None:
        """Sum the gradients of tied parameters over their stages, after the last backward pass."""
        trained = [shared for shared in self._shared if shared.parameter.requires_grad]
        gradients = [_main_grad(shared.parameter) for shared in trained]
        for gradient, parts in zip(gradients, self._from_all_holders(trained, gradients)):
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            gradient.copy_(total)

    def check_equal(self, values: Callable[[Parameter], Tensor] = Tensor.detach) -> None:
        """Compare tied weights bit by bit over the stages that hold them.

        Args:
            values: what a rank keeps of a parameter.

        Raises:
            NumericsError: on every stage, naming the weights that differ.
        """
        weights = [values(shared.parameter) for shared in self._shared]
        differing = [
            shared.name
            for shared, parts in zip(self._shared, self._from_all_holders(self._shared, weights))
            if not all(_equal_bits(part, parts[0]) for part in parts)
        ]
        found = {name for names in all_gather_object(differing, self._group) for name in names}
        if found:
            raise NumericsError(
                "pipeline stages hold different values of weights that they share",
                found=f"{', '.join(sorted(found))}, on ranks {list(self._group.ranks)}",
                fix="resume from the last checkpoint; if it comes back on the same ranks, this is "
                "a defect: please report it with your flags",
            )

    def _from_all_holders(
        self, shared: list[_Shared], own: list[Tensor]
    ) -> Iterator[tuple[Tensor, ...]]:
        """Return for each tensor of `own` those of all its stages, in the order of the stages."""
        me = self._group.rank
        whole = [tensor.contiguous() for tensor in own]
        found: list[dict[int, Tensor]] = []
        messages = []
        for (name, _, holders), tensor in zip(shared, whole):
            received = {stage: torch.empty_like(tensor) for stage in holders if stage != me}
            messages += [PipelineMessage(True, stage, (tensor,), name) for stage in received]
            messages += [
                PipelineMessage(False, stage, (room,), name) for stage, room in received.items()
            ]
            found.append(received | {me: tensor})
        self._exchanger.exchange(messages)
        return (tuple(by_stage[stage] for stage in sorted(by_stage)) for by_stage in found)


def _main_grad(parameter: Parameter) -> Tensor:
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None:
        gradient = parameter.grad
    assert gradient is not None  # noqa: S101  # invariant: a backward pass has been
    return gradient


def _equal_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))
