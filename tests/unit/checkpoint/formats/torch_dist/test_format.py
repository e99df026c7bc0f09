"""The record of `torch_dist`, and what works with any record, on one of its folders."""

import json
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.source import ShardedSource
from megatron.checkpoint.formats.torch_dist.format import FORMAT
from megatron.checkpoint.load.stored_run import flags_of_checkpoint, stored_run
from tests.support.checkpoints.megatron_files import Shape, check_parameters, whole_model
from tests.support.checkpoints.torch_dist_folders import save_torch_dist
from tools import convert_checkpoint, inspect_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_torch_dist(tmp_path / "core", whole_model(Shape()), Shape())
    return tmp_path / "core"


def test_a_folder_is_recognised_whole_or_not(folder: Path) -> None:
    directory = folder / "iter_0000010"
    assert registry.format_of(folder) is FORMAT
    (directory / "metadata.json").rename(folder / "aside")
    assert FORMAT.recognise(directory)
    (folder / "aside").rename(directory / "metadata.json")
    (directory / ".metadata").unlink()
    assert FORMAT.recognise(directory)
    for path in directory.glob("*.distcp"):
        path.unlink()
    assert not FORMAT.recognise(directory)


def test_tools_convert_and_show_it(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--load", str(folder), "--save", str(tmp_path / "ours"), "--format", "sharded"]
    monkeypatch.setattr(sys, "argv", ["convert_checkpoint.py", *flags, "--true-vocab-size", "41"])
    convert_checkpoint.main()
    with registry.open_source(tmp_path / "ours") as source:
        assert isinstance(source, ShardedSource)
        check_parameters(source, whole_model(Shape()), "model/", 41)
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["inspect_checkpoint.py", str(folder), "--json"])
    inspect_checkpoint.main()
    shown = json.loads(capsys.readouterr().out)
    assert "layers.3.mlp.fc2.bias" in json.dumps(shown)


def test_flags_of_a_run_are_taken_from_it(folder: Path) -> None:
    run = stored_run(folder)
    assert (run.config.model.num_layers, run.config.model.hidden_size) == (4, 16)
    taken = flags_of_checkpoint({"load": str(folder), "finetune": True})
    assert taken["num_attention_heads"] == 4
