"""A T5 in core's distributed layout: where its parameters lie there, and that all come back.

Keys are written down here as Megatron core writes them, so that a mistake in the table under test
is not made twice.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.checkpoint.boxes import whole
from megatron.checkpoint.formats.megatron.source import MegatronSource
from megatron.checkpoint.formats.megatron.writer import write_megatron
from megatron.checkpoint.formats.torch_dist.index import StoredIndex
from megatron.checkpoint.formats.torch_dist.source import TorchDistSource
from megatron.checkpoint.formats.torch_dist.writer import write_torch_dist
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource, assert_same
from tests.support.checkpoints.torch_dist_folders import Cut, by_rank, save_keys
from tests.support.checkpoints.torch_dist_folders import whole as one_chunk

DEPTHS = {"encoder": 2, "decoder": 3}
SIZES = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "ffn_hidden_size": 24}
OPTIONS = WriteOptions(make_vocab_size_divisible_by=4)
NO_BIASES = {"add_bias_linear": False, "untie_embeddings_and_output_weights": True}
LLAMA = {**NO_BIASES, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope"}
_LINEARS = {
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.output",
    "mlp.linear_fc1": "mlp.fc1",
    "mlp.linear_fc2": "mlp.fc2",
}
_CROSS = {
    "cross_attention.linear_q": "cross_attention.query",
    "cross_attention.linear_kv": "cross_attention.key_value",
    "cross_attention.linear_proj": "cross_attention.output",
}
LINEARS = {"encoder": _LINEARS, "decoder": _LINEARS | _CROSS}
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_norm.",
    "pre_cross_attn_layernorm.": "cross_norm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_norm.",
}
WB = ("weight", "bias")
POSITION, WORD = "embedding.position.weight", "embedding.word.weight"
# Core's T5 refers twice to its table of positions and to its head.
TWICE = {
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "output_layer.bias": "lm_head.output_layer.bias",
    "output_layer.weight": "lm_head.output_layer.weight",
}


def t5(**changes: Any) -> MemorySource:
    return MemorySource.of_t5(DEPTHS["decoder"], **{**SIZES, **changes})


def keys_of(source: MemorySource) -> dict[str, Tensor]:
    """All parameters by core's keys, padding aside: layers stacked, some tensors twice."""
    blocks = {
        f"{stack}.layers.{key}": f"{stack}.layers.*.{ours}"
        for stack, linears in LINEARS.items()
        for key, ours in {
            **{f"{key}.{leaf}": f"{ours}.{leaf}" for key, ours in linears.items() for leaf in WB},
            **{key + leaf: ours + leaf for key, ours in NORMS.items() for leaf in WB},
        }.items()
    }
    edges = {
        "embedding.word_embeddings.weight": WORD,
        "embedding.position_embeddings.weight": POSITION,
        "lm_head.output_layer.bias": "output_bias.bias",
        "lm_head.output_layer.weight": "output.weight",
        **{f"{s}.final_layernorm.{leaf}": f"{s}.final_norm.{leaf}" for s in DEPTHS for leaf in WB},
    }
    found = {}
    for key, ours in (blocks | edges).items():
        layers = DEPTHS[key.partition(".")[0]] if "*" in ours else 1
        names = [f"model/{ours.replace('*', str(layer))}" for layer in range(layers)]
        if names[0] in source.values:
            parts = [source.values[name] for name in names]
            found[key] = torch.stack(parts) if "*" in ours else parts[0]
    return found | {copy: found[key] for copy, key in TWICE.items() if key in found}


def halved(source: MemorySource) -> MemorySource:
    """The source with weights in bfloat16, whose masters are state of their own."""
    for name in [name for name in source.values if name.startswith("model/")]:
        source.values[name] = source.values[name].bfloat16()
    return source


def args_of(source: MemorySource, **changes: Any) -> dict[str, Any]:
    more = {"decoder_num_layers": 3, "decoder_seq_length": 4, "make_vocab_size_divisible_by": 1}
    return {**source.config["model"], "seq_length": 6, **more, **changes}


