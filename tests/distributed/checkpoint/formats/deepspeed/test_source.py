"""Folders that real DeepSpeed engines wrote, read without DeepSpeed: every tensor, bit for bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.source import CheckpointSource, SourceOptions
from tests.support.checkpoints.deepspeed_folders import GATED, SEQUENCE, STEPS, Case, write

ON_CPU = {"device": "cpu"}


def assert_holds(source: CheckpointSource, truth: dict[str, Tensor]) -> None:
    assert set(source.tensors) == set(truth)
    for name, described in source.tensors.items():
        assert described.global_shape == tuple(truth[name].shape), name
        values = source.read(name, whole(described.global_shape))
        assert values.dtype == truth[name].dtype, name
        assert not values.requires_grad, name  # a target that it is copied into would take part
        assert torch.equal(values, truth[name]), name


@pytest.mark.parametrize(
    "case",
    [
        Case(stage=0, tp=2),
        Case(stage=0, dp=2, precision="bf16", model=GATED),
        Case(stage=1, tp=2, dp=2),
        Case(stage=1, tp=2, dp=2, precision="bf16", model=GATED),  # DeepSpeed's BF16_Optimizer
        Case(stage=2, dp=2, precision="bf16"),
        Case(stage=2, tp=2, model=GATED),
        Case(stage=2, dp=3, zero=(("round_robin_gradients", True),)),
        Case(stage=3, tp=2, dp=2, model=GATED),
        Case(stage=3, dp=2, precision="bf16"),
        Case(stage=1, dp=2, zero=(("elastic_checkpoint", True),)),
        Case(
            stage=3,
            dp=2,
            zero=tuple((f"offload_{what}", ON_CPU) for what in ("optimizer", "param")),
        ),
    ],
    ids=lambda case: f"zero{case.stage}-tp{case.tp}-dp{case.dp}-{case.precision}",
)
def test_what_deepspeed_saved_is_read_at_every_stage_grid_and_precision(
    case: Case, tmp_path: Path
) -> None:
    truth = write(case, tmp_path)
    source = DeepSpeedSource(tmp_path / f"global_step{STEPS}", SourceOptions())
    assert_holds(source, truth)
    assert source.scalars["optimizer"]["steps"] == STEPS
    assert source.progress["iteration"] == STEPS
    # A box in the middle of a matrix, across ranks and shares.
    box = Box((3, 2), (SEQUENCE - 4, 9))
    name = "model/layers.1.attention.output.weight"
    assert torch.equal(source.read(name, box), truth[name][box.slices])
