"""tools/average_checkpoints.py, started as a user would start it."""

import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.source import write_sharded
from megatron.checkpoint.source import WriteOptions
from tests.support.checkpoints.sources import MemorySource
from tests.support.launch import Ended, run_program

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "average_checkpoints.py"
WRONG_FLAG, DAMAGED = 64, 66


def average(*arguments: object) -> Ended:
    return run_program([sys.executable, str(TOOL), *map(str, arguments)], cwd=REPOSITORY)


@pytest.fixture
def save(tmp_path: Path) -> Path:
    for iteration in (10, 20):
        source = MemorySource.of_gpt(seed=iteration, optimizer=True)
        source.progress["iteration"] = iteration
        write_sharded(source, tmp_path / "save", WriteOptions(iteration=iteration))
    return tmp_path / "save"


def test_the_mean_of_two_iterations_is_a_checkpoint_of_weights(save: Path, tmp_path: Path) -> None:
    ended = average("--load", save, "--iterations", 10, 20, "--save", tmp_path / "mean")
    assert ended.status == 0, ended.err
    assert "averaged 2 checkpoints" in ended.out
    one, other = (MemorySource.of_gpt(seed=seed, optimizer=True) for seed in (10, 20))
    with registry.open_source(tmp_path / "mean") as found:
        assert found.progress["iteration"] == 20
        assert {name for name in one.values if name.startswith("model/")} == set(found.tensors)
        for name, known in found.tensors.items():
            expected = (one.values[name] + other.values[name]) / 2
            assert torch.equal(found.read(name, whole(known.global_shape)), expected), name


def test_what_cannot_be_averaged_is_said_exactly(save: Path, tmp_path: Path) -> None:
    write_sharded(MemorySource.of_gpt(hidden_size=16), tmp_path / "other")
    out = ("--save", tmp_path / "mean")
    for arguments, status, text in (
        (("--load", save, *out), DAMAGED, "there is nothing to average"),
        (
            ("--load", save, tmp_path / "other", *out),
            DAMAGED,
            "shape: model/embedding.word.weight is [11, 16]",
        ),
        (
            ("--load", save, "--iterations", 10, 30, *out),
            DAMAGED,
            "iteration 30 is not in the checkpoint folder",
        ),
        (
            ("--load", save, tmp_path / "other", "--iterations", 10, *out),
            WRONG_FLAG,
            "iterations were named, but not of which folder",
        ),
        (
            ("--load", save, "--iterations", 10, 20, "--save", save),
            WRONG_FLAG,
            "written over, or into, the one that is read",
        ),
    ):
        ended = average(*arguments)
        assert ended.status == status, ended.err
        assert text in ended.err
        assert not (tmp_path / "mean").exists()
