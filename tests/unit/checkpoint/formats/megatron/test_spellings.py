"""Each spelling names every parameter once, in the order of the modules that load it."""

import pytest

from megatron.checkpoint.bert_tensors import BertHeads, bert_tensors
from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.formats.megatron.spellings import SPELLINGS
from megatron.checkpoint.gpt_tensors import gpt_tensors
from megatron.config.checkpoint import MegatronNames
from megatron.config.model import ModelConfig

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=8,
    num_attention_heads=2,
    qk_layernorm=True,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=True,
)
BLOCK = {
    MegatronNames.CORE: [
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.layer_norm_bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.q_layernorm.bias",
        "self_attention.k_layernorm.weight",
        "self_attention.k_layernorm.bias",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_bias",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
    ],
    MegatronNames.CORE_LOCAL: [
        "input_layernorm.weight",
        "input_layernorm.bias",
        "self_attention.linear_proj.weight",
        "self_attention.linear_proj.bias",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_qkv.bias",
        "self_attention.q_layernorm.weight",
        "self_attention.q_layernorm.bias",
        "self_attention.k_layernorm.weight",
        "self_attention.k_layernorm.bias",
        "pre_mlp_layernorm.weight",
        "pre_mlp_layernorm.bias",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc1.bias",
        "mlp.linear_fc2.weight",
        "mlp.linear_fc2.bias",
    ],
}
HEADS = [
    "encoder.final_layernorm.weight",
    "encoder.final_layernorm.bias",
    "lm_head.dense.weight",
    "lm_head.dense.bias",
    "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias",
    "output_layer.weight",
    "output_layer.bias",
    "binary_head.weight",
    "binary_head.bias",
    "pooler.dense.weight",
    "pooler.dense.bias",
]


@pytest.mark.parametrize("spelling", BLOCK)
def test_modules_stand_in_the_order_of_core(spelling: MegatronNames) -> None:
    shapes = bert_tensors(MODEL, vocab_rows=4, positions=4, heads=BertHeads())
    chosen = SPELLINGS[spelling]
    found = [chosen.key(name, trunk="encoder") for name in sorted(shapes, key=chosen.order)]
    assert found == [
        *(f"embedding.{table}_embeddings.weight" for table in ("word", "position", "tokentype")),
        *(f"encoder.layers.0.{name}" for name in BLOCK[spelling]),
        *HEADS,
    ]


@pytest.mark.parametrize("spelling", MegatronNames)
def test_what_is_written_is_read_by_its_name(spelling: MegatronNames) -> None:
    shapes = gpt_tensors(MODEL, vocab_rows=4, positions=4)
    chosen = SPELLINGS[spelling]
    for name in shapes:
        assert chosen.has(name)
        assert names.our_name(chosen.key(name)) == name


@pytest.mark.parametrize("spelling", MegatronNames)
def test_other_parameters_have_no_name(spelling: MegatronNames) -> None:
    assert not SPELLINGS[spelling].has("layers.0.mlp.router.weight")
    assert SPELLINGS[spelling].has("embedding.norm.weight") is (spelling == "legacy")
