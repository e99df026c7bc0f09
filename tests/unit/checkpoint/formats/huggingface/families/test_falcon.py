"""Falcon's config in its releases, and layers with one norm, which are read as layers with two."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from megatron.checkpoint.formats.huggingface.families.falcon import FALCON
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.checkpoint.formats.huggingface.source import HuggingFaceSource
from megatron.checkpoint.formats.huggingface.writer import write_huggingface
from megatron.checkpoint.source import SourceOptions, WriteOptions
from megatron.config.fields import from_plain
from megatron.config.model import Activation, ModelConfig
from megatron.errors import CheckpointError
from tests.support.checkpoints.hf_models import LOGITS, hf_model, our_logits, our_model, tokens

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 50}


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, FALCON.read_config(fields_of(**values)))


def test_the_first_release() -> None:
    """As on the hub: tiiuae/falcon-7b, but for its sizes."""
    fields = fields_of(
        alibi=False,
        apply_residual_connection_post_layernorm=False,
        attention_dropout=0.0,
        bias=False,
        hidden_dropout=0.0,
        layer_norm_epsilon=1e-05,
        multi_query=True,
        new_decoder_architecture=False,
        parallel_attn=True,
    )
    config = from_plain(ModelConfig, FALCON.read_config(fields))
    assert FALCON.read_sizes(fields).positions == 2048
    assert (config.query_groups, config.ffn_width) == (1, 128)
    assert config.activation is Activation.GELU_ERF
    assert all((config.use_parallel_residual, config.tied, not config.add_bias_linear))
    fields.get("num_kv_heads", None)
    assert fields.unread() == []


def test_groups_depend_on_the_architecture() -> None:
    assert read(num_kv_heads=2).query_groups == 1  # which the old architecture does not read
    assert read(num_kv_heads=2, multi_query=False).query_groups == 4
    assert read(num_kv_heads=2, new_decoder_architecture=True).query_groups == 2
    assert read(new_decoder_architecture=True).query_groups == 4


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("alibi", True, "ALiBi that is scaled"),
        ("parallel_attn", False, "an MLP after attention"),
        ("apply_residual_connection_post_layernorm", True, "residuals after norms"),
        ("num_ln_in_parallel_attn", 3, "no model here does"),
        ("activation", "relu", "no model here does"),
    ],
)
def test_what_no_model_here_computes_is_refused(field: str, value: object, why: str) -> None:
    with pytest.raises(CheckpointError, match=why) as caught:
        read(**{field: value})
    assert f"'{field}' is {value!r}" in str(caught.value)


@pytest.mark.parametrize(
    "release",
    [
        {"new_decoder_architecture": False, "multi_query": True},  # 7B
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None},
        {"new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},  # 11B
    ],
    ids=["one group", "a group for each head", "new architecture"],
)
def test_one_norm_is_read_as_two_and_written_as_two(
    release: dict[str, Any], tmp_path: Path
) -> None:
    model = hf_model("falcon", **({"num_ln_in_parallel_attn": None} | release))
    model.save_pretrained(tmp_path / "there")
    with torch.no_grad():
        expected = model(tokens()).logits
    with HuggingFaceSource(tmp_path / "there", SourceOptions()) as source:
        ours = our_model(source)
        back = write_huggingface(source, tmp_path / "back", WriteOptions())
    assert float((our_logits(ours) - expected).abs().max()) <= LOGITS
    auto: Any = transformers.AutoModelForCausalLM
    with torch.no_grad():
        written = auto.from_pretrained(back, attn_implementation="eager").eval()(tokens()).logits
    assert float((written - expected).abs().max()) <= LOGITS
    assert float(expected.abs().max()) > 1
