"""Named model shapes are shapes that can be built."""

import dataclasses

import pytest

from megatron.arguments import parse_args
from megatron.config.model import ModelConfig
from megatron.config.presets import PRESETS
from tests.unit.config.groups import COMMAND

REST = COMMAND[6:]  # without the shape
BILLION = 1e9


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_a_run(name: str) -> None:
    command = ["--model-preset", name, *(word for word in REST if word != "--seq-length")]
    command.remove("16")
    config = parse_args(command)
    assert config.model.hidden_size == PRESETS[name]["hidden_size"]
    assert config.data.seq_length == PRESETS[name]["seq_length"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("gpt2-small", 0.085), ("gpt3-1.3b", 1.2), ("gpt3-175b", 174), ("llama-7b", 6.5)],
)
def test_the_blocks_have_as_many_weights_as_the_name_says(name: str, billions: float) -> None:
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    model = ModelConfig(**{key: value for key, value in PRESETS[name].items() if key in fields})
    matrices = 3 if model.glu else 2
    mlp = matrices * model.hidden_size * model.ffn_width
    heads = model.num_attention_heads + model.query_groups
    attention = 2 * model.hidden_size * model.head_width * heads
    total = model.num_layers * (attention + mlp)
    assert total / BILLION == pytest.approx(billions, rel=0.02)


def test_a_table_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        PRESETS["gpt2-small"]["num_layers"] = 1  # type: ignore[index]
