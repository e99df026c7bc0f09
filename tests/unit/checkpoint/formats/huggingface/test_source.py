"""Folders that `transformers` writes are read to the same logits, or refused by what is wrong."""

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron import log
from megatron.checkpoint.boxes import Box, whole
from megatron.checkpoint.files.mapped_tensors import MappedTensors
from megatron.checkpoint.formats.huggingface.format import FORMAT
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.source import SourceOptions
from megatron.config.experts import RouterScoreFunction
from megatron.config.model import GluActivation, ModelConfig, RopeType, SoftmaxType
from megatron.errors import CheckpointError
from megatron.inference.generate import generate
from megatron.inference.sampling_params import SamplingParams
from megatron.model.gpt_model import GPTModel
from megatron.mpu.context import ParallelContext
from tests.support.checkpoints.hf_models import (
    CASES,
    LOGITS,
    POSITIONS,
    VOCABULARY,
    hf_model,
    our_build,
    our_logits,
    our_model,
    save_case,
    saved_logits,
    tokens,
)

# What an error of any kind moves logits by at least, fifty times rounding. The two forms of GELU,
# which differ by no more than 5e-4 anywhere, come closest to it.
WRONG = 50 * LOGITS


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each case, written once and never changed."""
    root, written = tmp_path_factory.mktemp("hf"), {}

    def folder(case: str) -> Path:
        if case not in written:
            written[case] = save_case(case, root / str(len(written)))
        return written[case]

    return folder


def opened(directory: Path, **options: Any) -> HuggingFaceSource:
    return HuggingFaceSource(directory, SourceOptions(**options))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, folders: Callable[[str], Path]) -> None:
    with opened(folders(case)) as source:
        found = our_logits(our_model(source))
    expected = saved_logits(case)
    assert float((found - expected).abs().max()) <= LOGITS
    assert float(expected.abs().max()) > 1  # and they are of a size at which that means something


@pytest.mark.parametrize("case", CASES)
def test_greedy_generation_is_that_of_transformers(
    case: str, folders: Callable[[str], Path]
) -> None:
    prompts = tokens(2, 9)
    model = hf_model(case)
    expected = model.generate(
        prompts, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    with opened(folders(case)) as source:
        found = generate(
            our_model(source),
            prompts.tolist(),
            max_new_tokens=12,
            params=SamplingParams(greedy=True),
            eod=None,
            seed=0,
            ctx=ParallelContext.single(),
        )
    assert [list(one.tokens) for one in found] == expected[:, 9:].tolist()


def changed_config(**changes: Any) -> Callable[[HuggingFaceSource], Tensor]:
    def logits(source: HuggingFaceSource) -> Tensor:
        model = GPTModel(dataclasses.replace(source.model, **changes), our_build())
        model.load_state_dict(our_model(source).state_dict(), strict=False)
        return our_logits(model.eval())

    return logits


def changed_weights(
    ending: str, change: Callable[[Tensor], Tensor]
) -> Callable[[HuggingFaceSource], Tensor]:
    def logits(source: HuggingFaceSource) -> Tensor:
        return our_logits(our_model(source, lambda n, t: change(t) if n.endswith(ending) else t))

    return logits


def _halves_swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2)[::-1])


def _groups_turned_round(weight: Tensor) -> Tensor:
    """The rows of both groups of queries, each with the other's key and value."""
    queries, rest = weight.unflatten(0, (2, -1)).split((16, 16), dim=1)
    return torch.cat((queries, rest.flip(0)), dim=1).flatten(0, 1)


def _experts_turned_round(weight: Tensor) -> Tensor:
    return weight.flip(0)


def _halves_of_experts_swapped(weight: Tensor) -> Tensor:
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _pairs_of_neighbours(weight: Tensor) -> Tensor:
    """The rows of every head as Meta's release has them, each pair side by side."""
    heads = weight.unflatten(0, (-1, 2, 4))  # of 8 channels
    return heads.transpose(1, 2).reshape(weight.shape)


def _heads_in_blocks(weight: Tensor) -> Tensor:
    return weight.unflatten(0, (4, 3, -1)).transpose(0, 1).reshape(weight.shape)


