"""What a list of layers is made of."""

import torch

from megatron.config.precision import PrecisionConfig
from megatron.model.gpt_model import gpt_layers
from megatron.model.stage import blocks_of
from tests.support.models import tiny_build, tiny_config


def test_a_gpt_is_its_layers_and_three_more_under_global_names() -> None:
    specs = gpt_layers(tiny_config(num_layers=3), tiny_build())
    assert [spec.name for spec in specs] == [
        "embedding",
        "layers.0",
        "layers.1",
        "layers.2",
        "final_norm",
        "embedding.word",
    ]
    assert blocks_of(specs) == (1, 4)
    assert blocks_of(specs[4:]) == (0, 2), "a list that marks none has nothing but such layers"


def test_the_dtype_is_the_one_that_the_precision_names() -> None:
    assert tiny_build().dtype is torch.float64
    assert tiny_build(precision=PrecisionConfig(bf16=True)).dtype is torch.bfloat16
    assert tiny_build(precision=PrecisionConfig()).dtype is torch.float32
