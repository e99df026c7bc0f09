"""Which file belongs to which rank, by its name."""

from pathlib import Path

import pytest

from megatron.checkpoint.formats.deepspeed.files import DeepSpeedFolder, FolderGrid, grid_of
from megatron.errors import CheckpointError


def touched(folder: Path, *names: str) -> DeepSpeedFolder:
    for name in names:
        (folder / name).write_bytes(b"")
    return DeepSpeedFolder.of(folder)


def test_ranks_are_numbers_whatever_their_length(tmp_path: Path) -> None:
    folder = touched(
        tmp_path,
        *(f"bf16_zero_pp_rank_{dp}_mp_rank_00_optim_states.pt" for dp in range(12)),
        "mp_rank_00_model_states.pt",
        "layer_01-model_00-model_states.pt",
        "layer_10-model_states.pt",
        "zero_to_fp32.py",
    )
    assert [dp for _, dp in sorted(folder.shares)] == list(range(12))
    assert set(folder.layers) == {(1, 0), (10, 0)}
    assert len(folder.files) == 15
    assert not folder.partitioned


def test_experts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds experts"):
        touched(tmp_path, "layer_3_expert_0_mp_rank_00_model_states.pt")


def test_files_of_two_precisions_are_refused(tmp_path: Path) -> None:
    names = [f"{p}zero_pp_rank_0_mp_rank_00_optim_states.pt" for p in ("", "bf16_")]
    with pytest.raises(CheckpointError, match="optimizer files of two precisions"):
        touched(tmp_path, *names)


def test_the_grid_is_told_by_a_record_or_by_deepspeed_or_by_the_names(tmp_path: Path) -> None:
    models = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(4)]
    folder = touched(tmp_path, *models)
    dimensions = {"checkpoint_parallel_dimensions": {"tp_degree": 2, "pp_degree": 2}}
    assert grid_of(folder, dimensions, None) == FolderGrid(2, 2, 1)
    assert grid_of(folder, dimensions, (4, 1)) == FolderGrid(4, 1, 1)
    assert grid_of(folder, {}, None) == FolderGrid(4, 1, 1)
    layers = [f"layer_0{at}-model_0{tp}-model_states.pt" for at in (1, 3) for tp in (0, 1)]
    folder = touched(tmp_path, *layers)
    assert grid_of(folder, {}, None) == FolderGrid(2, 2, 1)
    assert list(FolderGrid(2, 2, 1).ranks()) == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]


def test_a_layer_that_one_rank_did_not_write_is_missing(tmp_path: Path) -> None:
    models = [f"mp_rank_{rank:02d}_model_states.pt" for rank in range(2)]
    folder = touched(
        tmp_path, *models, "layer_01-model_00-model_states.pt",
        "layer_03-model_00-model_states.pt", "layer_03-model_01-model_states.pt",
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="layer_01-model_01-model_states"):
        grid_of(folder, {}, None)
