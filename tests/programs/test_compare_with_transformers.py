"""An export whose logits are right passes, one whose logits are wrong does not."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron import log
from megatron.checkpoint.formats.huggingface import HuggingFaceSource
from megatron.checkpoint.formats.huggingface_writer import write_huggingface
from megatron.checkpoint.formats.sharded_source import ShardedSource, write_sharded
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError, ConfigError
from tests.support.hf_models import CASES, save_case
from tools.compare_with_transformers import check_export, main


def exported(case: str, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint of ours, and the folder that was made from it."""
    with HuggingFaceSource(save_case(case, tmp_path / "given"), SourceOptions()) as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        return ours, write_huggingface(source, tmp_path / "made", WriteOptions(**options))


@pytest.mark.parametrize("case", CASES)
def test_an_export_of_every_family_passes(case: str, tmp_path: Path) -> None:
    ours, folder = exported(case, tmp_path)
    with ShardedSource(ours) as source:
        found = check_export(source, folder)
    assert found is not None
    assert found.apart <= 1e-4
    assert found.largest > 1


def test_an_export_that_was_rounded_passes(tmp_path: Path) -> None:
    ours, folder = exported("qwen3", tmp_path, dtype="BF16")
    with ShardedSource(ours) as source:
        assert check_export(source, folder) is not None


def test_an_export_that_computes_something_else_fails(tmp_path: Path) -> None:
    ours, folder = exported("gpt2", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"activation_function": "gelu"}))
    with (
        ShardedSource(ours) as source,
        pytest.raises(CheckpointError, match="does not compute from the exported folder"),
    ):
        check_export(source, folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    key = "transformer.h.1.attn.c_attn.weight"
    tensors[key] = tensors[key].flip(1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not compute from the exported folder"):
        main(["--load", str(ours), "--huggingface", str(folder)])


def test_without_transformers_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, folder = exported("gpt2", tmp_path)
    real, said = importlib.util.find_spec, []
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    monkeypatch.setattr(log, "warning", said.append)
    with ShardedSource(ours) as source:
        assert check_export(source, folder) is None
    assert "were not compared" in said[0]
    with pytest.raises(ConfigError, match="nothing to compare with"):
        main(["--load", str(ours), "--huggingface", str(folder)])
