"""A T5 in Megatron-LM's files: where its parameters lie there, and that all of them come back.

The names and their order are written down here as Megatron-LM has them, so that a mistake in the
table under test is not made twice.
"""

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.files import unpickle
from megatron.checkpoint.formats.megatron import t5_names
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.formats.megatron.writer import write_megatron
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.checkpoint import MegatronNames
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource, assert_same

WIDE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
DEPTH = 3  # of the decoder
NORMS = ("weight", "bias")
_ATTENTION = ("self_attention.query_key_value", "self_attention.dense")
_CROSS = ("inter_attention.query", "inter_attention.key_value", "inter_attention.dense")
_MLP = ("mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
# In the order in which Megatron's modules are registered.
ENCODER = ("input_layernorm", *_ATTENTION, "post_attention_layernorm", *_MLP)
DECODER = (
    *("input_layernorm", *_ATTENTION, "post_attention_layernorm"),
    *(*_CROSS, "post_inter_attention_layernorm", *_MLP),
)
OURS = {
    "input_layernorm": "input_norm",
    "self_attention.query_key_value": "attention.qkv",
    "self_attention.dense": "attention.output",
    "inter_attention.query": "cross_attention.query",
    "inter_attention.key_value": "cross_attention.key_value",
    "inter_attention.dense": "cross_attention.output",
    "mlp.dense_h_to_4h": "mlp.fc1",
    "mlp.dense_4h_to_h": "mlp.fc2",
}


def options(tp: int = 1, **more: Any) -> WriteOptions:
    return WriteOptions(tensor_model_parallel_size=tp, make_vocab_size_divisible_by=4, **more)


def names_of_files() -> dict[str, str]:
    """Our name by Megatron's, in the order of its modules."""
    found = {
        "embedding.word_embeddings.weight": "embedding.word.weight",
        "embedding.position_embeddings.weight": "embedding.position.weight",
    }
    for stack, depth, modules in (("encoder", 2, ENCODER), ("decoder", DEPTH, DECODER)):
        # The norm before the MLP; that of the decoder before it is of cross attention.
        before_mlp = [name for name in modules if name.endswith("attention_layernorm")][-1]
        for layer in range(depth):
            for module in modules:
                ours = "post_attention_norm" if module == before_mlp else "cross_norm"
                ours = OURS.get(module, ours)
                for leaf in NORMS:
                    name = f"{stack}.layers.{layer}."
                    found[f"{name}{module}.{leaf}"] = f"{name}{ours}.{leaf}"
        for leaf in NORMS:
            found[f"{stack}.final_layernorm.{leaf}"] = f"{stack}.final_norm.{leaf}"
    return found | {"lm_head.bias": "output_bias.bias"}


def flat(content: Any, prefix: str = "") -> dict[str, Tensor]:
    """The tensors of a file's model by dotted names."""
    found: dict[str, Tensor] = {}
    for name, value in content.items():
        if isinstance(value, Tensor):
            found[f"{prefix}{name}"] = value
        else:
            found |= flat(value, f"{prefix}{name}.")
    return found


def test_names_and_order_are_those_of_megatrons_modules(tmp_path: Path) -> None:
    source = MemorySource.of_t5(DEPTH, optimizer=True, **WIDE)
    directory = write_megatron(source, tmp_path, options())
    content = unpickle.load(directory / "mp_rank_00" / "model_optim_rng.pt")
    wanted = names_of_files()
    assert [*content["model"]] == ["language_model", "lm_head"]
    written = flat(content["model"])
    assert [name.removeprefix("language_model.") for name in written] == [*wanted]
    for name, ours in wanted.items():
        assert t5_names.our_t5_name(name) == ours
        key = name if name.startswith("lm_head") else f"language_model.{name}"
        values = source.read(f"model/{ours}", whole(source.tensors[f"model/{ours}"].global_shape))
        assert torch.equal(written[key][: len(values)], values), name
    args = vars(content["args"])
    assert (args["num_layers"], args["encoder_num_layers"], args["decoder_num_layers"]) == (2, 2, 3)
    # State is numbered by modules, matrices first.
    (matrices, vectors) = content["optimizer"]["optimizer"]["param_groups"]
    tensors = [*written.values()]
    assert len(matrices["params"]) == sum(value.dim() > 1 for value in tensors)
    state = content["optimizer"]["optimizer"]["state"].values()
    shapes = [value["exp_avg"].shape for value in state]
    expected = [value.shape for dims in (2, 1) for value in tensors if value.dim() == dims]
    assert shapes == expected
    assert len(vectors["params"]) == sum(value.dim() == 1 for value in tensors)


@pytest.mark.parametrize(
    ("tp", "flags"),
    [
        (1, {}),
        (2, {}),
        (4, {"untie_embeddings_and_output_weights": True}),
        (2, {"num_query_groups": 2, "swiglu": True}),
        (2, {"glu_activation": "geglu", "position_embedding_type": "rope"}),
    ],
)
def test_a_t5_goes_there_and_back_at_any_tensor_parallel_size(
    tmp_path: Path, tp: int, flags: dict[str, Any]
) -> None:
    source = MemorySource.of_t5(DEPTH, optimizer=True, **WIDE, **flags)
    directory = write_megatron(source, tmp_path, options(tp))
    with MegatronSource(directory, SourceOptions()) as found:
        found.verify()
        assert_same(found, source)
        assert found.kind == "t5"
        assert found.config["encoder_decoder"] == source.config["encoder_decoder"]
        # And from there to another size.
        again = write_megatron(found, tmp_path / "again", options(3 - tp if tp < 3 else 1))
    with MegatronSource(again, SourceOptions()) as found:
        assert_same(found, source)


def save_stages(folder: Path, source: MemorySource) -> Path:
    """The T5 of `source` as four pipeline stages of Megatron: two for each stack.

    The decoder's first stage has the embedding again, and its last one the words of the head.
    """
    table = {name: source.values[f"model/{ours}"] for name, ours in names_of_files().items()}
    directory = folder / "iter_0000010"
    args = {**source.config["model"], "encoder_num_layers": 2, "make_vocab_size_divisible_by": 1}
    for stage, layers in enumerate(("encoder.0", "encoder.1", "decoder.0", "decoder.1 2")):
        stack, numbers = layers.split(".")
        held, ends = {}, {"encoder": 1, "decoder": 3}
        for name, value in table.items():
            parts = name.split(".")
            is_embedding = parts[0] == "embedding" and stage in (0, 2)
            if is_embedding or (parts[1] == "final_layernorm" and stage == ends[parts[0]]):
                held[f"language_model.{name}"] = value
            elif parts[:2] == [stack, "layers"] and parts[2] in numbers.split():
                parts[2] = str(int(parts[2]) - int(numbers[0]))
                held[f"language_model.{'.'.join(parts)}"] = value
        if stage == 3:
            held["lm_head.bias"] = table["lm_head.bias"]
            held["word_embeddings_for_head.weight"] = table["embedding.word_embeddings.weight"]
        content = {
            "args": argparse.Namespace(**args),
            "checkpoint_version": 3.0,
            "iteration": 10,
            "model": held,
        }
        (directory / f"mp_rank_00_{stage:03d}").mkdir(parents=True)
        torch.save(content, directory / f"mp_rank_00_{stage:03d}" / "model_optim_rng.pt")
    return directory


def test_stages_of_encoder_and_decoder_are_read(tmp_path: Path) -> None:
    source = MemorySource.of_t5(DEPTH, **WIDE)
    directory = save_stages(tmp_path, source)
    with MegatronSource(directory, SourceOptions()) as found:
        found.verify()
        assert found.tensors == source.tensors
        for name, known in source.tensors.items():
            assert torch.equal(found.read(name, whole(known.global_shape)), source.values[name])
        assert found.config["encoder_decoder"] == {"decoder_num_layers": DEPTH}
    # A table of the decoder that differs from the encoder's.
    path = directory / "mp_rank_00_002" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["model"]["language_model.embedding.position_embeddings.weight"] += 1
    torch.save(content, path)
    with (
        MegatronSource(directory, SourceOptions()) as found,
        pytest.raises(CheckpointError, match="does not hold what it should") as error,
    ):
        found.verify()
    assert "position_embeddings.weight differs from" in str(error.value)


def test_rows_of_older_versions_are_read_in_our_order(tmp_path: Path) -> None:
    """In version 1 the channels of keys and values alternate."""
    source = MemorySource.of_t5(DEPTH, **WIDE)
    directory = write_megatron(source, tmp_path, options())
    path = directory / "mp_rank_00" / "model_optim_rng.pt"
    content = torch.load(path, weights_only=False)
    content["checkpoint_version"] = 1.0
    width = WIDE["hidden_size"] // WIDE["num_attention_heads"]
    for part in (content["model"]["language_model"][stack] for stack in ("encoder", "decoder")):
        for name, value in part.items():
            for module, count in (("query_key_value", 3), ("key_value", 2)):
                if f".{module}." in name:
                    by_head = value.view(-1, count, width, *value.shape[1:])
                    part[name] = by_head.transpose(1, 2).reshape(value.shape)
    torch.save(content, path)
    with MegatronSource(directory, SourceOptions()) as found:
        for name, known in source.tensors.items():
            assert torch.equal(found.read(name, whole(known.global_shape)), source.values[name])


@pytest.mark.parametrize(
    ("flags", "more", "words"),
    [
        ({}, {"pipeline_model_parallel_size": 2}, "2 pipeline stages"),
        ({}, {"megatron_names": MegatronNames.CORE}, "--megatron-names core"),
        ({"add_bias_linear": False}, {}, "a head without a bias for each word"),
        ({"position_embedding_type": "relative"}, {}, "--position-embedding-type relative"),
    ],
)
def test_a_t5_that_is_not_written_is_refused_by_name(
    tmp_path: Path, flags: dict[str, Any], more: dict[str, Any], words: str
) -> None:
    source = MemorySource.of_t5(DEPTH, **WIDE, **flags)
    with pytest.raises(CheckpointError, match=r"Megatron") as error:
        write_megatron(source, tmp_path, options(**more))
    assert words in str(error.value.found)
    assert "sharded" in str(error.value.fix)


def test_segments_of_a_t5_are_refused_by_name(tmp_path: Path) -> None:
    directory = write_megatron(MemorySource.of_t5(DEPTH, **WIDE), tmp_path, options())
    path = next(directory.rglob("model_optim_rng.pt"))
    content = torch.load(path, weights_only=False)
    table = {"weight": torch.zeros(2, 16)}
    content["model"]["language_model"]["embedding"]["tokentype_embeddings"] = table
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="not of a GPT, BERT or T5") as error:
        MegatronSource(directory, SourceOptions())
    assert "embedding.tokentype_embeddings.weight" in str(error.value.found)
