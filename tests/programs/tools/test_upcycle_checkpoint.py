"""tools/upcycle_checkpoint.py, started as a user would start it."""

import sys
from pathlib import Path

import torch

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.native.source import write_sharded
from megatron.config.model import ModelConfig
from megatron.model.init import draw, weight_init
from tests.support.checkpoints.sources import MemorySource
from tests.support.launch import ROOT, Ended, run_program

TOOL = ROOT / "tools" / "upcycle_checkpoint.py"
LLAMA = {
    "add_bias_linear": False,
    "swiglu": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}


def upcycle(*arguments: object) -> Ended:
    return run_program([sys.executable, str(TOOL), *map(str, arguments)], cwd=ROOT)


def test_experts_are_written_in_our_format_and_for_transformers(tmp_path: Path) -> None:
    dense = MemorySource.of_gpt(optimizer=True, **LLAMA)
    write_sharded(dense, tmp_path / "dense")
    flags = ("--load", tmp_path / "dense", "--num-experts", 3, "--seed", 5)
    ended = upcycle(*flags, "--save", tmp_path / "ours")
    assert ended.status == 0, ended.err
    assert "3 experts from each MLP" in ended.out
    with registry.open_source(tmp_path / "ours") as found:
        router = "layers.1.mlp.router.weight"
        values = found.read(f"model/{router}", whole((3, 8)))
        init = weight_init(ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2))
        assert torch.equal(values, draw(init, (3, 8), seed=5, name=router))
        assert all(name.startswith("model/") for name in found.tensors)
    ended = upcycle(*flags, "--save", tmp_path / "theirs", "--format", "huggingface")
    assert ended.status == 0, ended.err
    with registry.open_source(tmp_path / "theirs") as found:
        assert found.config["model"]["num_experts"] == 3


def test_what_cannot_be_upcycled_is_said(tmp_path: Path) -> None:
    write_sharded(MemorySource.of_gpt(), tmp_path / "dense")
    flags = ("--load", tmp_path / "dense", "--num-experts", 3)
    ended = upcycle(*flags, "--save", tmp_path / "out")
    assert ended.status == 0, ended.err
    again = ("--load", tmp_path / "out", "--save", tmp_path / "more", "--num-experts", 2)
    ended = upcycle(*again)
    assert ended.status == 66, ended.err
    assert "the model has experts already" in ended.err
    ended = upcycle(*flags, "--save", tmp_path / "dense")
    assert ended.status == 64, ended.err
    assert "written over, or into, the one that is read" in ended.err
