"""The tensors listed for a T5 before it is built are those of the built model."""

from typing import Any

import pytest

from megatron.checkpoint.t5_tensors import t5_tensors
from megatron.config.blocks import NormPlacement
from megatron.config.model import PositionEmbedding
from megatron.model.specs import VocabSize
from megatron.model.t5_model import T5Model
from tests.support.models import tiny_build, tiny_config
from tests.support.t5.models import T5_1_0, T5_1_1, TINY_DECODER

CONFIGS: dict[str, dict[str, Any]] = {
    "1.0": T5_1_0,
    "1.1": T5_1_1,
    "megatron": {"max_position_embeddings": 20, "untie_embeddings_and_output_weights": True},
    "groups, norms on both sides": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "num_query_groups": 2,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "norm_placement": NormPlacement.BOTH,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_and_shapes_are_those_of_the_model(name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    model = T5Model(config, tiny_build(vocab=VocabSize(50, 50)), TINY_DECODER)
    expected = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    positions = config.max_position_embeddings or 12
    found = t5_tensors(config, TINY_DECODER, vocab_rows=50, positions=positions)
    assert dict(found) == expected