@pytest.mark.parametrize(
    ("case", "wrong"),
    [
        ("gpt2", changed_config(onnx_safe=True)),
        ("gpt2, erf, untied", changed_config(onnx_safe=False)),
        ("gpt_neox", changed_config(use_parallel_residual=False)),
        ("gpt_neox", changed_config(rotary_percent=1.0)),
        ("gpt_neox", changed_weights("qkv.weight", _heads_in_blocks)),
        ("bloom", changed_config(embed_layernorm=False)),
        ("bloom", changed_config(position_embedding_type="none")),
        ("bloom", changed_config(onnx_safe=True)),
        ("bloom", changed_config(apply_residual_connection_post_layernorm=True)),
        ("bloom", changed_weights("qkv.weight", _heads_in_blocks)),
        ("falcon", changed_config(use_parallel_residual=False)),
        ("falcon", changed_config(onnx_safe=False)),
        ("falcon", changed_weights("post_attention_norm.weight", torch.ones_like)),
        ("falcon", changed_weights("qkv.weight", _groups_turned_round)),
        ("llama", changed_weights("fc1.weight", _halves_swapped)),
        ("llama", changed_weights("qkv.weight", _pairs_of_neighbours)),
        ("llama", changed_config(position_embedding_type="none")),
        ("llama 3.1", changed_config(use_rope_scaling=False)),
        ("llama 3.1", changed_config(rotary_base=10000.0)),
        ("llama, yarn", changed_config(rope_type=RopeType.ROPE)),
        ("llama, yarn", changed_config(mscale=1.0)),
        ("llama, yarn", changed_config(yarn_correction_range_round_to_int=False)),
        ("mistral", changed_config(sliding_window=None)),
        ("mistral", changed_config(sliding_window=7)),
        ("phi3", changed_weights("qkv.weight", _groups_turned_round)),
        ("phi3", changed_weights("fc1.weight", _halves_swapped)),
        ("phi3, window, half rotates, tied", changed_config(rotary_percent=1.0)),
        ("phi3, window, half rotates, tied", changed_config(sliding_window=7)),
        ("qwen2", changed_weights("qkv.bias", torch.zeros_like)),
        ("smollm3", changed_config(no_rope_freq=None)),
        ("smollm3", changed_config(no_rope_freq="[1,0]")),
        ("qwen3", changed_config(qk_layernorm=False)),
        ("qwen3", changed_config(layernorm_epsilon=1e-1)),
        ("olmo2", changed_weights("mlp_output_norm.weight", torch.ones_like)),
        ("olmo2", changed_weights("query_norm.weight", _halves_swapped)),
        ("olmo2", changed_weights("key_norm.weight", _halves_swapped)),
        ("olmo2", changed_weights("attention_output_norm.weight", torch.ones_like)),
        ("granite", changed_config(embedding_multiplier=1.0)),
        ("granite", changed_config(residual_multiplier=1.0)),
        ("granite", changed_config(softmax_scale=None)),
        ("granite", changed_config(logit_divisor=1.0)),
        ("opt", changed_config(relu=False)),
        ("opt", changed_weights("position.weight", lambda t: t.roll(1, 0))),
        ("mixtral", changed_config(moe_router_score_function=RouterScoreFunction.SIGMOID)),
        ("mixtral", changed_config(moe_router_topk_scaling_factor=2.5)),
        ("mixtral", changed_config(moe_router_pre_softmax=True)),  # not scaled to a sum of 1
        ("mixtral", changed_config(moe_router_topk=3)),
        ("mixtral", changed_weights("experts.fc1.weight", _experts_turned_round)),
        ("mixtral", changed_weights("experts.fc2.weight", _experts_turned_round)),
        ("mixtral", changed_weights("experts.fc1.weight", _halves_of_experts_swapped)),
        ("gemma2", changed_config(attention_soft_cap=None)),
        ("gemma2", changed_config(logit_soft_cap=None)),
        ("gemma2", changed_config(softmax_scale=None)),
        ("gemma2", changed_config(embedding_multiplier=1.0)),
        ("gemma2", changed_config(glu_activation=GluActivation.GEGLU)),
        ("gemma2", changed_config(window_attn_skip_freq="[0,1,0]")),
        ("gemma2", changed_weights("norm.weight", lambda gain: gain - 1)),
        ("gemma2", changed_weights("mlp_output_norm.weight", torch.ones_like)),
        ("gemma3_text", changed_config(window_rotary_base=None)),
        ("gemma3_text", changed_config(rotary_seq_len_interpolation_factor=None)),
        ("gemma3_text", changed_weights("key_norm.weight", torch.ones_like)),
        ("gpt_oss", changed_config(softmax_type=SoftmaxType.VANILLA)),
        ("gpt_oss", changed_config(softmax_type=SoftmaxType.OFF_BY_ONE)),
        ("gpt_oss", changed_config(window_attn_skip_freq=None)),
        ("gpt_oss", changed_config(window_attn_skip_freq="[0,1]")),
        ("gpt_oss", changed_config(glu_linear_offset=0.0)),
        ("gpt_oss", changed_config(activation_func_clamp_value=None)),
        ("gpt_oss", changed_config(rope_type=RopeType.ROPE)),
        ("gpt_oss", changed_weights("router.bias", torch.zeros_like)),
        ("gpt_oss", changed_weights("experts.fc1.bias", _halves_of_experts_swapped)),
        ("gpt_oss", changed_weights("experts.fc1.weight", _halves_of_experts_swapped)),
        ("gpt_oss", changed_weights("experts.fc2.bias", _experts_turned_round)),
        ("qwen2_moe", changed_config(moe_router_pre_softmax=False)),
        ("qwen2_moe", changed_weights("shared_expert.gate", torch.zeros_like)),
        ("qwen2_moe", changed_weights("shared_expert.fc1.weight", _halves_swapped)),
        ("qwen3_moe", changed_config(moe_router_pre_softmax=True)),
        ("qwen3_moe", changed_weights("experts.fc2.weight", _experts_turned_round)),
    ],
)
def test_what_is_read_wrongly_shows_in_the_logits(
    case: str, wrong: Callable[[HuggingFaceSource], Tensor], folders: Callable[[str], Path]
) -> None:
    with opened(folders(case)) as source:
        assert float((wrong(source) - saved_logits(case)).abs().max()) > WRONG


