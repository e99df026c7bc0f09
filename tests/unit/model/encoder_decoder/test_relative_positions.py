"""Ranges of distances against transformers', and biases against loops."""

import hypothesis.strategies as st
import torch
from hypothesis import given
from torch import Tensor
from transformers.models.t5.modeling_t5 import T5Attention

from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.encoder_decoder.relative_positions import (
    RelativeBias,
    RelativePositions,
    buckets_of_distances,
)
from tests.support.examples import examples
from tests.support.models import second_of_two, tiny_build, tiny_config

DISTANCES = torch.arange(-700, 701)


def rows_of(decoder: EncoderDecoderConfig, *, both_directions: bool) -> Tensor:
    return buckets_of_distances(
        DISTANCES,
        num_buckets=decoder.relative_attention_num_buckets,
        max_distance=decoder.relative_attention_max_distance,
        both_directions=both_directions,
    )


@examples(80)
@given(st.integers(2, 32), st.integers(1, 400), st.booleans())
def test_ranges_of_distances_are_those_of_transformers(
    pairs: int, further: int, both_directions: bool
) -> None:
    buckets, distance = 2 * pairs, pairs + further
    found = buckets_of_distances(
        DISTANCES,
        num_buckets=buckets,
        max_distance=distance,
        both_directions=both_directions,
    )
    expected = T5Attention._relative_position_bucket(
        DISTANCES, bidirectional=both_directions, num_buckets=buckets, max_distance=distance
    )
    assert torch.equal(found, expected)


def test_an_encoder_tells_directions_apart_and_a_decoder_sees_one() -> None:
    decoder = EncoderDecoderConfig()
    both, back = (rows_of(decoder, both_directions=each) for each in (True, False))
    assert both.unique().tolist() == [at for at in range(32) if at != 16]  # 16 is forward by none
    assert not set(both[DISTANCES > 0].tolist()) & set(both[DISTANCES <= 0].tolist())
    assert back.unique().tolist() == list(range(32))
    assert (back[DISTANCES >= 0] == 0).all()
    assert (back[DISTANCES <= -128] == 31).all()


@examples(40)
@given(st.integers(1, 12), st.booleans())
def test_biases_are_those_of_a_loop_over_queries_and_keys(length: int, both: bool) -> None:
    decoder = EncoderDecoderConfig(
        relative_attention_num_buckets=8, relative_attention_max_distance=9
    )
    table = torch.randn(8, 3, dtype=torch.float64)
    of_stack = RelativeBias(decoder, both_directions=both)
    found = of_stack.bias(table, length)
    assert found.shape == (1, 3, length, length)
    rows = rows_of(decoder, both_directions=both)
    for query in range(length):
        for key in range(length):
            expected = table[rows[700 + key - query]]
            assert torch.equal(found[0, :, query, key], expected)
    some = torch.tensor([length - 1, 0])
    assert torch.equal(of_stack.bias_of_keys(table, some, length), found[:, :, some])


def test_another_length_has_other_rows() -> None:
    of_stack = RelativeBias(EncoderDecoderConfig(), both_directions=True)
    table = torch.randn(32, 2)
    long, short = of_stack.bias(table, 9), of_stack.bias(table, 4)
    assert torch.equal(long[..., :4, :4], short)
    assert torch.equal(of_stack.bias(table, 9), long)


def test_a_rank_has_the_columns_of_its_heads_and_the_carry_a_copy_of_them() -> None:
    made = RelativePositions(tiny_config(), tiny_build(second_of_two()), EncoderDecoderConfig())
    assert made.weight.shape == (32, 2)
    torch.nn.init.normal_(made.weight)  # it is created empty, and what lies there may be NaN
    hidden = torch.zeros(3, 1, 16)
    first, table = made((hidden,))
    assert first is hidden
    assert torch.equal(table, made.weight)
    assert table.data_ptr() != made.weight.data_ptr()
