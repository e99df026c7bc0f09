"""What is written in core's distributed layout reads back bit for bit, or is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.boxes import whole
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.formats.torch_dist.index import StoredIndex
from megatron.checkpoint.formats.torch_dist.source import TorchDistSource
from megatron.checkpoint.formats.torch_dist.writer import write_torch_dist
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import ROWS, MemorySource, assert_same

OPTIONS = WriteOptions(make_vocab_size_divisible_by=4)
WEIGHTS = WriteOptions(make_vocab_size_divisible_by=4, optimizer=False)
LLAMA = {
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
}
EXPERTS = {
    **LLAMA,
    "num_layers": 3,
    "num_experts": 2,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 6,
    "moe_shared_expert_intermediate_size": 4,
    "moe_shared_expert_gate": True,
}


def _back(directory: Path) -> TorchDistSource:
    return TorchDistSource(directory, SourceOptions())


def _halved(source: MemorySource) -> MemorySource:
    """The source with weights in bfloat16, whose masters are state of their own."""
    for name, value in source.values.items():
        if name.startswith("model/"):
            source.values[name] = value.bfloat16()
    return source


@pytest.mark.parametrize(
    "flags",
    [{}, {"num_layers": 11}, LLAMA, {"num_query_groups": 1, "qk_layernorm": True}],
    ids=["gpt2", "eleven layers", "llama", "one group"],
)
def test_a_gpt_goes_there_and_back_with_its_optimizer(
    tmp_path: Path, flags: dict[str, Any]
) -> None:
    source = _halved(MemorySource.of_gpt(optimizer=True, **flags))
    directory = write_torch_dist(source, tmp_path, OPTIONS)
    assert directory == tmp_path / "iter_0000010"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "10\n"
    with _back(directory) as found:
        found.verify()
        assert_same(found, source)
        assert found.scalars == source.scalars
        for name, value in source.progress.items():
            assert found.progress[name] == value


class _PrefixLM(MemorySource):
    """A GPT of a program that records another kind, as a prefix LM's does."""

    kind = "prefix_lm"


def test_a_gpt_of_another_program_has_the_keys_of_a_gpt(tmp_path: Path) -> None:
    source = _PrefixLM.of_gpt()
    index = StoredIndex(write_torch_dist(source, tmp_path, OPTIONS))
    assert "decoder.final_layernorm.weight" in index.tensors
    assert not any(key.startswith("encoder.") for key in index.tensors)


def test_fp32_weights_are_their_own_masters(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True)
    for name in [name for name in source.values if "/master/" in name]:
        del source.values[name]
    directory = write_torch_dist(source, tmp_path, OPTIONS)
    index = StoredIndex(directory)
    assert "optimizer.state.param.decoder.layers.mlp.linear_fc1.weight" in index.tensors
    with _back(directory) as found:
        assert_same(found, source)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("heads", [BertHeads(), BertHeads(pooler=False, order=False)])
def test_a_bert_goes_there_and_back_with_its_heads(
    tmp_path: Path, heads: BertHeads, tied: bool
) -> None:
    flags = {"untie_embeddings_and_output_weights": not tied}
    source = MemorySource.of_bert(heads, **flags)
    with _back(write_torch_dist(source, tmp_path, OPTIONS)) as found:
        assert_same(found, source)
        assert found.kind == "bert"
        assert "output_layer._extra_state/shard_0_1" in StoredIndex(found.directory).objects


@pytest.mark.parametrize("freq", ["1", "[0,1,1]"])
def test_experts_go_there_and_back(tmp_path: Path, freq: str) -> None:
    source = MemorySource.of_gpt(**EXPERTS, moe_layer_freq=freq)
    directory = write_torch_dist(source, tmp_path, OPTIONS)
    with _back(directory) as found:
        assert dict(found.tensors) == {name: found.tensors[name] for name in source.tensors}
        for name, value in source.values.items():
            assert torch.equal(found.read(name, whole(tuple(value.shape))), value), name
    index = StoredIndex(directory)
    stem = "decoder.layers.mlp" if freq == "1" else "decoder.layers.2.mlp"
    shard = "2.1_3.2" if freq == "1" else "1_2"
    assert f"{stem}.experts.experts.linear_fc1._extra_state/shard_{shard}" in index.objects
    assert f"{stem.removesuffix('.mlp')}.pre_mlp_layernorm.weight" in index.tensors