@pytest.mark.parametrize("case", CASES)
def test_any_box_is_that_part_of_the_whole(case: str, folders: Callable[[str], Path]) -> None:
    draw = random.Random(1)
    with opened(folders(case)) as source:
        for name, description in source.tensors.items():
            everything = source.read(name, whole(description.global_shape))
            for _ in range(4):
                offset = tuple(draw.randrange(n) for n in description.global_shape)
                shape = tuple(
                    draw.randint(1, n - o) for n, o in zip(description.global_shape, offset)
                )
                box = Box(offset, shape)
                assert torch.equal(source.read(name, box), everything[box.slices]), name


def test_a_part_touches_no_more_than_its_rows(folders: Callable[[str], Path]) -> None:
    with opened(folders("llama")) as source:
        asked = []
        real = source._weights.read_into

        def read_into(key: str, box: Box, target: Tensor) -> None:
            asked.append((key.rpartition(".layers.0.")[2], box))
            real(key, box, target)

        source._weights.read_into = read_into  # type: ignore[method-assign]
        source.read("model/layers.0.mlp.fc1.weight", Box((28, 0), (28, 32)))  # of tp rank 1 of 2
        source.read("model/layers.0.attention.qkv.weight", Box((72, 0), (24, 32)))
    assert asked == [
        ("mlp.gate_proj.weight", Box((28, 0), (28, 32))),
        ("self_attn.q_proj.weight", Box((24, 0), (8, 32))),
        ("self_attn.k_proj.weight", Box((24, 0), (8, 32))),
        ("self_attn.v_proj.weight", Box((24, 0), (8, 32))),
    ]


def test_a_part_of_one_expert_touches_no_other(folders: Callable[[str], Path]) -> None:
    with opened(folders("mixtral")) as source:
        asked = []
        real = source._weights.read_into

        def read_into(key: str, box: Box, target: Tensor) -> None:
            asked.append((key.rpartition(".experts.")[2], box))
            real(key, box, target)

        source._weights.read_into = read_into  # type: ignore[method-assign]
        # Experts 1 and 2, of the gate the second half and of up the first: of tp ranks 1 and 0.
        source.read("model/layers.0.mlp.experts.fc1.weight", Box((1, 28, 0), (2, 56, 32)))
        source.read("model/layers.0.mlp.experts.fc2.weight", Box((3, 0, 28), (1, 32, 28)))
    assert asked == [
        ("1.w1.weight", Box((28, 0), (28, 32))),
        ("1.w3.weight", Box((0, 0), (28, 32))),
        ("2.w1.weight", Box((28, 0), (28, 32))),
        ("2.w3.weight", Box((0, 0), (28, 32))),
        ("3.w2.weight", Box((0, 28), (32, 28))),
    ]


