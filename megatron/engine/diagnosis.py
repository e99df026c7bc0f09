"""Computes passes of a step again, to find where a number went wrong.

Two questions are answered: where the first number that is not finite appears, and whether a machine
computes the same bits twice. Nothing of the run changes. What a reader would get wrong: the
weights are those of the moment, so a step whose report was read late is computed again with the
update of the step after it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megatron.engine.base import RawBatch, StepPlan
from megatron.engine.module_trace import TensorKind, observed
from megatron.errors import MachineError
from megatron.model.stage import PipelineStage
from megatron.mpu.collectives import all_gather_object
from megatron.mpu.context import Group

# Computes the passes of a step again, a few micro-batches at a time; yields the number of the first
# of them, and the totals and counts of their losses. Gradients are then those of these alone.
Repeat = Callable[[Sequence[RawBatch], StepPlan], Generator[tuple[int, list[Tensor]], None, None]]
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class BadTensor(NamedTuple):
    """Something wrong with one tensor of one rank; the smallest of several came first.

    Attributes:
        kind: what the tensor is.
        place: of its layer, in the order in which all stages compute this kind.
        number: of the tensor, in the order in which this rank computed them.
        rank: where.
        text: which tensor, and what is wrong.
    """

    kind: TensorKind
    place: int
    number: int
    rank: int
    text: str

    @property
    def moment(self) -> tuple[int, int, int]:
        """When it came, to compare ranks by."""
        return (self.kind, self.place, self.number)


class StepDiagnosis:
    """Passes of a step on this rank's stage, computed again by all ranks together.

    Args:
        values: what this rank keeps of a parameter.
    """

    def __init__(
        self,
        stage: PipelineStage,
        world: Group,
        repeat: Repeat,
        values: Callable[[nn.Parameter], Tensor],
    ) -> None:
        self._stage, self._world, self._repeat, self._values = stage, world, repeat, values

    def find_nonfinite(self, batches: Sequence[RawBatch], plan: StepPlan) -> str | None:
        """Return where the first number that is not finite appears; None where none does.

        The same on every rank. Stops at the first micro-batch that has one.
        """
        findings: list[BadTensor] = []
        numbers = count()

        def observe(name: str, kind: TensorKind, tensor: Tensor) -> None:
            number, is_finite = next(numbers), torch.isfinite(tensor)
            if not is_finite.all():
                text = f"{name or 'the model'}, {kind}: {_numbers(tensor, is_finite)}"
                findings.append(self._finding(name, kind, number, text))

        for name, parameter in self._stage.named_parameters():
            observe(name, TensorKind.PARAMETER, self._values(parameter))
        if (first := self._first_of_all(findings)) is not None:
            return f"rank {first.rank}, {first.text}"
        with observed(self._stage, observe), closing(self._repeat(batches, plan)) as passes:
            for microbatch, losses in passes:
                self._observe_results(losses, observe)
                if (first := self._first_of_all(findings)) is not None:
                    return f"rank {first.rank}, micro-batch {microbatch}, {first.text}"
        return None

    def check_repeats(self, batches: Sequence[RawBatch], plan: StepPlan) -> None:
        """Compute the first micro-batch of a step twice and compare all bits, on every rank.

        Raises:
            MachineError: on every rank, naming the ranks where they differed first.
        """
        names, before = self._checksums(batches, plan)
        _, after = self._checksums(batches, plan)
        findings = [
            self._finding(name, kind, at, f"{name or 'the model'}, {kind}")
            for at, ((name, kind), one, other) in enumerate(zip(names, before, after))
            if one != other
        ]
        of_ranks = all_gather_object(min(findings, default=None), self._world)
        differing = [one for one in of_ranks if one is not None]
        if not differing:
            return
        first = min(differing)
        ranks = [one.rank for one in differing if one.moment == first.moment]
        others = [one.rank for one in differing if one.rank not in ranks]
        raise MachineError(
            "a machine computed other numbers the second time, from the same weights and samples",
            found=f"first on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: "
            f"{first.text}" + (f"; later also on {', '.join(map(str, others))}" if others else ""),
            fix="start again from the last checkpoint, and leave the node of that rank out",
        )

    def _checksums(
        self, batches: Sequence[RawBatch], plan: StepPlan
    ) -> tuple[list[tuple[str, TensorKind]], list[int]]:
        """Return the names and the sums of the bits of all tensors of a first micro-batch."""
        names: list[tuple[str, TensorKind]] = []
        sums: list[Tensor] = []

        def observe(name: str, kind: TensorKind, tensor: Tensor) -> None:
            names.append((name, kind))
            # Sums of integers do not depend on their order, and one bit changes them.
            bits = tensor.detach().contiguous().view(_INTEGERS[tensor.element_size()])
            sums.append(bits.sum(dtype=torch.int64))

        with observed(self._stage, observe), closing(self._repeat(batches, plan)) as passes:
            _, losses = next(passes)
            self._observe_results(losses, observe)
            return names, torch.stack(sums).tolist()

    def _observe_results(
        self, losses: Sequence[Tensor], observe: Callable[[str, TensorKind, Tensor], None]
    ) -> None:
        for loss in losses:
            observe("", TensorKind.LOSS, loss)
        for name, parameter in self._stage.named_parameters():
            if parameter.requires_grad:
                observe(name, TensorKind.PARAMETER_GRADIENT, vars(parameter)["main_grad"])

    def _finding(self, name: str, kind: TensorKind, number: int, text: str) -> BadTensor:
        place = self._stage.place_of(name)
        is_backward = kind is TensorKind.OUTPUT_GRADIENT
        return BadTensor(kind, -place if is_backward else place, number, self._world.rank, text)

    def _first_of_all(self, findings: Sequence[BadTensor]) -> BadTensor | None:
        of_ranks = all_gather_object(min(findings, default=None), self._world)
        return min((one for one in of_ranks if one is not None), default=None)


def _numbers(tensor: Tensor, is_finite: Tensor) -> str:
    """Return how many numbers of a tensor are not finite, and the range of the others."""
    count, finite = tensor.numel() - int(is_finite.sum()), tensor[is_finite]
    text = f"{count} of {tensor.numel()} numbers are not finite"
    if not finite.numel():
        return text
    return f"{text}, the others are from {float(finite.min()):.3g} to {float(finite.max()):.3g}"
