"""The embedding's parts, its order and its dtype."""

import pytest
import torch

from megatron.config.model import PositionEmbedding
from megatron.config.precision import PrecisionConfig
from megatron.errors import DataError
from megatron.model.embedding import Embedding, WordEmbedding
from megatron.mpu.context import ParallelContext
from tests.support.models import TINY_VOCAB, roughen, tiny_build, tiny_config, tiny_tokens


def test_the_output_is_sequence_first_and_the_ids_travel_on() -> None:
    embedding = Embedding(tiny_config(), tiny_build())
    roughen(embedding, ParallelContext.single())
    tokens, positions = tiny_tokens(), torch.arange(9).expand(2, 9)
    hidden, travelled = embedding((tokens, positions))
    assert travelled is positions
    assert hidden.shape == (9, 2, 16)
    assert hidden.is_contiguous()
    expected = embedding.word.weight[tokens[1, 4]] + embedding.position.weight[4]
    assert torch.equal(hidden[4, 1], expected)


def test_the_position_table_has_the_rows_asked_for_or_the_sequence_length() -> None:
    for asked, rows in ((None, 12), (20, 20)):
        embedding = Embedding(tiny_config(max_position_embeddings=asked), tiny_build())
        assert embedding.position is not None
        assert embedding.position.weight.shape == (rows, 16)
    rope = tiny_config(position_embedding_type=PositionEmbedding.ROPE)
    assert Embedding(rope, tiny_build()).position is None


def test_an_fp32_stream_begins_here() -> None:
    wide = PrecisionConfig(bf16=True, fp32_residual_connection=True)
    embedding = Embedding(tiny_config(), tiny_build(precision=wide))
    roughen(embedding, ParallelContext.single())
    assert embedding((tiny_tokens(),))[0].dtype == torch.float32


def test_a_token_of_the_padding_is_refused() -> None:
    word = WordEmbedding(tiny_config(), tiny_build())
    with pytest.raises(DataError, match="a token id is outside the vocabulary"):
        word(torch.tensor([TINY_VOCAB.true]))
