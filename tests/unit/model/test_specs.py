"""What a list of layers is made of."""

import torch

from megatron.config.fp8 import Fp8Config, Fp8Format
from megatron.config.precision import PrecisionConfig
from megatron.model.gpt_model import gpt_layers
from megatron.model.stage import blocks_of, ends_of_blocks
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
    assert ends_of_blocks(specs) == (2, 3, 4)
    assert ends_of_blocks(specs[4:]) == (1, 2)
    assert blocks_of(specs[4:]) == (0, 2), "a list that marks none has nothing but such layers"


def test_the_dtype_is_the_one_that_the_precision_names() -> None:
    assert tiny_build().dtype is torch.float64
    assert tiny_build(precision=PrecisionConfig(bf16=True)).dtype is torch.bfloat16
    assert tiny_build(precision=PrecisionConfig()).dtype is torch.float32


def test_layers_outside_of_fp8_are_built_without_it() -> None:
    fp8 = Fp8Config(fp8_format=Fp8Format.E4M3, first_last_layers_bf16=True)
    build = tiny_build(fp8=fp8)
    assert [build.of_block(layer, 3).fp8 for layer in range(3)] == [None, fp8, None]
    assert build.of_block(0, 3).router_loss is build.router_loss
    assert tiny_build().of_block(1, 3).fp8 is None
