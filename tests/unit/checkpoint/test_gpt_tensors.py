"""The tensors listed for a GPT before it is built are those of the built model."""

from typing import Any

import pytest

from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.config.experts import MlpType, RouterScoreFunction
from megatron.config.model import GluActivation, Normalization, PositionEmbedding
from megatron.model.gpt_model import GPTModel
from megatron.model.specs import VocabSize
from tests.support.models import tiny_build, tiny_config

CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"max_position_embeddings": 20},
    "gpt_neox": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "use_parallel_residual": True,
        "untie_embeddings_and_output_weights": True,
    },
    "qwen": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "normalization": Normalization.RMS_NORM,
        "swiglu": True,
        "num_query_groups": 2,
        "kv_channels": 6,
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "qk_layernorm": True,
    },
    "bloom": {"position_embedding_type": PositionEmbedding.ALIBI, "embed_layernorm": True},
    "mixtral": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "swiglu": True,
        "num_experts": 3,
        "moe_ffn_hidden_size": 10,
        "add_bias_linear": False,
    },
    "plain experts": {"num_experts": 2, "add_bias_linear": False},
    "shared expert": {
        "num_experts": 2,
        "moe_shared_expert_intermediate_size": 10,
        "swiglu": True,
        "add_bias_linear": False,
    },
    "shared expert with a gate": {
        "num_experts": 2,
        "moe_shared_expert_intermediate_size": 10,
        "moe_shared_expert_gate": True,
        "moe_router_score_function": RouterScoreFunction.SIGMOID,
        "moe_router_enable_expert_bias": True,
        "add_bias_linear": False,
    },
    "experts with biases": {
        "num_experts": 2,
        "moe_shared_expert_intermediate_size": 10,
        "swiglu": True,
    },
    "residual": {"num_experts": 2, "mlp_type": MlpType.RESIDUAL, "moe_ffn_hidden_size": 10},
    "a dense layer": {
        "num_experts": 2,
        "moe_layer_freq": "[0]+[1]",
        "moe_ffn_hidden_size": 10,
        "add_bias_linear": False,
    },
    "norms with biases": {"qk_layernorm": True, "glu_activation": GluActivation.GEGLU},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_order_are_those_of_the_model(name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    model = GPTModel(config, tiny_build(vocab=VocabSize(50, 50)))
    expected = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    found = gpt_tensors(config, vocab_rows=50, positions=config.max_position_embeddings or 12)
    assert list(found.items()) == list(expected.items())
