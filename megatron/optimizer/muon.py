"""Muon over the slots of an optimizer: the running mean of each matrix, made orthogonal.

Jordan et al. 2024, kellerjordan.github.io/posts/muon. Singular values of the mean are brought near
to 1 by Newton-Schulz steps, in the dtype of the weight. Matrices that ranks have parts of are put
together first and orthogonalized by each of these ranks, so the layout changes no number.
Replicas all do the same work.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.config.optimizer import MuonCoefficients, MuonScaleMode, OptimizerConfig
from megatron.mpu.collectives import all_gather
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import (
    EXPERTS,
    Partition,
    join_slices,
    local_slice,
    partition_of,
    row_runs,
)
from megatron.optimizer.param_groups import is_decayed
from megatron.optimizer.slots import Slot, StepScalars

# Of a step that takes singular values x to a x + b x^3 + c x^5, one after the other, over and over.
COEFFICIENTS: Mapping[MuonCoefficients, tuple[tuple[float, float, float], ...]] = {
    # Chosen for the largest slope at 0 (Jordan et al. 2024).
    MuonCoefficients.SIMPLE: ((3.4445, -4.7750, 2.0315),),
    # Five steps tuned together, as Megatron-LM's default.
    MuonCoefficients.QUINTIC: (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}
_SMALLEST_NORM = 1e-7  # a matrix of zeros stays one; as in torch.optim.Muon
_TABLES = ("embedding", "output")  # first words of the names of word and position tables


class MuonRule(NamedTuple):
    """The numbers of an update that the host knows."""

    rate: float
    decay: float
    config: OptimizerConfig


def is_matrix(name: str, parameter: Parameter) -> bool:
    """Return whether Muon updates a parameter: a matrix, or a stack of them, that is no table."""
    return is_decayed(name, parameter) and name.partition(".")[0] not in _TABLES


def orthogonalize(matrices: Tensor, coefficients: Sequence[tuple[float, float, float]]) -> Tensor:
    """Return matrices [.., rows, columns] with the same singular vectors and values near 1."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    norms = wide.square().sum(dim=(-2, -1), keepdim=True).sqrt()
    wide = wide / norms.clamp_min(_SMALLEST_NORM)  # no singular value is above 1 now
    for a, b, c in coefficients:
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * (gram @ gram)) @ wide
    return wide.mT if is_tall else wide


def scale(rows: int, columns: int, mode: MuonScaleMode) -> float:
    """Return the factor on the orthogonal matrix of an update."""
    match mode:
        case MuonScaleMode.SPECTRAL:
            return float(max(rows, columns) ** 0.5)
        case MuonScaleMode.UNIT_RMS_NORM:
            return float((rows / columns) ** 0.5)
        case MuonScaleMode.SHAPE_SCALING:
            return float(max(1.0, rows / columns) ** 0.5)


@torch.no_grad()
def update_slots(
    slots: Sequence[Slot],
    gradients: Mapping[str, Tensor],
    rule: MuonRule,
    scalars: StepScalars,
    ctx: ParallelContext,
) -> None:
    """Update weights, means and the model's half-precision parameters.

    Ranks with parts of the same matrices must call it together.

    Args:
        slots: of whole parameters of this rank, not of shares that replicas have of them.
        gradients: by the name of the slot, in its shape.
    """
    momentum = rule.config.muon_momentum
    for slot in slots:
        mean = slot.state["momentum_buffer"]
        gradient = scalars.counted(gradients[slot.name], slot.weight)
        new_mean = torch.lerp(gradient, mean, momentum)
        ahead = rule.config.muon_nesterov
        direction = torch.lerp(gradient, new_mean, momentum) if ahead else new_mean
        update = _update_of(direction, slot.parameter, rule.config, ctx)
        slot.take(slot.weight * (1 - rule.rate * rule.decay) - rule.rate * update, scalars.applied)
        mean.copy_(torch.where(scalars.applied, new_mean, mean))


def _update_of(
    direction: Tensor, parameter: Parameter, config: OptimizerConfig, ctx: ParallelContext
) -> Tensor:
    """Return this rank's part of the update in a direction, of which it has the same part."""
    group, partition = _split(parameter, ctx)
    parts = all_gather(direction[None], group).unbind()
    whole = join_slices(parts, partition)
    runs = None if config.muon_no_split_qkv else row_runs(parameter)
    coefficients = COEFFICIENTS[config.muon_coefficient_type]
    steps = list(islice(cycle(coefficients), config.muon_num_ns_steps))
    updates = []
    for matrix in _matrices(whole, runs):
        *_, rows, columns = matrix.shape
        factor = scale(rows, columns, config.muon_scale_mode) * config.muon_extra_scale_factor
        updates.append(orthogonalize(matrix, steps) * factor)
    update = updates[0] if runs is None else _in_runs(updates, runs).view_as(whole)
    return local_slice(update, partition, group.rank, group.size)


def _split(parameter: Parameter, ctx: ParallelContext) -> tuple[Group, Partition | None]:
    """Return the ranks with parts of the same matrices, and how those are split over them."""
    partition = partition_of(parameter)
    if partition is None:
        return ParallelContext.single().tp, None
    if partition.axis != EXPERTS:
        return ctx.axis(partition.axis), partition
    # Other experts are other matrices.
    within = partition.within
    if within is None:
        return ParallelContext.single().tp, None
    return ctx.etp, Partition("etp", within.dim, within.blocks)


def _matrices(whole: Tensor, runs: Sequence[int] | None) -> list[Tensor]:
    if runs is None:
        return [whole]
    columns = whole.shape[-1]
    return [
        of_one.reshape(-1, columns)
        for of_one in torch.split(whole.view(-1, sum(runs), columns), list(runs), dim=1)
    ]


def _in_runs(matrices: Sequence[Tensor], runs: Sequence[int]) -> Tensor:
    """Return the rows of matrices in runs again: [repetitions, rows of a repetition, columns]."""
    return torch.cat([m.view(-1, run, m.shape[-1]) for m, run in zip(matrices, runs)], dim=1)
