"""Masks of encoder and decoder against masks that loops build."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from megatron.config.model import PositionEmbedding
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.errors import ConfigError
from megatron.model.encoder_decoder.geometry import StackGeometry, encoder_mask
from megatron.model.encoder_decoder.relative_positions import buckets_of_distances
from megatron.model.geometry import AttentionGeometry
from tests.support.examples import examples
from tests.support.models import tiny_build, tiny_config

RELATIVE = {"position_embedding_type": PositionEmbedding.RELATIVE}
DECODER = EncoderDecoderConfig(relative_attention_num_buckets=8, relative_attention_max_distance=9)
lengths_of_rows = st.lists(st.integers(1, 7), min_size=1, max_size=3)


def padded(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).to(torch.int64)


@examples(40)
@given(lengths_of_rows, st.booleans(), st.sampled_from([None, 3]))
def test_scores_of_an_encoder_have_the_biases_of_keys_that_are_no_padding(
    lengths: list[int], relative: bool, window: int | None
) -> None:
    config = tiny_config(sliding_window=window, **(RELATIVE if relative else {}))
    mask, length = padded(lengths), max(lengths)
    table = torch.randn(8, 4, dtype=torch.float64)
    geometry = StackGeometry(config, tiny_build(), DECODER, causal=False)
    hidden = torch.zeros(length, len(lengths), 16, dtype=torch.float64)
    made = geometry.of_carry(hidden, (mask, mask, table)).mask
    assert made is not None
    for row, own in enumerate(lengths):
        for query in range(own):
            for key in range(length):
                near = window is None or abs(query - key) < window
                found = made[min(row, len(made) - 1), :, query, key]
                if not near or key >= own:
                    assert (found == (-torch.inf if relative else False)).all()
                elif relative:
                    (at,) = buckets_of_distances(
                        torch.tensor([key - query]),
                        num_buckets=8,
                        max_distance=9,
                        both_directions=True,
                    )
                    assert torch.equal(found, table[at])
                else:
                    assert found.all()


@examples(40)
@given(st.integers(1, 8), st.sampled_from([None, 3]))
def test_scores_of_a_decoder_have_the_biases_of_keys_up_to_their_own(
    length: int, window: int | None
) -> None:
    table = torch.randn(8, 4, dtype=torch.float64)
    config = tiny_config(sliding_window=window, **RELATIVE)
    geometry = StackGeometry(config, tiny_build(), DECODER, causal=True)
    hidden = torch.zeros(length, 2, 16, dtype=torch.float64)
    made = geometry.of_carry(hidden, (hidden, torch.ones(2, 5), table)).mask
    assert made is not None
    for query in range(length):
        for key in range(length):
            if key > query or (window is not None and query - key >= window):
                assert (made[0, :, query, key] == -torch.inf).all()
            else:
                (at,) = buckets_of_distances(
                    torch.tensor([key - query]),
                    num_buckets=8,
                    max_distance=9,
                    both_directions=False,
                )
                assert torch.equal(made[0, :, query, key], table[at])


def test_a_decoder_without_biases_needs_no_mask() -> None:
    geometry = StackGeometry(tiny_config(), tiny_build(), DECODER, causal=True)
    hidden = torch.zeros(5, 2, 16, dtype=torch.float64)
    made = geometry.of_carry(hidden, (hidden, torch.ones(2, 5)))
    assert made.mask is None
    assert made.causal


def test_every_token_of_a_decoder_sees_the_tokens_of_an_encoder() -> None:
    made = encoder_mask(padded([2, 4]))
    assert made.mask is not None
    assert made.mask.tolist() == [[[[True, True, False, False]]], [[[True] * 4]]]
    assert made.wide_mask is made.mask
    assert not made.causal


def test_the_gradient_of_a_bias_reaches_the_table() -> None:
    table = torch.randn(8, 4, dtype=torch.float64, requires_grad=True)
    geometry = StackGeometry(tiny_config(**RELATIVE), tiny_build(), DECODER, causal=False)
    hidden, mask = torch.zeros(6, 1, 16, dtype=torch.float64), torch.ones(1, 6, dtype=torch.int64)
    made = geometry.of_carry(hidden, (mask, mask, table)).mask
    assert made is not None
    made.sum().backward()
    assert table.grad is not None
    # Pairs of one token at distance 0, and of five at distance -1.
    assert table.grad[0].tolist() == [6.0] * 4
    assert table.grad[1].tolist() == [5.0] * 4


def test_a_model_of_one_stack_has_no_relative_positions() -> None:
    with pytest.raises(ConfigError, match="relative positions are those of an encoder and its"):
        AttentionGeometry(tiny_config(**RELATIVE), tiny_build())
