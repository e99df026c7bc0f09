"""What is written is read by `transformers` to the same logits, and is what was read before."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.files.safetensors_io import dtype_code_of, dtype_of
from megatron.checkpoint.formats.huggingface import writer
from megatron.checkpoint.formats.huggingface.families.registry import FAMILIES
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.native.source import ShardedSource, write_sharded
from megatron.checkpoint.model_kind import GPT
from megatron.checkpoint.source import SourceBase, SourceOptions, TensorDescription, WriteOptions
from megatron.config.blocks import NormPlacement, QkNormScope
from megatron.config.fields import to_plain
from megatron.config.model import ModelConfig, Normalization, PositionEmbedding
from megatron.errors import CheckpointError
from megatron.model.gpt_model import GPTModel
from tests.support.checkpoints.hf_models import (
    CASES,
    LOGITS,
    hf_model,
    our_build,
    our_logits,
    save_case,
    saved_logits,
    tokens,
)
from tests.unit.checkpoint.formats.huggingface.test_family import GEMMA, GPT_OSS

GELU_FAST = "gpt_neox, one after the other"


class MemorySource(SourceBase):
    """A model of this process as a checkpoint, which records the size of the largest read."""

    format_name = "memory"
    directory = Path("memory")

    def __init__(self, model: GPTModel, **groups: Any) -> None:
        self._state = {f"model/{name}": t for name, t in model.state_dict().items()}
        self.config = {"model": to_plain(model.config), "data": {"seq_length": 64}, **groups}
        self.progress: dict[str, Any] = {}
        self.scalars: dict[str, Any] = {}
        self.largest = 0

    @property
    def tensors(self) -> dict[str, TensorDescription]:
        return {
            name: TensorDescription(dtype_code_of(tensor.dtype), tuple(tensor.shape))
            for name, tensor in self._state.items()
        }

    def read(self, name: str, box: Box) -> Tensor:
        self.largest = max(self.largest, box.size)
        return self._state[name][box.slices]


def logits_of(folder: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(tokens()).logits


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_through_our_own_format_keeps_every_bit(case: str, tmp_path: Path) -> None:
    there = save_case(case, tmp_path / "there")
    with HuggingFaceSource(there, SourceOptions()) as source:
        ours = write_sharded(source, tmp_path / "ours")
    with ShardedSource(ours) as source:
        back = writer.write_huggingface(
            source, tmp_path / "back", WriteOptions(family=json_of(there)["model_type"])
        )
    before, after = stored(there), stored(back)
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
        assert tensor.dtype == after[key].dtype
    if case != GELU_FAST:  # which is written as the formula that it rounds differently
        assert torch.equal(logits_of(there), logits_of(back))
    assert float((logits_of(back) - saved_logits(case)).abs().max()) <= LOGITS


def json_of(folder: Path) -> dict[str, Any]:
    values = json.loads((folder / "config.json").read_text())
    assert isinstance(values, dict)
    return values


@pytest.mark.parametrize("case", CASES)
def test_what_config_says_is_what_transformers_said(case: str, tmp_path: Path) -> None:
    """Except for fields without effect on the network, the two configs are equal objects."""
    there = save_case(case, tmp_path / "there")
    with HuggingFaceSource(there, SourceOptions()) as source:
        back = writer.write_huggingface(
            source, tmp_path / "back", WriteOptions(family=json_of(there)["model_type"])
        )
    one, other = (
        transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (there, back)
    )
    ours = {"bos_token_id", "eos_token_id", "pad_token_id", "architectures", "dtype"}
    ours |= {"_name_or_path", "n_inner", "max_window_layers", "original_max_position_embeddings"}
    if case == GELU_FAST:
        assert (one.pop("hidden_act"), other["hidden_act"]) == ("gelu_fast", "gelu_new")
    if case == "qwen2_moe":  # every second layer, which is written as a list of the others
        assert (one.pop("decoder_sparse_step"), one.pop("mlp_only_layers")) == (2, [])
        assert (other["decoder_sparse_step"], other["mlp_only_layers"]) == (1, [0, 2])
    assert {key: one[key] for key in one if key not in ours and one[key] != other.get(key)} == {}


def shaped(**changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "init_method_std": 0.2,
    }
    return ModelConfig(**(values | changes))


LLAMA = {
    "position_embedding_type": PositionEmbedding.ROPE,
    "normalization": Normalization.RMS_NORM,
    "swiglu": True,
    "ffn_hidden_size": 40,
    "add_bias_linear": False,
    "num_query_groups": 2,
}
# Ours that no release of the family has: what has to come out of the table, not out of a default.
OURS = {
    "gpt2": {"ffn_hidden_size": 20, "squared_relu": True, "layernorm_epsilon": 1e-2},
    "gpt_neox": {"position_embedding_type": PositionEmbedding.ROPE, "rotary_percent": 0.75},
    "llama": {**LLAMA, "rotary_base": 77.0, "untie_embeddings_and_output_weights": True},
    "bloom": {"position_embedding_type": PositionEmbedding.ALIBI, "embed_layernorm": True},
    "falcon": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "use_parallel_residual": True,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "squared_relu": True,
    },
    "phi3": {**LLAMA, "rotary_percent": 0.5, "sliding_window": 9, "kv_channels": 12},
    "mistral": {**LLAMA, "sliding_window": 3},
    "qwen2": {**LLAMA, "add_qkv_bias": True},
    "qwen3": {**LLAMA, "qk_layernorm": True, "kv_channels": 12},
    "smollm3": {**LLAMA, "no_rope_freq": "[1,0]", "add_bias_linear": True},
    "olmo2": {
        **LLAMA,
        "norm_placement": NormPlacement.AFTER,
        "qk_layernorm": True,
        "qk_layernorm_scope": QkNormScope.ALL_HEADS,
        "kv_channels": 12,
    },
    "granite": {**LLAMA, "softmax_scale": 0.5, "embedding_multiplier": 2.5, "logit_divisor": 1.5},
    "opt": {"relu": True, "ffn_hidden_size": 20, "untie_embeddings_and_output_weights": True},
    "mixtral": {
        **LLAMA,
        "num_experts": 5,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 24,
        "kv_channels": 12,
    },
    "gpt_oss": {
        **GPT_OSS,
        "num_query_groups": 2,
        "kv_channels": 12,
        "moe_ffn_hidden_size": 24,
        "activation_func_clamp_value": 0.5,
        "sliding_window": 5,
        "window_attn_skip_freq": "[0,1]",
    },
    "gemma2": {
        **GEMMA,
        "embedding_multiplier": 32**0.5,
        "num_query_groups": 2,
        "attention_soft_cap": 2.0,
        "sliding_window": 5,
        "window_attn_skip_freq": "[0,1]",
    },
    "gemma3_text": {
        **GEMMA,
        "embedding_multiplier": 32**0.5,
        "qk_layernorm": True,
        "kv_channels": 12,
        "logit_soft_cap": 3.0,
        "sliding_window": 5,
        "window_rotary_base": 20.0,
        "rotary_seq_len_interpolation_factor": 2.0,
    },
    "qwen2_moe": {
        **LLAMA,
        "add_qkv_bias": True,
        "num_experts": 3,
        "moe_router_pre_softmax": True,
        "moe_layer_freq": "2",
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
    },
    "qwen3_moe": {
        **LLAMA,
        "qk_layernorm": True,
        "kv_channels": 12,
        "num_experts": 5,
        "moe_router_topk": 3,
        "moe_ffn_hidden_size": 24,
        "expert_interval": 2,
    },
}


def rough(config: ModelConfig, dtype: torch.dtype = torch.float32) -> GPTModel:
    model = GPTModel(config, our_build())
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.25)
            if "norm.weight" in name:
                parameter.add_(1.0)
    return model.to(dtype).eval()


@pytest.mark.parametrize("family", OURS)
def test_a_model_of_ours_is_the_same_model_there(family: str, tmp_path: Path) -> None:
    assert set(OURS) == {name for name, one in FAMILIES.items() if one.kinds == (GPT,)}
    model = rough(shaped(**OURS[family]))
    folder = writer.write_huggingface(MemorySource(model), tmp_path / "m", WriteOptions())
    assert json_of(folder)["model_type"] == family
    assert float((logits_of(folder) - our_logits(model)).abs().max()) <= LOGITS


def test_shards_have_an_index_and_their_size_is_kept(tmp_path: Path) -> None:
    source = MemorySource(rough(shaped(**OURS["llama"])))
    limit = 20_000
    folder = writer.write_huggingface(source, tmp_path / "m", WriteOptions(max_shard_bytes=limit))
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            keys = list(opened.keys())
            assert all(index["weight_map"][key] == file for key in keys)
            size = sum(4 * opened.get_tensor(key).numel() for key in keys)
            assert size <= limit or len(keys) == 1
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in stored(folder).values())
    whole = writer.write_huggingface(source, tmp_path / "whole", WriteOptions())
    assert torch.equal(logits_of(folder), logits_of(whole))


def test_no_more_than_one_tensor_is_in_memory(tmp_path: Path) -> None:
    model = rough(shaped(**OURS["gpt2"]))
    source = MemorySource(model)
    writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    assert source.largest <= max(parameter.numel() for parameter in model.parameters())


def test_of_a_stack_of_experts_no_more_than_one_is_in_memory(tmp_path: Path) -> None:
    source = MemorySource(rough(shaped(**OURS["mixtral"])))
    writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    table = source.tensors["model/embedding.word.weight"].global_shape
    stack = source.tensors["model/layers.0.mlp.experts.fc1.weight"].global_shape
    assert source.largest == table[0] * table[1] < stack[0] * stack[1] * stack[2]


@pytest.mark.parametrize(("code", "name"), [("BF16", "bfloat16"), ("F16", "float16")])
def test_another_type_rounds_every_weight_once(code: str, name: str, tmp_path: Path) -> None:
    model = rough(shaped(**OURS["qwen3"]))
    plain = writer.write_huggingface(MemorySource(model), tmp_path / "plain", WriteOptions())
    narrow = writer.write_huggingface(
        MemorySource(model), tmp_path / "narrow", WriteOptions(dtype=code)
    )
    assert json_of(narrow)["torch_dtype"] == name
    wide = stored(plain)
    for key, tensor in stored(narrow).items():
        assert torch.equal(tensor, wide[key].to(dtype_of(code))), key


def test_a_type_that_was_not_asked_for_is_kept(tmp_path: Path) -> None:
    source = MemorySource(rough(shaped(**OURS["llama"]), torch.bfloat16))
    folder = writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    assert {tensor.dtype for tensor in stored(folder).values()} == {torch.bfloat16}
    assert json_of(folder)["torch_dtype"] == "bfloat16"


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    source = MemorySource(rough(shaped()))
    with pytest.raises(CheckpointError, match="is not empty"):
        writer.write_huggingface(source, tmp_path, WriteOptions())
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert writer.write_huggingface(source, empty, WriteOptions()) == empty


def test_what_fails_half_way_leaves_nothing(tmp_path: Path) -> None:
    class Damaged(MemorySource):
        def read(self, name: str, box: Box) -> Tensor:
            if name.startswith("model/layers.1"):
                raise CheckpointError("it is damaged", fix="copy it")
            return super().read(name, box)

    with pytest.raises(CheckpointError, match="it is damaged"):
        writer.write_huggingface(Damaged(rough(shaped())), tmp_path / "m", WriteOptions())
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="writing the Hugging Face folder failed"):
        writer.write_huggingface(
            MemorySource(rough(shaped())), tmp_path / "file" / "m", WriteOptions()
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model/final_norm.bias"), "missing: final_norm.bias"),
        (lambda t: t.update({"model/extra": torch.zeros(1)}), "unknown: extra"),
        (
            lambda t: t.update({"model/final_norm.bias": torch.zeros(3)}),
            "shape: final_norm.bias is [3], and its config makes it [32]",
        ),
    ],
)
def test_a_source_that_is_not_its_config_is_refused(
    change: Any, message: str, tmp_path: Path
) -> None:
    source = MemorySource(rough(shaped()))
    change(source._state)
    with pytest.raises(CheckpointError, match="does not hold a whole model") as caught:
        writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    assert message in str(caught.value)


def test_a_source_that_does_not_know_its_model_is_refused(tmp_path: Path) -> None:
    source = MemorySource(rough(shaped()))
    source.config["model"] = {}
    with pytest.raises(CheckpointError, match="does not record the model of its weights"):
        writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    model = rough(shaped(**OURS["llama"], max_position_embeddings=None))
    source = MemorySource(model, data={})
    with pytest.raises(CheckpointError, match="does not record the length of its sequences"):
        writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    assert list(tmp_path.iterdir()) == []


def test_gains_of_half_precision_come_back_to_the_bit(tmp_path: Path) -> None:
    """Near 1 half precision has few digits, so ours are in fp32, and theirs as the others are."""
    model = hf_model("gemma3_text").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "there")
    with HuggingFaceSource(tmp_path / "there", SourceOptions()) as source:
        assert source.tensors["model/final_norm.weight"].dtype_code == "F32"
        assert source.tensors["model/layers.0.mlp.fc2.weight"].dtype_code == "BF16"
        back = writer.write_huggingface(source, tmp_path / "back", WriteOptions())
    before, after = stored(tmp_path / "there"), stored(back)
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype
        assert torch.equal(after[key], tensor), key


def test_optimizer_state_stays_behind(tmp_path: Path) -> None:
    source = MemorySource(rough(shaped()))
    source._state["optimizer/exp_avg/final_norm.bias"] = torch.zeros(32)
    folder = writer.write_huggingface(source, tmp_path / "m", WriteOptions())
    assert stored(folder).keys() == dict(hf_model("gpt2").named_parameters()).keys()
