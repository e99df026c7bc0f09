"""Files made from a description of Megatron's format are read: every version, layout and damage."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.formats.megatron.format import FORMAT
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.source import SourceOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.megatron_files import (
    Shape,
    check_parameters,
    core_name,
    save_megatron,
    whole_model,
)

SHAPES = {
    "gpt2": Shape(),
    "llama": Shape(gated=True, tied=False, bias=False, positions=None),
    "grouped": Shape(groups=2, tied=False),
    "bert": Shape(bert=True),
    "bert, untied": Shape(bert=True, tied=False),
    "bigscience": Shape(gated=True, args={"swiglu": False, "glu_activation": "geglu"}),
}
GRIDS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 2, 2), (2, 4, 1)]
TOKENS = SourceOptions(vocab_size=41)


@pytest.mark.parametrize(("tp", "pp", "chunks"), GRIDS)
@pytest.mark.parametrize("kind", SHAPES)
def test_any_layout_of_version_3_is_read_with_its_optimizer(
    tmp_path: Path, kind: str, tp: int, pp: int, chunks: int
) -> None:
    shape, model = SHAPES[kind], whole_model(SHAPES[kind])
    moments = {
        name: whole_model(shape, seed)
        for seed, name in enumerate(("exp_avg", "exp_avg_sq", "master"), 1)
    }
    directory = save_megatron(tmp_path, model, shape, tp=tp, pp=pp, chunks=chunks, moments=moments)
    with FORMAT.open_source(directory, TOKENS) as source:
        assert isinstance(source, MegatronSource)
        source.verify()
        check_parameters(source, model, "model/", shape.true_rows)
        for name, moment in moments.items():
            check_parameters(source, moment, f"optimizer/{name}/", shape.true_rows)
        scaler = {"scale": 1024.0, "good_iterations": 3, "overflows_left": 1}
        assert source.scalars == {"optimizer": {"steps": 7, "loss_scaler": scaler}}
        assert source.progress == {
            "iteration": 10,
            "consumed_samples": 80,
            "consumed_tokens": 960,
            "consumed_valid_samples": 16,
        }
        assert source.config["model"]["num_layers"] == shape.layers
        assert source.kind == ("bert" if shape.bert else "gpt")


@pytest.mark.parametrize("version", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("tp", [1, 2])
def test_older_versions_are_read_rows_names_and_files(
    tmp_path: Path, version: float | None, tp: int
) -> None:
    shape, model = Shape(), whole_model(Shape())
    moments = {"exp_avg": whole_model(shape, 1), "exp_avg_sq": whole_model(shape, 2)}
    directory = save_megatron(
        tmp_path,
        model,
        shape,
        tp=tp,
        pp=2,
        version=version,
        old_names=True,
        moments=moments,
        legacy_files=True,
    )
    with MegatronSource(directory, TOKENS) as source:
        source.verify()
        check_parameters(source, model, "model/", shape.true_rows)
        check_parameters(source, moments["exp_avg"], "optimizer/exp_avg/", shape.true_rows)
        assert source.scalars == {"optimizer": {"steps": 7, "loss_scaler": {}}}


def test_a_box_is_read_from_the_ranks_that_hold_it(tmp_path: Path) -> None:
    shape, model = SHAPES["llama"], whole_model(SHAPES["llama"])
    directory = save_megatron(tmp_path, model, shape, tp=4, pp=1)
    with MegatronSource(directory, TOKENS) as source:
        fc1 = model["encoder.layers.2.mlp.dense_h_to_4h.weight"]
        box = Box((5, 3), (40, 7))
        assert torch.equal(source.read("model/layers.2.mlp.fc1.weight", box), fc1[box.slices])
        dense = model["encoder.layers.1.self_attention.dense.weight"]
        found = source.read("model/layers.1.attention.output.weight", Box((2, 3), (4, 9)))
        assert torch.equal(found, dense[2:6, 3:12])


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [(None, 44), (41, 41), (44, 44), (37, 37), (36, 44), (50, 44)],
)
def test_padding_rows_go_where_they_can_be_padding(
    tmp_path: Path, tokens: int | None, rows: int
) -> None:
    # A vocabulary of 37 to 44 tokens is padded to 44 by --make-vocab-size-divisible-by 4 at tp 2.
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2)
    with MegatronSource(directory, SourceOptions(vocab_size=tokens)) as source:
        assert source.tensors["model/embedding.word.weight"].global_shape[0] == rows


def test_names_of_megatron_core_are_read(tmp_path: Path) -> None:
    shape, model = Shape(positions=None), whole_model(Shape(positions=None))
    directory = save_megatron(tmp_path, model, shape)
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    flat = {
        name.replace("encoder.", "decoder.")
        .replace("query_key_value", "linear_qkv")
        .replace("self_attention.dense", "self_attention.linear_proj")
        .replace("dense_h_to_4h", "linear_fc1")
        .replace("dense_4h_to_h", "linear_fc2")
        .replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_")
        .replace("post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"): value
        for name, value in model.items()
    }
    flat["decoder.layers.0.self_attention.linear_qkv._extra_state"] = None
    flat["output_layer.weight"] = model["embedding.word_embeddings.weight"]  # the tied copy
    content["model"] = flat
    torch.save(content, path)
    with MegatronSource(directory, TOKENS) as source:
        check_parameters(source, model, "model/", shape.true_rows)
        source.verify()


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("tied", [True, False])
def test_a_bert_of_megatron_core_is_read_with_its_optimizer(
    tmp_path: Path, tied: bool, pp: int
) -> None:
    """Its heads have names and an order of their own: words, the bias of words, order, pooler."""
    shape = Shape(bert=True, tied=tied)
    heads = ("lm_head.", "output_layer.", "binary_head.", "pooler.")

    def place(name: str) -> tuple[int, bool]:
        at = next((at for at, head in enumerate(heads) if core_name(name).startswith(head)), -1)
        return at, name == "lm_head.bias"  # its layer has the weight before the bias

    def ordered(seed: int) -> dict[str, Tensor]:
        model = whole_model(shape, seed)
        return {name: model[name] for name in sorted(model, key=place)}

    model, moments = ordered(0), {"exp_avg": ordered(1), "exp_avg_sq": ordered(2)}
    directory = save_megatron(tmp_path, model, shape, pp=pp, moments=moments, core=True)
    with FORMAT.open_source(directory, TOKENS) as source:
        assert isinstance(source, MegatronSource)
        assert source.kind == "bert"
        source.verify()
        check_parameters(source, model, "model/", shape.true_rows)
        for name, moment in moments.items():
            check_parameters(source, moment, f"optimizer/{name}/", shape.true_rows)


def _edit(directory: Path, change: Any, rank: str = "mp_rank_00") -> None:
    path = directory / rank / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def _open(directory: Path) -> MegatronSource:
    return MegatronSource(directory, TOKENS)


def test_another_version_and_another_model_are_refused(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    _edit(directory, lambda content: content.update(checkpoint_version=4.0))
    with pytest.raises(CheckpointError, match="a version that this program does not read") as error:
        _open(directory)
    assert "checkpoint_version 4" in str(error.value.found)
    _edit(directory, lambda content: content.update(checkpoint_version=3.0))
    _edit(
        directory,
        lambda content: content["model"]["language_model"].update(
            retriever={"dense.weight": torch.zeros(2, 2)}
        ),
    )
    with pytest.raises(CheckpointError, match="not of a GPT, BERT or T5 that this") as error:
        _open(directory)
    assert "retriever.dense.weight" in str(error.value.found)
    _edit(directory, lambda content: content.update(model={"language_model": {}}))
    with pytest.raises(CheckpointError, match="not of a GPT") as error:
        _open(directory)
    assert "no word embedding" in str(error.value.found)


def test_a_missing_layer_and_a_doubled_one_are_found(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    _edit(directory, lambda content: setattr(content["args"], "num_layers", 6))
    with pytest.raises(CheckpointError, match="does not hold every layer of its model") as error:
        _open(directory)
    assert "4 layers, but num_layers=6 in args" in str(error.value.found)

    def double(content: dict[str, Any]) -> None:
        content["args"].num_layers = 4
        encoder = content["model"]["language_model"]["encoder"]
        encoder["layers.0.attention.dense.bias"] = encoder["layers.0.self_attention.dense.bias"]

    _edit(directory, double)
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(directory)
    assert "is layers.0.attention.output.bias again" in str(error.value.found)


def test_copies_of_the_embedding_must_be_equal(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2, pp=2)

    def drift(content: dict[str, Any]) -> None:
        content["model"]["word_embeddings_for_head"]["weight"][0, 0] += 1

    _edit(directory, drift, "mp_rank_01_001")
    with _open(directory) as source, pytest.raises(CheckpointError, match="does not hold") as error:
        source.verify()
    assert "differs from embedding.word_embeddings.weight of the first stage" in str(
        error.value.found
    )


def test_parts_of_two_saves_and_odd_shapes_are_found(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2)
    _edit(directory, lambda content: content.update(iteration=9), "mp_rank_01")
    with _open(directory) as source:
        with pytest.raises(CheckpointError) as error:
            source.read("model/layers.0.mlp.fc1.bias", Box((0,), (24,)))
        assert "iteration 9, but 10 in" in str(error.value.found)
    _edit(directory, lambda content: content.update(iteration=10), "mp_rank_01")

    def cut(content: dict[str, Any]) -> None:
        encoder = content["model"]["language_model"]["encoder"]
        name = "layers.0.mlp.dense_h_to_4h.weight"
        encoder[name] = encoder[name][:, :-1]

    _edit(directory, cut, "mp_rank_01")
    with _open(directory) as source, pytest.raises(CheckpointError) as error:
        source.read("model/layers.0.mlp.fc1.weight", Box((0, 0), (24, 16)))
    assert "unlike on rank 0" in str(error.value.found)


def test_a_parameter_that_one_rank_lacks_is_named(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape(), tp=2)

    def lose(content: dict[str, Any]) -> None:
        del content["model"]["language_model"]["encoder"]["layers.0.mlp.dense_h_to_4h.bias"]

    _edit(directory, lose, "mp_rank_01")
    with _open(directory) as source, pytest.raises(CheckpointError) as error:
        source.read("model/layers.0.mlp.fc1.bias", Box((0,), (24,)))
    assert "no model encoder.layers.0.mlp.dense_h_to_4h.bias" in str(error.value.found)


def test_optimizer_files_of_the_distributed_optimizer_are_said_and_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    old = {0: {torch.float32: {"param": [torch.zeros(4)]}}}
    torch.save(old, directory / "mp_rank_00" / "distrib_optim.pt")
    groups = {"optimizer": {"param_groups": [{"params": [0]}]}}
    _edit(directory, lambda content: content.update(optimizer=groups))
    with _open(directory) as source:
        assert source.scalars == {}
        assert all(name.startswith("model/") for name in source.tensors)
    output = capsys.readouterr()
    assert "distrib_optim.pt as Megatron's distributed optimizer did before" in (
        output.out + output.err
    )


@pytest.mark.parametrize(
    ("core", "tp", "pp", "chunks", "bucket", "dtype"),
    [
        (False, 1, 1, 1, None, torch.bfloat16),
        (True, 2, 1, 1, 300, torch.bfloat16),
        (False, 1, 2, 1, 300, torch.float32),
        (True, 2, 2, 1, None, torch.bfloat16),
        (False, 1, 2, 2, 300, torch.bfloat16),
        (True, 1, 2, 2, None, torch.float32),
    ],
)
def test_state_of_the_distributed_optimizer_is_read(
    tmp_path: Path, core: bool, tp: int, pp: int, chunks: int, bucket: int | None, dtype: Any
) -> None:
    args = {"overlap_grad_reduce": bucket is not None, "ddp_bucket_size": bucket}
    shape = Shape(hidden=20, ffn=28, bert=core, args=args)
    model = {name: value.to(dtype) for name, value in whole_model(shape).items()}
    moments = {
        name: whole_model(shape, seed)
        for seed, name in enumerate(("exp_avg", "exp_avg_sq", "master"), 1)
    }
    directory = save_megatron(
        tmp_path, model, shape, tp=tp, pp=pp, chunks=chunks, moments=moments, core=core,
        distributed=True,
    )  # fmt: skip
    with FORMAT.open_source(directory, TOKENS) as source:
        source.verify()
        check_parameters(source, model, "model/", shape.true_rows)
        if dtype == torch.float32:
            del moments["master"]
        kinds = {name.split("/")[1] for name in source.tensors if name.startswith("optimizer/")}
        assert kinds == set(moments)
        for name, moment in moments.items():
            check_parameters(source, moment, f"optimizer/{name}/", shape.true_rows)
        scaler = {"scale": 1024.0, "good_iterations": 3, "overflows_left": 1}
        assert source.scalars == {"optimizer": {"steps": 7, "loss_scaler": scaler}}


def _distributed(folder: Path, **args: Any) -> Path:
    model = {name: value.bfloat16() for name, value in whole_model(Shape()).items()}
    moments = {name: whole_model(Shape()) for name in ("exp_avg", "exp_avg_sq", "master")}
    shape = Shape(args=args)
    return save_megatron(folder, model, shape, moments=moments, distributed=True)


def test_state_of_another_model_and_without_updates_is_refused(tmp_path: Path) -> None:
    directory = _distributed(tmp_path / "a")
    path = directory / "mp_rank_00" / "distrib_optim.pt"
    content = torch.load(path, weights_only=False)
    torch.save({**content, 1: content[0]}, path)
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(directory)
    assert "distrib_optim.pt has 2 buffers, for 1 models of 1 types" in str(error.value.found)
    (kinds,) = content[0].values()
    kinds["exp_avg"] = kinds["exp_avg"][:-1]
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="distributed optimizer is not that of the model"):
        _open(directory)
    directory = _distributed(tmp_path / "b")
    groups = {"optimizer": {"param_groups": [{"lr": 1.0}]}}
    _edit(directory, lambda content: content.update(optimizer=groups))
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        _open(directory)
    assert "without the number of updates" in str(error.value.found)


def test_a_flipped_bit_in_the_distributed_optimizer_is_found(tmp_path: Path) -> None:
    directory = _distributed(tmp_path)
    path = directory / "mp_rank_00" / "distrib_optim.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    with _open(directory) as source, pytest.raises(CheckpointError, match="is damaged"):
        source.verify()


def test_samples_are_counted_as_megatron_does_where_they_are_not_said(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    _edit(directory, lambda content: vars(content["args"]).pop("consumed_train_samples"))
    _edit(directory, lambda content: content.pop("tokens"))
    with _open(directory) as source:
        assert source.progress["consumed_samples"] == 10 * 8
        assert source.progress["consumed_tokens"] == 10 * 8 * 12


def test_a_folder_is_recognised_by_the_files_of_its_ranks(tmp_path: Path) -> None:
    directory = save_megatron(tmp_path, whole_model(Shape()), Shape())
    assert FORMAT.recognise(directory)
    assert not FORMAT.recognise(tmp_path)
    shutil.move(directory / "mp_rank_00" / "model_optim_rng.pt", directory / "elsewhere.pt")
    assert not FORMAT.recognise(directory)
