"""An export whose logits are right passes, one whose logits are wrong does not."""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from megatron import log
from megatron.checkpoint.folder import manifest
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError, ConfigError
from tests.support.checkpoints.hf_bert import CASES as BERTS
from tests.support.checkpoints.hf_bert import save_bert
from tests.support.checkpoints.hf_models import CASES, hf_model, save_case
from tools.compare_with_transformers import check_export, main

WITH_BOTH = [case for case, one in BERTS.items() if one.model.endswith("ForPreTraining")]


def exported(case: str, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """A checkpoint of ours, and the folder that was made from it."""
    return exported_from(save_case(case, tmp_path / "given"), tmp_path, **options)


def exported_from(given: Path, tmp_path: Path, **options: Any) -> tuple[Path, Path]:
    """The same of a folder that is there."""
    with HuggingFaceSource(given, SourceOptions()) as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        return ours, write_huggingface(source, tmp_path / "made", WriteOptions(**options))


@pytest.mark.parametrize("case", CASES)
def test_an_export_of_every_family_passes(case: str, tmp_path: Path) -> None:
    ours, folder = exported(case, tmp_path)
    with ShardedSource(ours) as source:
        found = check_export(source, folder)
    assert found is not None
    assert found.worst.apart <= 1e-4
    assert found.worst.largest > 1


@pytest.mark.parametrize("case", BERTS)
def test_an_export_of_every_bert_passes_in_all_that_it_computes(case: str, tmp_path: Path) -> None:
    ours, folder = exported_from(save_bert(case, tmp_path / "given"), tmp_path)
    with ShardedSource(ours) as source:
        found = check_export(source, folder)
    assert found is not None
    assert found.worst.apart <= 1e-4
    assert ("word scores" in found.outputs) is ("word" in case or case in WITH_BOTH)
    assert ("order scores" in found.outputs) is ("order" in case or case in WITH_BOTH)
    assert ("class scores" in found.outputs) is ("classes" in case)
    assert "hidden states" in found.outputs


@pytest.mark.parametrize(
    "key",
    [
        "bert.pooler.dense.bias",
        "cls.seq_relationship.bias",
        "cls.predictions.bias",
        "bert.embeddings.token_type_embeddings.weight",
    ],
)
def test_a_wrong_head_of_a_bert_fails(key: str, tmp_path: Path) -> None:
    ours, folder = exported_from(save_bert("bert", tmp_path / "given"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[key] = tensors[key].flip(0).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="does not compute from the exported folder"):
        main(["--load", str(ours), "--huggingface", str(folder)])


def test_a_learned_table_may_be_longer_than_what_is_compared(tmp_path: Path) -> None:
    """Without --max-position-embeddings it has as many rows as the samples had tokens."""
    model = hf_model("gpt2", n_positions=80)
    model.save_pretrained(tmp_path / "given")
    ours, folder = exported_from(tmp_path / "given", tmp_path)
    content, _ = manifest.load(ours)
    config = {name: dict(group) for name, group in content.config.items()}
    config["model"]["max_position_embeddings"] = None
    unsaid = manifest.encode(dataclasses.replace(content, config=config))
    (ours / manifest.NAME).write_bytes(unsaid)
    with ShardedSource(ours) as source:
        found = check_export(source, folder)
    assert found is not None
    assert found.tokens == 2 * 64


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
    real, messages = importlib.util.find_spec, []
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else real(name)
    )
    monkeypatch.setattr(log, "warning", messages.append)
    with ShardedSource(ours) as source:
        assert check_export(source, folder) is None
    assert "were not compared" in messages[0]
    with pytest.raises(ConfigError, match="nothing to compare with"):
        main(["--load", str(ours), "--huggingface", str(folder)])
