"""tools/convert_checkpoint.py, started as a user would start it: any to any, or refused."""

import os
import sys
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.source import write_sharded
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model
from tests.support.checkpoints.sources import MemorySource, assert_same
from tests.support.launch import Ended, run_program

REPOSITORY = Path(__file__).parents[3]
TOOL = REPOSITORY / "tools" / "convert_checkpoint.py"
WRONG_FLAG, DAMAGED = 64, 66


def convert(*arguments: object, cwd: Path = REPOSITORY) -> Ended:
    return run_program([sys.executable, str(TOOL), *map(str, arguments)], cwd=cwd)


@pytest.fixture
def ours(tmp_path: Path) -> Path:
    write_sharded(MemorySource.of_gpt(optimizer=True, num_layers=4), tmp_path / "ours")
    return tmp_path / "ours"


def test_ours_goes_to_megatron_and_back_and_nothing_is_lost(ours: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "megatron", tmp_path / "back"
    ended = convert(
        *("--load", ours, "--save", there, "--format", "megatron"),
        *("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2),
        *("--make-vocab-size-divisible-by", 8),
        cwd=tmp_path,
    )
    assert ended.status == 0, ended.err
    assert "converted sharded to megatron" in ended.out
    assert len(list((there / "iter_0000010").glob("mp_rank_*_*/model_optim_rng.pt"))) == 4
    ended = convert("--load", there, "--save", back, "--format", "sharded")
    assert ended.status == 0, ended.err
    with registry.open_source(ours) as first, registry.open_source(back) as last:
        assert_same(last, first)
        assert (last.scalars, last.progress) == (first.scalars, first.progress)


def test_weights_alone_and_true_tokens(tmp_path: Path) -> None:
    save_megatron(tmp_path / "theirs", whole_model(Shape()), Shape(), tp=2)
    ended = convert(
        *("--load", tmp_path / "theirs", "--save", tmp_path / "ours", "--format", "sharded"),
        *("--true-vocab-size", 41, "--no-optim"),
    )
    assert ended.status == 0, ended.err
    with registry.open_source(tmp_path / "ours") as found:
        assert found.tensors["model/embedding.word.weight"].global_shape == (41, 16)
        assert all(name.startswith("model/") for name in found.tensors)


def test_damage_is_found_before_anything_is_written(ours: Path, tmp_path: Path) -> None:
    (file,) = ours.glob("iter_*/shard-*.safetensors")
    data = bytearray(file.read_bytes())
    data[-20] ^= 4
    file.write_bytes(data)
    ended = convert("--load", ours, "--save", tmp_path / "x", "--format", "megatron")
    assert ended.status == DAMAGED
    assert "the checkpoint is damaged" in ended.err
    assert file.name in ended.err
    assert not (tmp_path / "x").exists()


def test_what_cannot_be_is_said_exactly(ours: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, status, text in (
        (("--load", ours, "--save", out, "--format", "zip"), DAMAGED, "found: 'zip'"),
        (
            ("--load", tmp_path / "none", "--save", out, "--format", "megatron"),
            DAMAGED,
            "the folder to load a checkpoint from does not exist",
        ),
        (
            ("--load", ours, "--save", ours, "--format", "megatron"),
            WRONG_FLAG,
            "written over, or into, the one that is read",
        ),
        (
            (
                *("--load", ours, "--save", out, "--format", "megatron"),
                *("--pipeline-model-parallel-size", 3),
            ),
            DAMAGED,
            "found: 4 layers, 3 stages",
        ),
        (
            (
                *("--load", ours, "--save", out, "--format", "megatron"),
                *("--tensor-model-parallel-size", 0),
            ),
            WRONG_FLAG,
            "found: --tensor-model-parallel-size 0",
        ),
    ):
        ended = convert(*arguments)
        assert ended.status == status, ended.err
        assert text in ended.err
        assert not list(out.glob("*")) if out.exists() else True


def test_a_hostile_file_is_refused_and_not_run(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> object:
            return os.system, (f"touch {tmp_path / 'mark'}",)

    directory = save_megatron(tmp_path / "theirs", whole_model(Shape()), Shape())
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    torch.save({"model": {}, "args": Hostile()}, path)
    ended = convert("--load", tmp_path / "theirs", "--save", tmp_path / "x", "--format", "sharded")
    assert ended.status == DAMAGED
    assert "names posix.system; nothing of it was run" in ended.err
    assert not (tmp_path / "mark").exists()
