"""Muon over slots: orthogonal updates, of which matrices, and torch's own Muon beside it."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from megatron.config.optimizer import (
    MuonCoefficients,
    MuonScaleMode,
    OptimizerConfig,
    OptimizerKind,
)
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import set_row_runs
from megatron.optimizer.muon import (
    COEFFICIENTS,
    MuonRule,
    is_matrix,
    orthogonalize,
    scale,
    update_slots,
)
from megatron.optimizer.slots import Slot, StepScalars
from tests.support.examples import examples

SINGLE = ParallelContext.single()
CONFIG = OptimizerConfig(optimizer=OptimizerKind.MUON)
SIMPLE = MuonCoefficients.SIMPLE
# torch orthogonalizes in bfloat16: five products, each rounded by 2^-9 of values up to 1.
TORCHS_ROUNDING = 0.03
QUINTIC = COEFFICIENTS[MuonCoefficients.QUINTIC]


def scalars(factor: float = 1.0, *, applied: bool = True) -> StepScalars:
    one = torch.ones((), dtype=torch.float64)
    return StepScalars(one * factor, torch.tensor(applied), one)


def slot_of(weight: torch.Tensor, name: str = "w") -> Slot:
    parameter = Parameter(weight)
    values = parameter.detach()
    return Slot(
        name, parameter, None, values, values, {"momentum_buffer": torch.zeros_like(values)}
    )


@pytest.mark.parametrize("kind", list(MuonCoefficients))
@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (9, 3), (2, 5, 3)], ids=str)
def test_singular_values_come_near_one_and_vectors_stay(
    kind: MuonCoefficients, shape: tuple[int, ...]
) -> None:
    drawn = torch.Generator().manual_seed(len(shape))
    matrix = torch.randn(shape, dtype=torch.float64, generator=drawn)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    orthogonal = orthogonalize(matrix, (QUINTIC if kind is not SIMPLE else COEFFICIENTS[kind] * 5))
    ours = left.mT @ orthogonal @ right.mT  # diagonal in the same vectors
    diagonal = ours.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(ours, torch.diag_embed(diagonal))
    # From a twentieth of the norm on.
    large = values > 0.05 * values.square().sum(-1, keepdim=True).sqrt()
    assert ((diagonal - 1).abs()[large] < 0.35).all(), diagonal


@examples(40)
@given(st.integers(1, 6), st.integers(1, 6), st.floats(1e-3, 1e3))
def test_size_does_not_matter_and_zeros_stay(rows: int, columns: int, factor: float) -> None:
    drawn = torch.Generator().manual_seed(rows * 7 + columns)
    matrix = torch.randn(rows, columns, dtype=torch.float64, generator=drawn)
    one, other = orthogonalize(matrix, QUINTIC), orthogonalize(factor * matrix, QUINTIC)
    torch.testing.assert_close(one, other)
    assert not orthogonalize(0 * matrix, QUINTIC).any()


def test_factors_by_shape() -> None:
    assert scale(8, 2, MuonScaleMode.SPECTRAL) == scale(2, 8, MuonScaleMode.SPECTRAL)
    assert scale(8, 2, MuonScaleMode.SPECTRAL) == math.sqrt(8)
    assert scale(8, 2, MuonScaleMode.UNIT_RMS_NORM) == 2
    assert scale(2, 8, MuonScaleMode.UNIT_RMS_NORM) == 0.5
    assert scale(8, 2, MuonScaleMode.SHAPE_SCALING) == 2
    assert scale(2, 8, MuonScaleMode.SHAPE_SCALING) == 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_torchs_own_muon_makes_the_same_updates_up_to_its_rounding(nesterov: bool) -> None:
    drawn = torch.Generator().manual_seed(3)
    start = torch.randn(12, 4, generator=drawn)
    config = dataclasses.replace(
        CONFIG,
        muon_nesterov=nesterov,
        muon_momentum=0.8,
        muon_coefficient_type=SIMPLE,
        muon_scale_mode=MuonScaleMode.SHAPE_SCALING,
    )
    slot, theirs = slot_of(start.clone()), Parameter(start.clone())
    torchs = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.2, momentum=0.8, nesterov=nesterov)
    for step in range(4):
        gradient = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
        before = slot.values.clone(), theirs.detach().clone()
        theirs.grad = gradient.clone()
        torchs.step()
        update_slots([slot], {"w": 0.5 * gradient}, MuonRule(0.1, 0.2, config), scalars(2), SINGLE)
        ours, expected = slot.values - before[0], theirs.detach() - before[1]
        assert float((ours - expected).norm() / expected.norm()) < TORCHS_ROUNDING


def test_queries_keys_and_values_are_matrices_of_their_own() -> None:
    drawn = torch.Generator().manual_seed(4)
    gradient = torch.randn(2 * (4 + 2 + 2), 5, dtype=torch.float64, generator=drawn)
    slot = slot_of(torch.zeros_like(gradient))
    set_row_runs(slot.parameter, (4, 2, 2))
    config = dataclasses.replace(CONFIG, muon_momentum=0.0)
    update_slots([slot], {"w": gradient}, MuonRule(1.0, 0.0, config), scalars(), SINGLE)
    groups, updates = gradient.view(2, 8, 5), -slot.values.view(2, 8, 5)
    for start, stop in ((0, 4), (4, 6), (6, 8)):
        rows = groups[:, start:stop].reshape(-1, 5)
        expected = orthogonalize(rows, QUINTIC) * math.sqrt(max(rows.shape))
        torch.testing.assert_close(updates[:, start:stop].reshape(-1, 5), expected)
    one = slot_of(torch.zeros_like(gradient))
    set_row_runs(one.parameter, (4, 2, 2))
    config = dataclasses.replace(config, muon_no_split_qkv=True)
    update_slots([one], {"w": gradient}, MuonRule(1.0, 0.0, config), scalars(), SINGLE)
    torch.testing.assert_close(-one.values, orthogonalize(gradient, QUINTIC) * 4)


def test_an_update_that_does_not_count_changes_nothing() -> None:
    slot = slot_of(torch.ones(2, 3))
    bad = {"w": torch.full((2, 3), math.nan)}
    update_slots([slot], bad, MuonRule(0.1, 0.2, CONFIG), scalars(applied=False), SINGLE)
    assert torch.equal(slot.values, torch.ones(2, 3))
    assert not slot.state["momentum_buffer"].any()


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("layers.0.mlp.fc1.weight", (4, 3), True),
        ("layers.0.mlp.experts.fc1.weight", (2, 4, 3), True),
        ("layers.0.mlp.experts.fc1.bias", (2, 4), False),
        ("layers.0.attention.query_norm.weight", (4,), False),
        ("embedding.word.weight", (8, 3), False),
        ("output.weight", (8, 3), False),
    ],
)
def test_tables_biases_and_norms_are_no_matrices(
    name: str, shape: tuple[int, ...], expected: bool
) -> None:
    assert is_matrix(name, Parameter(torch.zeros(shape))) is expected
