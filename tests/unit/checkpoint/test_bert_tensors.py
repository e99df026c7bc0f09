"""The tensors listed for a BERT before it is built are those of the built model."""

from typing import Any

import pytest

from megatron.checkpoint.bert_tensors import TOKEN_TYPES, BertHeads, bert_tensors
from megatron.config.model import Normalization, PositionEmbedding
from megatron.model.bert_model import NUM_TOKENTYPES, BertModel, classification_layers
from megatron.model.specs import VocabSize
from megatron.model.stage import PipelineStage
from tests.support.models import tiny_build, tiny_config

ROWS = VocabSize(50, 50)
CONFIGS: dict[str, dict[str, Any]] = {
    "original": {"apply_residual_connection_post_layernorm": True, "max_position_embeddings": 20},
    "untied": {"untie_embeddings_and_output_weights": True},
    "rotary": {
        "position_embedding_type": PositionEmbedding.ROPE,
        "normalization": Normalization.RMS_NORM,
        "embed_layernorm": True,
    },
}


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_order_are_those_of_the_model(name: str, order: bool) -> None:
    config = tiny_config(**CONFIGS[name])
    model = BertModel(config, tiny_build(vocab=ROWS), order_head=order)
    expected = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    heads = BertHeads.of(expected)
    assert heads == BertHeads(pooler=order, order=order)
    positions = config.max_position_embeddings or 12
    found = bert_tensors(config, vocab_rows=50, positions=positions, heads=heads)
    assert list(found.items()) == list(expected.items())


def test_a_classifier_has_the_encoder_a_pooler_and_its_classes() -> None:
    config = tiny_config()
    model = PipelineStage(classification_layers(config, tiny_build(vocab=ROWS), num_classes=3))
    expected = {key: tuple(tensor.shape) for key, tensor in model.named_parameters()}
    heads = BertHeads.of(expected)
    assert heads == BertHeads(order=False, words=False, classes=3)
    found = bert_tensors(config, vocab_rows=50, positions=12, heads=heads)
    assert list(found.items()) == list(expected.items())


def test_a_head_that_takes_pooled_rows_needs_the_pooler() -> None:
    heads = BertHeads(pooler=False, order=True, words=False)
    found = bert_tensors(tiny_config(), vocab_rows=50, positions=12, heads=heads)
    assert "pooler.dense.weight" in found
    bare = bert_tensors(
        tiny_config(), vocab_rows=50, positions=12, heads=BertHeads(False, False, False)
    )
    assert list(bare)[-1] == "final_norm.bias"
    assert TOKEN_TYPES == NUM_TOKENTYPES
