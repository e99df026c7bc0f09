"""Mixtral's fields: experts, what is left to defaults, and what only training reads."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.mixtral import MIXTRAL
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE

EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2}


def fields_of(**values: Any) -> Fields:
    return Fields(Path("config.json"), SHAPE | EXPERTS | values)


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, MIXTRAL.read_config(fields_of(**values)))


def test_the_first_release() -> None:
    """As on the hub: mistralai/Mixtral-8x7B-v0.1, but for its sizes."""
    fields = fields_of(
        hidden_act="silu",
        rms_norm_eps=1e-05,
        rope_theta=1000000.0,
        sliding_window=None,
        attention_dropout=0.0,
        output_router_logits=False,
        router_aux_loss_coef=0.02,
        tie_word_embeddings=False,
        vocab_size=50,
        use_cache=True,
    )
    config = from_plain(ModelConfig, MIXTRAL.read_config(fields))
    MIXTRAL.read_sizes(fields)
    assert fields.unread() == []
    assert (config.num_experts, config.moe_router_topk, config.expert_width) == (8, 2, 64)
    assert config.sliding_window is None
    assert config.rotary_base == 1e6
    assert config.swiglu
    assert not config.tied
    assert not config.add_bias_linear
    assert not config.moe_router_pre_softmax
    assert not config.has_router_loss  # Mixtral's is of whole micro-batches


def test_what_is_not_said_is_what_transformers_takes() -> None:
    config = read(num_local_experts=None, num_experts_per_tok=None)
    assert (config.num_experts, config.moe_router_topk) == (8, 2)
    assert (config.rotary_base, config.layernorm_epsilon) == (1e6, 1e-5)
    assert config.sliding_window is None
    assert read(rope_parameters={"rope_theta": 5.0}).rotary_base == 5.0
    with pytest.raises(CheckpointError, match="lacks a field"):
        read(num_key_value_heads=None)


def test_noise_before_the_router_is_refused() -> None:
    assert read(router_jitter_noise=0.0).has_experts
    with pytest.raises(CheckpointError, match="noise on the input of a router") as caught:
        read(router_jitter_noise=0.01)
    assert "'router_jitter_noise' is 0.01" in str(caught.value)


def test_what_is_written_is_read_again() -> None:
    config = read(sliding_window=16, head_dim=16, num_local_experts=3, num_experts_per_tok=3)
    written = MIXTRAL.write_config(config, Sizes(50, 128))
    back = from_plain(ModelConfig, MIXTRAL.read_config(Fields(Path("x"), written)))
    assert back.meaning() == config.meaning()
    assert written["head_dim"] == 16
    assert MIXTRAL.write_config(read(), Sizes(50, 128))["head_dim"] is None
