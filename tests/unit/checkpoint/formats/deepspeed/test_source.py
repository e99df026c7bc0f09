"""Folders made by hand: every grid, and everything that can be wrong with one.

Those of real engines are in tests/distributed/checkpoint/formats.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.deepspeed.format import DEEPSPEED
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.registry import open_source, recognise
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.deepspeed.toy import STEPS, whole_values, write_folder


def opened(folder: Path) -> DeepSpeedSource:
    return DeepSpeedSource(folder, SourceOptions())


@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 1, 1), (2, 1, 3), (1, 2, 2), (2, 2, 12)])
def test_every_tensor_is_put_together_at_every_grid(
    tp: int, pp: int, dp: int, tmp_path: Path
) -> None:
    expected = write_folder(tmp_path, tp=tp, pp=pp, dp=dp)
    with opened(tmp_path) as source:
        assert source.grid == (tp, pp, dp)
        assert set(source.tensors) == set(expected)
        for name, described in source.tensors.items():
            box = whole(described.global_shape)
            assert torch.equal(source.read(name, box), expected[name]), name
        names = [name for name in source.tensors if name.startswith("model/")]
        assert names[0].startswith("model/embedding.")
        assert names[-1].startswith("model/final_norm.")
        assert source.scalars["optimizer"]["steps"] == STEPS
        part = Box((1, 2), (4, 2))
        values = source.read("model/layers.0.mlp.fc1.weight", part)
        assert torch.equal(values, expected["model/layers.0.mlp.fc1.weight"][part.slices])


def test_a_folder_with_a_tracker_is_found_by_it(tmp_path: Path) -> None:
    write_folder(tmp_path / "global_step7")
    (tmp_path / "latest").write_text("global_step7")
    with open_source(tmp_path) as source:
        assert source.format_name == "deepspeed"
        assert source.directory.name == "global_step7"
    form = recognise(tmp_path / "global_step7")
    assert form is not None
    assert form.name == "deepspeed"
    assert not DEEPSPEED.recognise(tmp_path)


@pytest.mark.parametrize(
    "missing",
    ["mp_rank_01_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"],
)
def test_a_missing_file_is_named(missing: str, tmp_path: Path) -> None:
    write_folder(tmp_path, tp=2)
    (tmp_path / missing).unlink()
    with pytest.raises(CheckpointError, match=f"not complete.*\n.*{missing}"):
        opened(tmp_path)


def test_a_folder_without_model_states_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no model states"):
        opened(tmp_path)


def test_a_file_that_holds_something_else_is_said(tmp_path: Path) -> None:
    torch.save([1], tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="does not hold what it should"):
        opened(tmp_path)


def test_tied_copies_that_differ_are_not_read(tmp_path: Path) -> None:
    first, last = whole_values(), whole_values()
    last["embedding.word.weight"]["exp_avg"][3, 1] += 1
    write_folder(tmp_path, pp=2, values=first, last=last)
    source = opened(tmp_path)
    source.read("model/embedding.word.weight", Box((0, 0), (10, 4)))
    with pytest.raises(CheckpointError, match="copies of a tied weight differ"):
        source.read("optimizer/exp_avg/embedding.word.weight", Box((0, 0), (10, 4)))


def test_copies_that_drifted_apart_over_tp_are_said_and_the_first_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = write_folder(tmp_path, tp=2)
    other = tmp_path / "mp_rank_01_model_states.pt"
    state = torch.load(other)
    state["module"]["layers.0.input_norm.weight"] += 0.5
    torch.save(state, other)
    source = opened(tmp_path)
    name = "model/layers.0.input_norm.weight"
    for _ in range(2):
        assert torch.equal(source.read(name, Box((0,), (4,))), expected[name])
    output = capsys.readouterr()
    assert (output.out + output.err).count("that of rank 0 is taken") == 1


def test_files_of_two_steps_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tp=2, dp=1)
    path = tmp_path / "zero_pp_rank_0_mp_rank_01_optim_states.pt"
    share = torch.load(path, weights_only=False)
    share["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(share, path)
    with pytest.raises(CheckpointError, match="of different steps"):
        opened(tmp_path)


def test_a_parameter_with_elements_missing_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, dp=1)
    path = tmp_path / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    share = torch.load(path, weights_only=False)
    vars(share["optimizer_state_dict"]["param_slice_mappings"][0]["final_norm.bias"])["numel"] = 3
    torch.save(share, path)
    with pytest.raises(CheckpointError, match=r"do not make a parameter up.*\n.*final_norm.bias"):
        opened(tmp_path)


def test_a_flipped_byte_in_a_foreign_folder_is_found_by_its_checksums(tmp_path: Path) -> None:
    write_folder(tmp_path)
    source = opened(tmp_path)
    source.verify()
    path = tmp_path / "mp_rank_00_model_states.pt"
    data = bytearray(path.read_bytes())
    values = whole_values()["layers.0.attention.qkv.weight"]["master"]
    at = bytes(data).index(values.numpy().tobytes())
    data[at + 5] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match="mp_rank_00_model_states"):
        source.verify()


def test_a_class_that_could_run_something_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, state={"more": _Evil()})
    with pytest.raises(CheckpointError, match="names code that it is not allowed to run"):
        opened(tmp_path)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("was run",))
