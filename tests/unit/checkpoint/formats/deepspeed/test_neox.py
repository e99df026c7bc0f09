"""Folders of gpt-neox are read: its names, its orders of rows, biases that ranks share out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.formats import registry
from megatron.checkpoint.formats.deepspeed import neox
from megatron.checkpoint.formats.deepspeed.source import DeepSpeedSource
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.neox_folders import NeoxShape, save_neox, whole_model

SHAPES = {
    "neox": NeoxShape(parallel=True, tied=False),
    "sequential": NeoxShape(old_names=True),
    "llama": NeoxShape(groups=2, gated=True, rms=True, tied=False),
}
TRUE_ROWS = 45
MODULES = {
    "word_embeddings": "embedding.word",
    "input_layernorm": "input_norm",
    "query_key_value": "qkv",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "post_attention_norm",
    "linear1": "fc1",
    "linear2": "fc2",
    "dense_h_to_4h": "fc1",
    "dense_4h_to_h": "fc2",
    "final_linear": "output",
    "scale": "weight",
}


def our_spelling(name: str) -> str:
    """Our name of a parameter of `whole_model`."""
    number, _, inner = name.partition(".")
    for theirs, ours in MODULES.items():
        inner = inner.replace(theirs, ours)
    if inner.startswith("norm."):
        return f"final_{inner}"
    is_block = "attention" in inner or "mlp" in inner or "_norm." in inner
    return f"layers.{int(number) - 2}.{inner}" if is_block else inner


def check(source: DeepSpeedSource, model: dict[str, Tensor], prefix: str = "model/") -> None:
    assert len([name for name in source.tensors if name.startswith(prefix)]) == len(model)
    for name, value in model.items():
        key = f"{prefix}{our_spelling(name)}"
        has_tokens = name.endswith(("word_embeddings.weight", "final_linear.weight"))
        expected = value[:TRUE_ROWS] if has_tokens else value
        assert source.tensors[key].global_shape == tuple(expected.shape), key
        assert torch.equal(source.read(key, whole(tuple(expected.shape))), expected), key


def _open(directory: Path) -> DeepSpeedSource:
    return DeepSpeedSource(directory, SourceOptions(vocab_size=TRUE_ROWS))


@pytest.mark.parametrize("pipeline", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", SHAPES)
def test_weights_are_read_at_any_layout(
    tmp_path: Path, kind: str, tp: int, pipeline: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    shape, model = SHAPES[kind], whole_model(SHAPES[kind])
    save_neox(tmp_path, model, shape, tp=tp, pipeline=pipeline)
    with registry.open_source(tmp_path, options=SourceOptions(vocab_size=TRUE_ROWS)) as source:
        assert isinstance(source, DeepSpeedSource)
        source.verify()
        check(source, model)
        assert source.progress == {"iteration": 10}
        config = source.config["model"]
        assert config["num_layers"] == shape.layers
        assert config["position_embedding_type"] == "rope"
        assert config["use_parallel_residual"] is shape.parallel
        assert source.config["data"]["seq_length"] == 8
    output = capsys.readouterr()
    assert "copies of" not in output.out + output.err
    assert ("are the sums of those of 2" in output.err) is (shape.parallel and tp == 2)


def test_a_box_of_a_summed_bias_and_of_moved_rows_is_read(tmp_path: Path) -> None:
    shape = NeoxShape(groups=2, gated=True, parallel=True, tied=False)
    model = whole_model(shape)
    with _open(save_neox(tmp_path, model, shape, tp=2)) as source:
        bias = model["3.mlp.linear2.bias"]
        assert torch.equal(source.read("model/layers.1.mlp.fc2.bias", Box((3,), (7,))), bias[3:10])
        fc1 = model["2.mlp.linear1.weight"]
        box = Box((5, 3), (30, 7))
        assert torch.equal(source.read("model/layers.0.mlp.fc1.weight", box), fc1[box.slices])


def _with_state(folder: Path, shape: NeoxShape, tp: int, *, pipeline: bool) -> Any:
    model = {name: value.bfloat16() for name, value in whole_model(shape).items()}
    moments = {
        kind: whole_model(shape, seed)
        for seed, kind in enumerate(("master", "exp_avg", "exp_avg_sq"), 1)
    }
    return save_neox(folder, model, shape, tp=tp, pipeline=pipeline, moments=moments), moments


@pytest.mark.parametrize(("kind", "tp"), [("llama", 2), ("sequential", 2), ("neox", 1)])
@pytest.mark.parametrize("pipeline", [True, False])
def test_state_of_zero_1_is_read_in_our_order(
    tmp_path: Path, kind: str, tp: int, pipeline: bool
) -> None:
    directory, moments = _with_state(tmp_path, SHAPES[kind], tp, pipeline=pipeline)
    with _open(directory) as source:
        for name, values in moments.items():
            check(source, values, f"optimizer/{name}/")
        assert source.scalars == {"optimizer": {"steps": 7, "loss_scaler": {}}}


def test_state_of_summed_biases_is_left(tmp_path: Path) -> None:
    directory, _ = _with_state(tmp_path, SHAPES["neox"], 2, pipeline=True)
    with _open(directory) as source:
        assert source.scalars == {}
        assert all(name.startswith("model/") for name in source.tensors)


def test_a_folder_without_its_config_is_refused(tmp_path: Path) -> None:
    directory = save_neox(tmp_path, whole_model(NeoxShape()), NeoxShape())
    (directory / "configs" / "run.yml").unlink()
    with pytest.raises(CheckpointError, match="lacks the config of its run") as error:
        _open(directory)
    assert f"no .yml or .json in {directory / 'configs'}" in str(error.value.found)


def test_a_config_of_another_kind_of_model_is_refused_by_its_key(tmp_path: Path) -> None:
    directory = save_neox(tmp_path, whole_model(NeoxShape()), NeoxShape())
    with open(directory / "configs" / "run.yml", "a") as file:
        file.write("pos-emb-typo: rotary\n")
    with pytest.raises(CheckpointError, match="not one that this program understands") as error:
        _open(directory)
    assert "pos_emb_typo" in str(error.value.found)


def test_layers_of_other_kinds_are_refused_by_name(tmp_path: Path) -> None:
    model = whole_model(NeoxShape())
    model["2.mlp.w1.weight"] = torch.zeros(4, 4)
    with pytest.raises(CheckpointError, match="parameters that this program does not") as error:
        _open(save_neox(tmp_path, model, NeoxShape()))
    assert "2.mlp.w1.weight" in str(error.value.found)


def test_a_model_of_another_shape_than_its_config_is_refused(tmp_path: Path) -> None:
    model = whole_model(NeoxShape(layers=1))
    with pytest.raises(CheckpointError, match="does not hold the model that it describes"):
        _open(save_neox(tmp_path, model, NeoxShape(layers=2)))


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("sequential.0.word_embeddings.weight", "embedding.word.weight"),
        ("tied_modules.embed.word_embeddings.weight", "embedding.word.weight"),
        ("0.position_embeddings.weight", "embedding.position.weight"),
        ("module.sequential.4.attention.dense.bias", "layers.2.attention.output.bias"),
        ("5.norm.scale", "final_norm.weight"),
        ("encoder.weight", None),
    ],
)
def test_names_are_told(name: str, ours: str | None) -> None:
    assert neox.neox_to_ours(name, 2) == ours


@pytest.mark.parametrize(
    ("args", "expected"),
    [({"model_parallel_size": 1}, True), ({"num_layers": 1}, False), (None, False)],
)
def test_a_state_of_gpt_neox_is_known_by_its_args(args: Any, expected: bool) -> None:
    assert neox.is_neox({"args": args}) is expected