def opened(directory: Path) -> TorchDistSource:
    return TorchDistSource(directory, SourceOptions())


@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["tied", "llama"])
def test_files_hold_the_keys_that_core_looks_for(tmp_path: Path, flags: dict[str, Any]) -> None:
    source = t5(optimizer=True, **flags)
    index = StoredIndex(write_torch_dist(source, tmp_path, OPTIONS))
    expected = keys_of(source)
    model = [key for key in index.tensors if not key.startswith("optimizer.")]
    assert set(model) == set(expected)
    for key, value in expected.items():
        box = whole(tuple(value.shape))  # without the rows of padding
        assert torch.equal(index.read(key, box), value), key
    head = {f"{name}._extra_state/shard_0_1" for name in ("lm_head.output_layer", "output_layer")}
    assert set(index.objects) == head | {
        f"{stack}.layers.{linear}._extra_state/shard_{layer}_{depth}"
        for stack, depth in DEPTHS.items()
        for linear in LINEARS[stack]
        for layer in range(depth)
    }
    # Of a tensor that is there twice core keeps the state under its second name.
    state = {key.partition("exp_avg.")[2] for key in index.tensors if ".exp_avg." in key}
    assert state == set(expected) - set(TWICE.values())


@pytest.mark.parametrize("cut", [by_rank, one_chunk, None])
@pytest.mark.parametrize("flags", [{}, LLAMA], ids=["tied", "llama"])
def test_weights_are_read_however_they_are_cut(
    tmp_path: Path, flags: dict[str, Any], cut: Cut | None
) -> None:
    # An even vocabulary, of which ranks hold halves.
    source = t5(**flags)
    for name in (f"model/{WORD}", "model/output.weight", "model/output_bias.bias"):
        if name in source.values:
            source.values[name] = source.values[name][:10]
    directory = save_keys(
        tmp_path,
        keys_of(source),
        {},
        args_of(source),
        cut=cut or one_chunk,
        plain_dcp=cut is None,
    )
    with opened(directory) as found:
        found.verify()
        assert found.kind == "t5"
        assert found.config["encoder_decoder"] == source.config["encoder_decoder"]
        assert list(found.tensors) == [name for name in found.tensors if name in source.values]
        assert_same(found, source)
        name = "model/decoder.layers.2.cross_attention.key_value.weight"
        box = whole((8, 16)).moved((16, 0))  # what the second of four ranks holds
        assert torch.equal(found.read(name, box), source.values[name][box.slices])


def test_layers_are_read_that_are_not_stacked(tmp_path: Path) -> None:
    source = t5()
    tensors = {}
    for key, value in keys_of(source).items():
        stack, _, inside = key.partition(".layers.")
        alone = {f"{stack}.layers.{at}.{inside}": value[at] for at in range(len(value))}
        tensors |= alone if inside else {key: value}
    with opened(save_keys(tmp_path, tensors, {}, args_of(source), cut=one_chunk)) as found:
        assert_same(found, source)


@pytest.mark.parametrize(
    "flags",
    [{}, LLAMA, {**NO_BIASES, "position_embedding_type": "none"}],
    ids=["tied", "llama", "without positions"],
)
def test_a_t5_goes_there_and_back_with_its_optimizer(tmp_path: Path, flags: dict[str, Any]) -> None:
    source = halved(t5(optimizer=True, **flags))
    with opened(write_torch_dist(source, tmp_path, OPTIONS)) as found:
        found.verify()
        assert_same(found, source)
        assert found.scalars == source.scalars
        assert found.progress["iteration"] == 10
        assert found.config["encoder_decoder"] == source.config["encoder_decoder"]


def test_layers_are_stacked_by_number(tmp_path: Path) -> None:
    source = t5(num_layers=11)
    with opened(write_torch_dist(source, tmp_path, OPTIONS)) as found:
        assert_same(found, source)


