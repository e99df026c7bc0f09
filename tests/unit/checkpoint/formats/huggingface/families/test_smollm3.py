"""SmolLM3's config: which layers rotate."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.huggingface.families.smollm3 import SMOLLM3
from megatron.checkpoint.formats.huggingface.family import Sizes
from megatron.checkpoint.formats.huggingface.fields import Fields
from megatron.config.fields import from_plain
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError
from tests.unit.checkpoint.formats.huggingface.families.test_llama import SHAPE


def fields_of(**values: Any) -> Fields:
    return Fields(
        Path("config.json"), SHAPE | {"num_hidden_layers": 5, "num_key_value_heads": 2} | values
    )


def read(**values: Any) -> ModelConfig:
    return from_plain(ModelConfig, SMOLLM3.read_config(fields_of(**values)))


def test_what_a_config_does_not_say() -> None:
    config = read()
    assert config.layers_without_rotation == (3,)
    assert (config.rotary_base, config.tied, config.add_bias_linear) == (2e6, True, False)
    with pytest.raises(CheckpointError, match="lacks a field"):
        read(num_key_value_heads=None)


def test_the_release() -> None:
    """As on the hub: HuggingFaceTB/SmolLM3-3B, but for its sizes."""
    fields = fields_of(
        attention_bias=False,
        attention_dropout=0.0,
        hidden_act="silu",
        layer_types=["full_attention"] * 5,
        max_window_layers=28,
        mlp_bias=False,
        no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0, 1],
        rms_norm_eps=1e-06,
        rope_scaling=None,
        rope_theta=5000000.0,
        sliding_window=None,
        use_sliding_window=False,
    )
    config = from_plain(ModelConfig, SMOLLM3.read_config(fields))
    SMOLLM3.read_sizes(fields)
    fields.boolean("tie_word_embeddings", True)
    assert fields.unread() == []
    assert (config.layers_without_rotation, config.rotary_base) == ((3,), 5e6)


@pytest.mark.parametrize(
    ("values", "without"),
    [
        ({"no_rope_layer_interval": 2}, (1, 3)),
        ({"no_rope_layers": [0, 1, 1, 1, 0], "no_rope_layer_interval": 2}, (0, 4)),
        ({"no_rope_layers": [1, 0, 1, 1, 1, 0, 0]}, (1,)),
        ({"no_rope_layers": [1] * 5}, ()),
    ],
)
def test_the_list_goes_before_the_interval_and_is_written(
    values: dict[str, Any], without: tuple[int, ...]
) -> None:
    config = read(**values)
    assert config.layers_without_rotation == without
    written = SMOLLM3.write_config(config, Sizes(50, 128))
    back = from_plain(ModelConfig, SMOLLM3.read_config(Fields(Path("x"), written)))
    assert back.meaning() == config.meaning()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("use_sliding_window", True, "a window in some layers"),
        ("no_rope_layers", [1, 2, 1, 1, 1], "a field of the wrong kind"),
        ("no_rope_layers", 4, "a field of the wrong kind"),
    ],
)
def test_what_no_model_here_computes_is_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read(**{field: value})
    assert f"'{field}' is {value!r}" in str(caught.value)