def test_shards_are_read_as_one_file_is(tmp_path: Path, folders: Callable[[str], Path]) -> None:
    sharded = save_case("llama", tmp_path / "sharded", max_shard_size="20KB")
    assert len(list(sharded.glob("model-*.safetensors"))) > 3
    with opened(sharded) as source, opened(folders("llama")) as single:
        assert source.tensors == single.tensors
        for name, description in source.tensors.items():
            box = whole(description.global_shape)
            assert torch.equal(source.read(name, box), single.read(name, box)), name


def test_a_snapshot_of_links_is_read_as_the_files_are(tmp_path: Path) -> None:
    """As the cache of huggingface_hub keeps a release: names that point to blobs elsewhere."""
    save_case("llama", tmp_path / "blobs", max_shard_size="20KB")
    snapshot = tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "blobs").iterdir():
        (snapshot / file.name).symlink_to(file)
    with opened(snapshot) as source:
        assert float((our_logits(our_model(source)) - saved_logits("llama")).abs().max()) <= LOGITS


def test_a_bare_base_model_and_its_buffers_are_read(tmp_path: Path) -> None:
    """As the GPT-2 of 2019 is on the hub: no prefix, and the causal mask in every layer."""
    folder = save_case("gpt2", tmp_path / "old")
    tensors = load_file(folder / "model.safetensors")
    bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    for layer in range(2):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64)
    save_file(bare, folder / "model.safetensors")
    with opened(folder) as source:
        assert float((our_logits(our_model(source)) - saved_logits("gpt2")).abs().max()) <= LOGITS


def test_the_older_spelling_of_rotary_fields_means_the_same(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    for case in ("llama 3.1", "gpt_neox"):
        folder = save_case(case, tmp_path / case)
        config = json.loads((folder / "config.json").read_text())
        rope = config.pop("rope_parameters")
        if case == "gpt_neox":
            config |= {"rotary_emb_base": rope["rope_theta"], "rotary_pct": 0.5}
        else:
            config["rope_theta"] = rope.pop("rope_theta")
            config["rope_scaling"] = rope
        (folder / "config.json").write_text(json.dumps(config))
        with opened(folder) as old, opened(folders(case)) as new:
            assert old.model == new.model


def test_what_the_run_of_a_folder_is(folders: Callable[[str], Path]) -> None:
    with opened(folders("llama 3.1")) as source:
        config = source.config
        assert source.progress == source.scalars == {}
    assert config["data"] == {"seq_length": POSITIONS}
    assert config["tokenizer"]["true_vocab_size"] == VOCABULARY
    assert config["model"]["use_rope_scaling"]
    assert config["model"]["num_query_groups"] == 2
    assert ModelConfig(num_layers=1, hidden_size=4, num_attention_heads=1).qk_layernorm is False


def test_a_tied_head_that_is_stored_too_has_to_be_the_table(tmp_path: Path) -> None:
    folder = save_case("gpt2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    opened(folder).close()
    tensors["lm_head.weight"][17, 3] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="ties the output projection") as caught:
        opened(folder)
    assert "lm_head.weight is not the word embedding" in str(caught.value)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="ties the output projection"):
        opened(folder)


def change_file(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        (lambda t: t.pop(K_PROJ), [f"missing: {K_PROJ} (nearest: "]),
        (
            lambda t: t.update({K_PROJ.replace("k_proj", "k_prj"): t.pop(K_PROJ)}),
            [
                f"missing: {K_PROJ} (nearest: model.layers.1.self_attn.k_prj.weight",
                f"unknown: model.layers.1.self_attn.k_prj.weight (nearest: {K_PROJ}",
            ],
        ),
        (
            lambda t: t.update({K_PROJ: t[K_PROJ][:-1].contiguous()}),
            [f"shape: {K_PROJ} is [31, 32], and config.json makes it [32, 32]"],
        ),
        (lambda t: t.update({"score.weight": torch.zeros(2, 32)}), ["unknown: score.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["missing: lm_head.weight"]),
        (
            lambda t: [t.pop(k) for k in list(t) if "layers.1" in k],
            ["missing: model.layers.1.", "and 1 more"],
        ),
    ],
)
def test_files_that_are_not_of_the_config_are_told_apart_by_name(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None], messages: list[str]
) -> None:
    folder = save_case("llama", tmp_path / "m")
    change_file(folder, change)
    with pytest.raises(CheckpointError, match="do not hold the llama model") as caught:
        opened(folder)
    for text in messages:
        assert text in str(caught.value)


