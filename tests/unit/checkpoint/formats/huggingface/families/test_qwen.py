"""Biases, norms of heads, and windows of Qwen2 and Qwen3."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.qwen import QWEN2, QWEN3
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def read(family: Any = QWEN2, **values: Any) -> ModelConfig:
    fields = Fields(Path("config.json"), SHAPE | {"num_key_value_heads": 2} | values)
    return from_plain(ModelConfig, family.read_config(fields))


def test_the_second_has_biases_of_q_k_v_and_the_third_norms() -> None:
    assert read().has_qkv_bias_alone
    assert not read().qk_layernorm
    third = read(QWEN3)
    assert third.qk_layernorm
    assert not third.has_qkv_bias_alone
    assert third.head_width == 128  # what transformers takes for an absent field


def test_a_window_counts_only_where_it_is_used() -> None:
    assert read(sliding_window=64).sliding_window is None
    used = {"use_sliding_window": True, "sliding_window": 64}
    assert read(**used, max_window_layers=0).sliding_window == 64
    assert read(**used, max_window_layers=2).sliding_window is None
    every = ["sliding_attention"] * 2
    assert read(**used, max_window_layers=1, layer_types=every).layers_without_window == ()
    assert read(**used, max_window_layers=1).layers_without_window == (0,)
    some = read(**used, layer_types=["sliding_attention", "full_attention"])
    assert (some.sliding_window, some.layers_without_window) == (64, (1,))
    written = QWEN2.write_config(some, Sizes(50, 128))
    assert read(**written).meaning() == some.meaning()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"use_sliding_window": True, "layer_types": ["chunked_attention"] * 2},
            "'layer_types' is ['chunked_attention'",
        ),
        (
            {"use_sliding_window": True, "layer_types": ["sliding_attention"]},
            "'layer_types' is ['sliding_attention']",
        ),
        ({"layer_types": ["linear_attention"] * 2}, "'layer_types' is ['linear_attention'"),
    ],
)
def test_layers_of_several_kinds_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="no model here does") as caught:
        read(**values)
    assert message in str(caught.value)


def test_biases_in_attention_alone_are_refused() -> None:
    with pytest.raises(CheckpointError, match="biases in attention alone"):
        read(QWEN3, attention_bias=True)
