"""The files of a Megatron checkpoint: all ranks there, of one save, and state of the right size."""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.formats.megatron.files import Key, MegatronFiles, RankFile, is_megatron
from megatron.errors import CheckpointError
from tests.support.checkpoints.megatron_files import Shape, save_megatron, whole_model


def _file(tmp_path: Path, content: Any) -> RankFile:
    path = tmp_path / "model_optim_rng.pt"
    torch.save(content, path)
    return RankFile(path)


def _content(**more: Any) -> dict[str, Any]:
    embedding = {"word_embeddings": {"weight": torch.zeros(4, 2)}}
    encoder = {"final_layernorm.weight": torch.zeros(2), "final_layernorm.bias": torch.zeros(2)}
    return {"model": {"language_model": {"embedding": embedding, "encoder": encoder}}, **more}


def _state(sizes: list[tuple[int, ...]], **more: Any) -> dict[str, Any]:
    return {
        number: {"exp_avg": torch.zeros(size), "exp_avg_sq": torch.zeros(size), **more}
        for number, size in enumerate(sizes)
    }


def test_names_are_flat_and_without_the_programs_own_prefixes(tmp_path: Path) -> None:
    file = _file(tmp_path, _content(args=argparse.Namespace(lr=1.0)))
    assert list(file.parameters) == [
        Key(0, "embedding.word_embeddings.weight"),
        Key(0, "encoder.final_layernorm.weight"),
        Key(0, "encoder.final_layernorm.bias"),
    ]
    assert file.args == {"lr": 1.0}
    assert file.optimizer is None
    wrapped = {"module.module.embedding.word_embeddings.weight": torch.zeros(4, 2)}
    chunks = _file(tmp_path, {"model0": wrapped, "model1": wrapped})
    assert [key.chunk for key in chunks.parameters] == [0, 1]
    assert chunks.args == {}


def test_a_file_without_a_model_is_refused(tmp_path: Path) -> None:
    for content in ({"args": 1}, [1, 2]):
        with pytest.raises(CheckpointError, match="does not hold what it should") as error:
            _file(tmp_path, content)
        assert "no model in it" in str(error.value.found)


@pytest.mark.parametrize("swapped", [False, True])
def test_groups_are_told_by_the_shapes_of_their_state(tmp_path: Path, swapped: bool) -> None:
    # One matrix and two vectors, in either order of groups.
    sizes: list[tuple[int, ...]] = [(2,), (2,), (4, 2)] if swapped else [(4, 2), (2,), (2,)]
    numbers = [[0, 1], [2]] if swapped else [[0], [1, 2]]
    groups = [{"params": group, "step": 5} for group in numbers]
    optimizer = {"state": _state(sizes), "param_groups": groups}
    shard = _file(tmp_path, _content(optimizer=optimizer)).optimizer
    assert shard is not None
    assert shard.steps == 5
    assert {key.name: tuple(t.shape) for key, t in shard.tensors["exp_avg"].items()} == {
        "embedding.word_embeddings.weight": (4, 2),
        "encoder.final_layernorm.weight": (2,),
        "encoder.final_layernorm.bias": (2,),
    }


def test_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    for sizes in ([(4, 2), (2,)], [(4, 3), (2,), (2,)]):
        groups = [{"params": [0]}, {"params": list(range(1, len(sizes)))}]
        optimizer = {"state": _state(sizes), "param_groups": groups}  # type: ignore[arg-type]
        file = _file(tmp_path, _content(optimizer=optimizer))
        with pytest.raises(CheckpointError) as error:
            file.optimizer  # noqa: B018
        assert "whose shapes are not those of the 1 matrices and 2 vectors" in str(
            error.value.found
        )


def test_updates_are_counted_in_groups_in_state_or_nowhere(tmp_path: Path) -> None:
    sizes: list[tuple[int, ...]] = [(4, 2), (2,), (2,)]
    groups = [{"params": [0]}, {"params": [1, 2]}]
    counted = {"state": _state(sizes, step=torch.tensor(6.0)), "param_groups": groups}
    shard = _file(tmp_path, _content(optimizer=counted)).optimizer
    assert shard is not None
    assert shard.steps == 6
    momenta = {n: {"momentum_buffer": torch.zeros(size)} for n, size in enumerate(sizes)}
    sgd = {"state": momenta, "param_groups": groups}
    shard = _file(tmp_path, _content(optimizer=sgd, iteration=8)).optimizer
    assert shard is not None
    assert (shard.steps, list(shard.tensors)) == (8, ["momentum_buffer"])
    uncounted = {"state": _state(sizes), "param_groups": groups}
    with pytest.raises(CheckpointError) as error:
        _file(tmp_path, _content(optimizer=uncounted)).optimizer  # noqa: B018
    assert "without the number of updates" in str(error.value.found)


def test_every_rank_has_to_be_there(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2, pp=2)
    files = MegatronFiles(directory)
    assert (files.tp, files.pp) == (2, 2)
    files.close()
    (directory / "mp_rank_01_000" / "model_optim_rng.pt").unlink()
    with pytest.raises(CheckpointError, match="lacks files of some ranks") as error:
        MegatronFiles(directory)
    assert "tensor rank 1 of stage 0" in str(error.value.found)


def test_experts_are_refused(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    (directory / "mp_rank_00").rename(directory / "mp_rank_00_000_000")
    with pytest.raises(CheckpointError, match="with experts, which is not read"):
        MegatronFiles(directory)


def test_files_that_cannot_be_mapped_are_kept_for_one_stage_at_a_time(tmp_path: Path) -> None:
    shape, model = Shape(), whole_model(Shape())
    directory = save_megatron(tmp_path, model, shape, tp=2, pp=2, legacy_files=True)
    assert is_megatron(directory)
    files = MegatronFiles(directory)
    first = files.rank(0, 0)
    assert files.rank(0, 0) is first
    files.rank(1, 0)
    assert files.rank(0, 0) is first
    files.rank(0, 1)
    assert files.rank(0, 0) is not first
