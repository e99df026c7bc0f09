"""The commit of a folder in DeepSpeed's layout, with a stand-in for DeepSpeed.

Real engines: tests/distributed/checkpoint/formats/deepspeed/test_save.py.
"""

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.folder import run_folder as folder
from megatron.checkpoint.formats.deepspeed import save as deepspeed_save
from megatron.checkpoint.formats.deepspeed.parameters import RECORD
from megatron.checkpoint.formats.deepspeed.save import DurableWriter, Live, save_deepspeed
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.formats.registry import locate
from megatron.checkpoint.sharded import GeneratorStates, ShardedTensor, Snapshot
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from megatron.mpu.context import ParallelContext
from tests.unit.checkpoint.formats.deepspeed.toy import MODEL, write_folder


class Straw:
    """Writes a toy folder through the writer, as DeepSpeed's engine would its own."""

    def __init__(self, scratch: Path) -> None:
        self.tensors = write_folder(scratch, dp=2)
        self.files = {path.name: torch.load(path, weights_only=False) for path in scratch.iterdir()}
        self.parameters = DeepSpeedSource(scratch, SourceOptions()).facts.record.parameters

    def write(self, there: Path, tag: str, state: dict[str, Any], writer: DurableWriter) -> None:
        for name, content in self.files.items():
            if "model_states" in name:
                content = content | state
            writer.save(content, str(there / tag / name))

    def save(self, there: Path, iteration: int, **more: Tensor) -> Path:
        tensors = (self.tensors | more).items()
        snapshot = Snapshot(
            tensors=tuple(ShardedTensor.of(name, tensor) for name, tensor in tensors),
            progress={"iteration": iteration, "consumed_samples": 8, "skipped_iterations": 0},
            config={"model": MODEL},
            scalars={"optimizer": {"steps": 7, "loss_scaler": {}}},
            generators=GeneratorStates({"cpu": torch.arange(3)}, {"rank": 0}),
            data={"corpus": "digest"},
        )
        live = Live(self.parameters, (), self.write)
        context = ParallelContext.single()
        done = save_deepspeed(str(there), snapshot, live, iteration=iteration, ctx=context)
        assert done.iteration == iteration
        assert done.bytes == sum(p.stat().st_size for p in done.directory.iterdir()
                                 if p.name != "megatron.json")  # fmt: skip
        return Path(str(done.directory))


@pytest.fixture
def straw(tmp_path: Path) -> Straw:
    return Straw(tmp_path / "scratch")


def test_the_folder_the_seal_and_both_trackers_appear(straw: Straw, tmp_path: Path) -> None:
    there = tmp_path / "save"
    made = straw.save(there, 10)
    assert made == there / "global_step10" == locate(there)
    assert (there / "latest").read_text() == "global_step10"
    assert (there / folder.TRACKER).read_text() == "10\n"
    with DeepSpeedSource(made, SourceOptions()) as source:
        source.verify()
        assert source.seal is not None
        assert source.seal.data == {"corpus": "digest"}
        assert source.seal.generators == ("generators-00000.safetensors",)
        assert source.facts.record.iteration == 10
    state = torch.load(made / "mp_rank_00_model_states.pt")
    assert (state["global_steps"], state["global_samples"], state["iteration"]) == (10, 8, 10)
    assert RECORD in state


def test_the_same_iteration_is_replaced_and_an_older_one_can_be_asked_for(
    straw: Straw, tmp_path: Path
) -> None:
    there = tmp_path / "save"
    for iteration in (5, 10, 10):
        straw.save(there, iteration)
    assert locate(there) == there / "global_step10"
    assert locate(there, 5) == there / "global_step5"
    names = {path.name for path in there.iterdir()}
    assert names == {"global_step5", "global_step10", "latest", folder.TRACKER}


def test_an_error_of_the_writer_ends_the_save_and_the_former_stays(
    straw: Straw, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "save"
    straw.save(there, 5)

    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(deepspeed_save.torch_file, "save", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        straw.save(there, 10)
    assert {path.name for path in there.iterdir()} == {"global_step5", "latest", folder.TRACKER}
    assert locate(there) == there / "global_step5"


def test_what_deepspeed_raises_ends_the_save_with_its_words(straw: Straw, tmp_path: Path) -> None:
    straw.files = {"mp_rank_00_model_states.pt": 3}  # to which no state can be joined
    with pytest.raises(CheckpointError, match="unsupported operand"):
        straw.save(tmp_path / "save", 10)
    assert list((tmp_path / "save").iterdir()) == []


def test_what_deepspeed_did_not_write_is_missed(straw: Straw, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not hold all of the run\n.*model/more"):
        straw.save(tmp_path / "save", 5, **{"model/more": torch.zeros(2)})


def test_a_damaged_file_of_ours_is_found_by_its_length_and_its_digest(
    straw: Straw, tmp_path: Path
) -> None:
    made = straw.save(tmp_path / "save", 5)
    path = made / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=path.name):
        DeepSpeedSource(made, SourceOptions()).verify()
    path.write_bytes(bytes(data[:-1]))
    with pytest.raises(CheckpointError, match=path.name):
        DeepSpeedSource(made, SourceOptions())


def test_a_crashed_save_is_swept_away_by_the_next(straw: Straw, tmp_path: Path) -> None:
    there = tmp_path / "save"
    (there / ".global_step5.partial-0123abcd").mkdir(parents=True)
    (there / ".global_step4.replaced-0123abcd").mkdir()
    straw.save(there, 10)
    names = {path.name for path in there.iterdir()}
    # What had been moved aside is back, because nothing took its place.
    assert names == {"global_step10", "global_step4", "latest", folder.TRACKER}


def test_trackers_that_disagree_are_said(
    straw: Straw, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "save"
    straw.save(there, 5)
    straw.save(there, 10)
    (there / folder.TRACKER).write_text("5\n")  # as if a save had been cut short between the two
    assert locate(there) == there / "global_step5"
    output = capsys.readouterr()
    assert "DeepSpeed's `latest` global_step10" in output.out + output.err