def test_files_hold_what_loaders_look_at(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True, **LLAMA)
    directory = write_torch_dist(
        source, tmp_path, WriteOptions(make_vocab_size_divisible_by=4, tensor_model_parallel_size=2)
    )
    assert json.loads((directory / "metadata.json").read_text()) == {
        "sharded_backend": "torch_dist",
        "sharded_backend_version": 1,
        "common_backend": "torch",
        "common_backend_version": 1,
    }
    common = unpickle.load(directory / "common.pt")
    args = common["args"]
    assert (args.padded_vocab_size, args.num_layers, args.swiglu) == (16, 2, True)
    assert (common["iteration"], common["checkpoint_version"]) == (10, 3.0)
    assert common["content_metadata"]["distrib_optim_sharding_type"] == "fully_reshardable"
    groups = common["optimizer"]["optimizer"]["param_groups"]
    found = [(g["wd_mult"], g["lr_mult"], g["is_expert_parallel"], g["step"]) for g in groups]
    assert found == [(1.0, 1.0, False, 7), (0.0, 1.0, False, 7)]
    assert common["optimizer"]["grad_scaler"]["scale"] == torch.tensor([64.0])
    index = StoredIndex(directory)
    word = index.tensors["embedding.word_embeddings.weight"]
    assert word.shape == (16, 8)
    padding = index.read("embedding.word_embeddings.weight", whole((16, 8)))[ROWS:]
    assert not padding.any()
    assert index.tensors["decoder.layers.mlp.linear_fc1.weight"].shape[0] == 2
    linears = ("self_attention.linear_qkv", "self_attention.linear_proj")
    expected = {
        f"decoder.layers.{linear}._extra_state/shard_{layer}_2"
        for linear in (*linears, "mlp.linear_fc1", "mlp.linear_fc2")
        for layer in range(2)
    }
    assert set(index.objects) == expected
    assert all(index.read_object(key) is None for key in expected)


def test_weights_of_no_iteration_are_a_release(tmp_path: Path) -> None:
    source = MemorySource.of_gpt()
    assert write_torch_dist(source, tmp_path, OPTIONS) == tmp_path / "release"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    with pytest.raises(CheckpointError, match="holds a release already"):
        write_torch_dist(source, tmp_path, OPTIONS)


def test_the_optimizer_can_be_left_out(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(optimizer=True)
    with _back(write_torch_dist(source, tmp_path, WEIGHTS)) as found:
        assert all(name.startswith("model/") for name in found.tensors)
        assert found.scalars == {}


def test_no_more_than_one_layer_is_read_at_a_time(tmp_path: Path) -> None:
    source = MemorySource.of_gpt(num_layers=6)
    write_torch_dist(source, tmp_path, OPTIONS)
    assert source.largest_read == max(value.numel() for value in source.values.values())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"glu_activation": "geglu"}, "--glu-activation geglu"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi"),
        ({"embed_layernorm": True}, "--embed-layernorm"),
        ({"use_parallel_residual": True}, "--use-parallel-residual"),
    ],
)
def test_models_that_core_does_not_have_are_refused(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match="has no model like this one") as error:
        write_torch_dist(MemorySource.of_gpt(**flags), tmp_path, OPTIONS)
    assert words in str(error.value.found)
    assert not list(tmp_path.iterdir())


def test_parameters_and_state_that_have_no_place_are_refused(tmp_path: Path) -> None:
    source = MemorySource.of_gpt()
    source.values["model/scale.weight"] = torch.zeros(8)
    with pytest.raises(CheckpointError, match="no place for some parameters") as error:
        write_torch_dist(source, tmp_path, OPTIONS)
    assert "scale.weight" in str(error.value.found)
    source = MemorySource.of_gpt()
    source.values["optimizer/momentum_buffer/final_norm.weight"] = torch.zeros(8)
    with pytest.raises(CheckpointError, match="only the state of AdamW") as error:
        write_torch_dist(source, tmp_path, OPTIONS)
    assert "momentum_buffer" in str(error.value.found)
    source = MemorySource.of_gpt(optimizer=True, **EXPERTS)
    with pytest.raises(CheckpointError, match="the optimizer's state of experts is not written"):
        write_torch_dist(source, tmp_path, OPTIONS)
    assert write_torch_dist(source, tmp_path, WEIGHTS).is_dir()


def test_a_read_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MemorySource.of_gpt()

    def fail(name: str, box: object) -> torch.Tensor:
        raise CheckpointError("damaged", found=name, fix="none")

    monkeypatch.setattr(source, "read", fail)
    with pytest.raises(CheckpointError, match="damaged"):
        write_torch_dist(source, tmp_path, OPTIONS)
    assert not list(tmp_path.iterdir())
