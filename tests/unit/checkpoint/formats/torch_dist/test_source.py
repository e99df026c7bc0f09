"""Folders in core's `torch_dist` layout are read: all models, forms of state and damages."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats.torch_dist.source import TorchDistSource
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.megatron_files import Shape, check_parameters, whole_model
from tests.support.checkpoints.torch_dist_folders import (
    Cut,
    by_rank,
    keys_of,
    save_torch_dist,
)
from tests.support.checkpoints.torch_dist_folders import whole as one_chunk

SHAPES = {
    "gpt2": Shape(),
    "llama": Shape(gated=True, tied=False, bias=False, positions=None),
    "grouped": Shape(groups=2, tied=False),
    "bert": Shape(bert=True),
    "bert, untied": Shape(bert=True, tied=False),
}
TOKENS = SourceOptions(vocab_size=41)
EXPERTS = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 6,
    "moe_shared_expert_intermediate_size": 10,
    "moe_shared_expert_gate": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.0,
}


def _open(directory: Path) -> TorchDistSource:
    return TorchDistSource(directory, TOKENS)


@pytest.mark.parametrize("cut", [by_rank, one_chunk, None])
@pytest.mark.parametrize("kind", SHAPES)
def test_weights_are_read_however_they_are_cut(tmp_path: Path, kind: str, cut: Cut | None) -> None:
    shape, model = SHAPES[kind], whole_model(SHAPES[kind])
    directory = save_torch_dist(
        tmp_path, model, shape, cut=cut or one_chunk, plain_dcp=cut is None, as_object=cut is None
    )
    with _open(directory) as source:
        source.verify()
        check_parameters(source, model, "model/", shape.true_rows)
        assert source.scalars == {}
        assert source.progress == {
            "iteration": 10,
            "consumed_samples": 80,
            "consumed_tokens": 960,
            "consumed_valid_samples": 16,
        }
        assert source.config["model"]["num_layers"] == shape.layers
        assert source.kind == ("bert" if shape.bert else "gpt")


def test_a_box_is_read_from_the_chunks_that_hold_it(tmp_path: Path) -> None:
    shape, model = SHAPES["llama"], whole_model(SHAPES["llama"])
    with _open(save_torch_dist(tmp_path, model, shape)) as source:
        fc1 = model["encoder.layers.2.mlp.dense_h_to_4h.weight"]
        box = Box((5, 3), (40, 7))
        assert torch.equal(source.read("model/layers.2.mlp.fc1.weight", box), fc1[box.slices])


def _cells(keys: Mapping[str, Tensor], grid_of: Callable[[str, Tensor], list[int]]) -> Any:
    """Tensors as grids of flattened cells, as older distributed optimizers kept them."""
    cut = {}
    for key, tensor in keys.items():
        grid = grid_of(key, tensor)
        interleaved = [
            number for size, count in zip(tensor.shape, grid) for number in (count, size // count)
        ]
        axes = [2 * at for at in range(tensor.dim())] + [2 * at + 1 for at in range(tensor.dim())]
        cut[key] = tensor.reshape(interleaved).permute(axes).reshape(*grid, -1).contiguous()
    return cut


def _grid(key: str, tensor: Tensor) -> list[int]:
    """The numbers of chunks along every axis, which are those of two tensor ranks."""
    return [
        len({box[0][axis] for box in by_rank(key, tensor)}) or 1 for axis in range(tensor.dim())
    ]


@pytest.mark.parametrize(
    ("master", "prefix", "form"),
    [
        ("param", "", "whole"),
        ("fp32_param", "chained_0.", "whole"),
        ("fp32_param", "", "cells"),
    ],
)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_optimizer_state_by_model_key_is_read(
    tmp_path: Path, kind: str, master: str, prefix: str, form: str
) -> None:
    shape = SHAPES[kind]
    model = {name: tensor.bfloat16() for name, tensor in whole_model(shape).items()}
    moments = {
        name: whole_model(shape, seed)
        for seed, name in enumerate(("exp_avg", "exp_avg_sq", master), 1)
    }
    more: dict[str, Tensor] = {}
    for name, moment in moments.items():
        keys = keys_of(moment, shape)
        found = _cells(keys, _grid) if form == "cells" else keys
        more |= {f"{prefix}optimizer.state.{name}.{key}": value for key, value in found.items()}
    scaler = {"scale": torch.tensor([1024.0]), "growth_tracker": 3, "hysteresis_tracker": 1}
    groups = {"optimizer": {"param_groups": [{"step": 7}]}, "grad_scaler": scaler}
    optimizer = {0: groups, 1: groups} if prefix else groups
    directory = save_torch_dist(
        tmp_path, model, shape, cut=one_chunk, more=more, common={"optimizer": optimizer}
    )
    with _open(directory) as source:
        check_parameters(source, model, "model/", shape.true_rows)
        for name, moment in moments.items():
            ours = "master" if name == master else name
            check_parameters(source, moment, f"optimizer/{ours}/", shape.true_rows)
        state = {"scale": 1024.0, "good_iterations": 3, "overflows_left": 1}
        assert source.scalars == {"optimizer": {"steps": 7, "loss_scaler": state}}
        part = Box((7, 3), (17, 9))
        expected = moments["exp_avg"]["encoder.layers.1.mlp.dense_h_to_4h.weight"]
        found_part = source.read("optimizer/exp_avg/layers.1.mlp.fc1.weight", part)
        assert torch.equal(found_part, expected[part.slices])


def test_masters_of_fp32_weights_are_the_weights(tmp_path: Path) -> None:
    shape, model = Shape(), whole_model(Shape())
    keys = keys_of(model, shape)
    more = {
        f"optimizer.state.{name}.{key}": value
        for name in ("param", "exp_avg")
        for key, value in keys.items()
    }
    common = {"optimizer": {"optimizer": {"state": {"common_step": torch.tensor(9)}}}}
    directory = save_torch_dist(tmp_path, model, shape, more=more, common=common)
    with _open(directory) as source:
        kinds = {name.split("/")[1] for name in source.tensors if name.startswith("optimizer/")}
        assert kinds == {"exp_avg"}
        assert source.scalars == {"optimizer": {"steps": 9, "loss_scaler": {}}}


def test_state_without_updates_and_of_another_shape_is_refused(tmp_path: Path) -> None:
    shape, model = Shape(), whole_model(Shape())
    more = {f"optimizer.state.exp_avg.{key}": value for key, value in keys_of(model, shape).items()}
    with _open(save_torch_dist(tmp_path / "a", model, shape, more=more)) as source:
        with pytest.raises(CheckpointError, match="does not hold what it should") as error:
            _ = source.scalars
        assert "without the number of updates" in str(error.value.found)
    key = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    more[key] = torch.zeros(3, 5)
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(save_torch_dist(tmp_path / "b", model, shape, more=more))
    assert f"{key} is [3, 5], and decoder.final_layernorm.weight is [16]" in str(error.value.found)


def test_state_by_buffers_of_ranks_is_told_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_0.bucket_idx_0.exp_avg"
    common = {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    directory = save_torch_dist(
        tmp_path, whole_model(Shape()), Shape(), more={key: torch.zeros(8)}, common=common
    )
    with _open(directory) as source:
        assert all(name.startswith("model/") for name in source.tensors)
    output = capsys.readouterr()
    assert (
        "keeps its optimizer in buffers of its ranks (dp_reshardable: optimizer.dist"
        in output.out + output.err
    )


def _experts(layers: int | None, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    lead = () if layers is None else (layers,)
    return {
        f"mlp.{name}": torch.randn(lead + size, generator=generator) for name, size in sizes.items()
    }


EXPERT_SIZES: Mapping[str, tuple[int, ...]] = {
    "router.weight": (4, 16),
    "experts.experts.linear_fc1.weight": (4, 12, 16),
    "experts.experts.linear_fc2.weight": (4, 16, 6),
    "shared_experts.linear_fc1.weight": (20, 16),
    "shared_experts.linear_fc2.weight": (16, 10),
    "shared_experts.gate_weight": (1, 16),
}
OURS = {
    "router.weight": "router.weight",
    "experts.experts.linear_fc1.weight": "experts.fc1.weight",
    "experts.experts.linear_fc2.weight": "experts.fc2.weight",
    "shared_experts.linear_fc1.weight": "shared_expert.fc1.weight",
    "shared_experts.linear_fc2.weight": "shared_expert.fc2.weight",
    "shared_experts.gate_weight": "shared_expert.gate",
}


@pytest.mark.parametrize("some_layers", [False, True])
def test_experts_are_read_in_all_layers_or_in_some(tmp_path: Path, some_layers: bool) -> None:
    shape = SHAPES["llama"]
    model = {name: tensor for name, tensor in whole_model(shape).items() if "mlp." not in name}
    freq: Any = 1
    if some_layers:  # then layers have keys of their own; the first two have no experts
        freq = [0, 0, 1, 1]
        dense = {n: t for n, t in whole_model(shape).items() if "layers.0.mlp." in n}
        more = {
            key.replace(".layers.", f".layers.{layer}."): value[0]
            for layer in (0, 1)
            for key, value in keys_of(dense, shape).items()
        }
        experts = {
            f"decoder.layers.{layer}.{name}": value
            for layer in (2, 3)
            for name, value in _experts(None, EXPERT_SIZES).items()
        }
    else:
        more = {}
        experts = {f"decoder.layers.{n}": v for n, v in _experts(4, EXPERT_SIZES).items()}
    directory = save_torch_dist(
        tmp_path,
        model,
        shape,
        cut=one_chunk,
        more={**more, **experts},
        args={**EXPERTS, "moe_layer_freq": freq},
    )
    with _open(directory) as source:
        assert source.config["model"]["num_experts"] == 4
        assert source.config["model"]["moe_layer_freq"] == str(freq)
        assert "moe_router_load_balancing_type" not in source.config["model"]
        for layer in (2, 3):
            for name, ours in OURS.items():
                expected = (
                    experts[f"decoder.layers.{layer}.mlp.{name}"]
                    if some_layers
                    else experts[f"decoder.layers.mlp.{name}"][layer]
                )
                key = f"model/layers.{layer}.mlp.{ours}"
                found = source.read(key, whole(source.tensors[key].global_shape))
                assert torch.equal(found, expected), key
        assert ("model/layers.0.mlp.router.weight" in source.tensors) is not some_layers


def test_a_norm_that_is_kept_twice_has_to_be_equal(tmp_path: Path) -> None:
    model, key = whole_model(Shape()), "decoder.layers.pre_mlp_layernorm.weight"
    norm = keys_of(model, Shape())["decoder.layers.mlp.linear_fc1.layer_norm_weight"]
    with _open(save_torch_dist(tmp_path / "a", model, Shape(), more={key: norm})) as source:
        check_parameters(source, model, "model/", 41)
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(save_torch_dist(tmp_path / "b", model, Shape(), more={key: norm + 1}))
    assert "are both layers.0.post_attention_norm.weight, with other values" in str(
        error.value.found
    )


def test_other_models_and_lost_layers_are_refused(tmp_path: Path) -> None:
    model = whole_model(Shape())
    more = {"decoder.layers.self_attention.linear_q_down_proj.weight": torch.zeros(4, 2, 2)}
    with pytest.raises(CheckpointError, match="not of a GPT, BERT or T5 that this") as error:
        _open(save_torch_dist(tmp_path / "a", model, Shape(), more=more))
    assert "self_attention.linear_q_down_proj.weight" in str(error.value.found)
    word = model.pop("embedding.word_embeddings.weight")
    with pytest.raises(CheckpointError, match="not of a GPT, BERT or T5") as error:
        _open(save_torch_dist(tmp_path / "b", model, Shape()))
    assert "holds no word embedding" in str(error.value.found)
    model["embedding.word_embeddings.weight"] = word
    with pytest.raises(CheckpointError, match="does not hold every layer") as error:
        _open(save_torch_dist(tmp_path / "c", model, Shape(), args={"num_layers": 6}))
    assert "4 layers, but num_layers=6 in args" in str(error.value.found)


@pytest.mark.parametrize("name", ["metadata.json", ".metadata"])
def test_a_folder_without_what_is_written_last_is_refused(tmp_path: Path, name: str) -> None:
    directory = save_torch_dist(tmp_path, whole_model(Shape()), Shape())
    (directory / name).unlink()
    with pytest.raises(CheckpointError, match="a torch_dist checkpoint is not whole") as error:
        _open(directory)
    assert f"no {name} in" in str(error.value.found)


@pytest.mark.parametrize(
    ("text", "problem", "words"),
    [
        ("{", "the description of a checkpoint cannot be read", "JSONDecodeError"),
        ("{}", "the description of a checkpoint cannot be read", "sharded_backend"),
        (
            json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}),
            "of a distributed layout that this program does not read",
            "zarr, version 1",
        ),
    ],
)
def test_another_description_is_refused(
    tmp_path: Path, text: str, problem: str, words: str
) -> None:
    directory = save_torch_dist(tmp_path, whole_model(Shape()), Shape())
    (directory / "metadata.json").write_text(text)
    with pytest.raises(CheckpointError, match=problem) as error:
        _open(directory)
    assert words in str(error.value.found)


def test_flags_have_to_be_there(tmp_path: Path) -> None:
    directory = save_torch_dist(tmp_path, whole_model(Shape()), Shape())
    torch.save([1], directory / "common.pt")
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(directory)
    assert "common.pt holds a list" in str(error.value.found)
    (directory / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(directory)
    assert "neither common.pt nor the object common_state/shard_0_1 is there" in str(
        error.value.found
    )


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    model = whole_model(Shape())
    directory = save_torch_dist(tmp_path, model, Shape())
    elements = model["encoder.final_layernorm.weight"].numpy().tobytes()
    (path,) = (p for p in directory.glob("*.distcp") if elements in p.read_bytes())
    content = bytearray(path.read_bytes())
    content[content.index(elements) + 1] ^= 4
    path.write_bytes(content)
    with _open(directory) as source:
        source.verify(share=0, of=1000)  # another rank's share of the files
        with pytest.raises(CheckpointError, match="a checkpoint file is damaged") as error:
            source.verify()
    assert path.name in str(error.value.found)