def test_parts_of_one_matrix_in_several_types_are_refused(tmp_path: Path) -> None:
    folder = save_case("llama", tmp_path / "m")
    change_file(folder, lambda t: t.update({K_PROJ: t[K_PROJ].half()}))
    with pytest.raises(CheckpointError, match="several element types") as caught:
        opened(folder)
    assert "are F16, F32" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "cannot be read"),
        ("[1]", "cannot be read"),
        ('{"model_type": "llama", "model_type": "gpt2"}', "cannot be read"),
        ("{}", "lacks a field"),
        ('{"model_type": "llama"}', "lacks a field"),
        ('{"model_type": "llama", "quantization_config": {"bits": 4}}', "are quantized"),
    ],
)
def test_a_config_that_says_nothing_true_is_refused(
    tmp_path: Path, text: str, problem: str
) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=problem):
        opened(tmp_path)


def test_a_folder_without_config_or_with_an_impossible_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        opened(tmp_path)
    folder = save_case("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"num_key_value_heads": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="describes no model: the query heads cannot"):
        opened(folder)


def test_rows_that_the_tokenizer_has_no_text_for_are_part_of_the_model(
    folders: Callable[[str], Path],
) -> None:
    with pytest.raises(CheckpointError, match="is not that of this run") as caught:
        opened(folders("llama"), vocab_size=50)
    assert "add --true-vocab-size 53" in str(caught.value)
    with pytest.raises(CheckpointError, match="is not that of this run") as caught:
        opened(folders("llama"), vocab_size=60)
    assert "use the tokenizer of the model" in str(caught.value)
    opened(folders("llama"), vocab_size=VOCABULARY).close()


def test_fields_that_nobody_reads_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_case("llama", tmp_path / "m")
    config = json.loads((folder / "config.json").read_text()) | {"attn_logit_softcapping": 50.0}
    (folder / "config.json").write_text(json.dumps(config))
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    opened(folder).close()
    assert len(warnings) == 1
    assert warnings[0].endswith("which were not read: attn_logit_softcapping")


@pytest.mark.parametrize("case", CASES)
def test_all_that_transformers_writes_is_read(
    case: str, folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(log, "warning", warnings.append)
    opened(folders(case)).close()
    assert warnings == []


def test_a_folder_is_recognised_by_its_config_and_weights(
    tmp_path: Path, folders: Callable[[str], Path]
) -> None:
    assert FORMAT.recognise(folders("llama"))
    assert not FORMAT.recognise(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not FORMAT.recognise(tmp_path)


@pytest.mark.parametrize(
    ("case", "kinds"),
    [
        ("gpt_neox", {"qkv.weight", "dense.weight", "fc1.weight", "word.weight"}),
        ("llama", {"dense.weight", "fc2.weight", "word.weight"}),
        ("gpt2", {"dense.bias", "word.weight"}),
        ("mixtral", {"dense.weight"}),
    ],
)
def test_tensors_that_files_hold_as_they_are_can_be_read_there(
    folders: Callable[[str], Path], case: str, kinds: set[str]
) -> None:
    with opened(folders(case)) as source:
        ranges = {name: source.range_of(name) for name in source.tensors}
        assert {name for name in ranges if ranges[name] is not None} >= {
            name for name in ranges if any(name.endswith(kind) for kind in kinds)
        }
        for name, found in ranges.items():
            if found is not None:
                (values,) = MappedTensors([found], {}).tensors
                assert torch.equal(values, source.read(name, whole(values.shape)))
        assert not any(ranges[name] for name in ranges if case == "llama" and "fc1" in name)


def test_files_of_torch_save_are_not_read_in_place(tmp_path: Path) -> None:
    folder = save_case("llama", tmp_path / "model")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with opened(folder) as source:
        assert not any(source.range_of(name) for name in source.tensors)