def test_it_goes_through_files_of_ranks(tmp_path: Path) -> None:
    source = halved(t5(optimizer=True))
    files = WriteOptions(tensor_model_parallel_size=2, make_vocab_size_divisible_by=4)
    with opened(write_torch_dist(source, tmp_path / "a", OPTIONS)) as found:
        directory = write_megatron(found, tmp_path / "b", files)
    with MegatronSource(directory, SourceOptions()) as of_ranks:
        assert_same(of_ranks, source)
        directory = write_torch_dist(of_ranks, tmp_path / "c", OPTIONS)
    with opened(directory) as found:
        assert_same(found, source)


@pytest.mark.parametrize("key", ["position_embeddings.weight", "output_layer.bias"])
def test_what_is_kept_twice_has_to_be_equal(tmp_path: Path, key: str) -> None:
    source = t5()
    tensors = keys_of(source)
    tensors[key] = tensors[key] + 1
    with pytest.raises(CheckpointError, match="does not hold what it should") as error:
        opened(save_keys(tmp_path, tensors, {}, args_of(source), cut=one_chunk))
    assert f"{key} and {TWICE[key]} are both" in str(error.value.found)


def test_a_permuted_stack_shows(tmp_path: Path) -> None:
    source = t5()
    tensors, key = keys_of(source), "decoder.layers.cross_attention.linear_kv.weight"
    tensors[key] = tensors[key].flip(0)
    directory = save_keys(tmp_path, tensors, {}, args_of(source), cut=one_chunk)
    wrong = r"decoder\.layers\.0\.cross_attention\.key_value\.weight"
    with opened(directory) as found, pytest.raises(AssertionError, match=wrong):
        assert_same(found, source)


@pytest.mark.parametrize(
    ("more", "args", "problem", "words"),
    [
        (
            {"embedding.tokentype_embeddings.weight": (2, 16)},
            {},
            "not of a GPT, BERT or T5 that this",
            "embedding.tokentype_embeddings.weight",
        ),
        (
            {"encoder.layers.cross_attention.linear_q.weight": (2, 16, 16)},
            {},
            "not of a GPT, BERT or T5 that this",
            "encoder.layers.cross_attention.linear_q.weight",
        ),
        (
            {"decoder.layers.self_attention.q_layernorm.weight": (3, 4)},
            {},
            "not of a GPT, BERT or T5 that this",
            "decoder.layers.self_attention.q_layernorm.weight",
        ),
        ({}, {"decoder_num_layers": 4}, "does not hold every layer", "decoder_num_layers=4"),
        (
            {},
            {"position_embedding_type": "relative"},
            "has positions of a kind",
            "position_embedding_type='relative'",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    tmp_path: Path,
    more: dict[str, tuple[int, ...]],
    args: dict[str, Any],
    problem: str,
    words: str,
) -> None:
    source = t5()
    tensors = keys_of(source) | {key: torch.zeros(shape) for key, shape in more.items()}
    with pytest.raises(CheckpointError, match=problem) as error:
        opened(save_keys(tmp_path, tensors, {}, args_of(source, **args), cut=one_chunk))
    assert words in str(error.value.found)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_query_groups": 2}, "2 query groups of 4 heads in cross attention"),
        ({"add_bias_linear": False}, "a tied head without a bias for each word"),
        ({"untie_embeddings_and_output_weights": True}, "an untied head with a bias"),
        ({"position_embedding_type": "relative"}, "--position-embedding-type relative"),
        ({"qk_layernorm": True}, "encoder.layers.0.attention.query_norm.weight"),
        ({"glu_activation": "geglu"}, "--glu-activation geglu"),
    ],
)
def test_a_t5_that_core_does_not_have_is_refused_by_name(
    tmp_path: Path, flags: dict[str, Any], words: str
) -> None:
    with pytest.raises(CheckpointError, match="Megatron") as error:
        write_torch_dist(t5(**flags), tmp_path, OPTIONS)
    assert words in str(error.value.found)
    assert "sharded" in str(error.value.fix)
    assert not list(tmp_path.iterdir())
