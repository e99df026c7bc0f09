"""Attention to another sequence against a slow one in loops, and the block that has it."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from megatron.config.blocks import NormPlacement
from megatron.config.models.encoder_decoder import EncoderDecoderConfig
from megatron.model.encoder_decoder.cross_attention import CrossAttention, DecoderBlock
from megatron.model.encoder_decoder.geometry import StackGeometry, encoder_mask
from megatron.mpu.context import ParallelContext
from tests.support.examples import examples
from tests.support.models import roughen, tiny_build, tiny_config

# float64 on both sides: only the order of additions differs.
SAME = {"rtol": 1e-10, "atol": 1e-10}


def cross_attention(**changes: Any) -> CrossAttention:
    made = CrossAttention(tiny_config(**changes), tiny_build(), layer=0).eval()
    roughen(made, ParallelContext.single())
    return made


def by_loops(made: CrossAttention, hidden: Tensor, memory: Tensor, lengths: list[int]) -> Tensor:
    """The same, one query and head after the other; the groups of the keys are neighbours."""
    queries = made.query(hidden).unflatten(-1, (4, 4))
    both = made.key_value(memory)
    groups = both.shape[-1] // 8
    grouped = both.unflatten(-1, (groups, 2, 4))
    context = torch.zeros_like(queries)
    for row, length in enumerate(lengths):
        for head in range(4):
            keys, values = grouped[:length, row, head * groups // 4].unbind(1)
            for at in range(len(hidden)):
                scores = keys @ queries[at, row, head] / math.sqrt(4)
                context[at, row, head] = scores.softmax(0) @ values
    return torch.as_tensor(made.output(context.flatten(2)))


@examples(40)
@given(
    st.integers(1, 5),
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.sampled_from([1, 2, 4]),
)
def test_queries_see_the_tokens_of_their_row_and_no_padding(
    length: int, lengths: list[int], groups: int
) -> None:
    made = cross_attention(num_query_groups=groups)
    rows, most = len(lengths), max(lengths)
    hidden = torch.randn(length, rows, 16, dtype=torch.float64)
    memory = torch.randn(most, rows, 16, dtype=torch.float64)
    mask = (torch.arange(most) < torch.tensor(lengths)[:, None]).to(torch.int64)
    found = made(hidden, memory, encoder_mask(mask))
    torch.testing.assert_close(found, by_loops(made, hidden, memory, lengths), **SAME)


def test_the_scale_of_scores_and_norms_of_heads_are_those_of_the_config() -> None:
    hidden, memory = (torch.randn(n, 1, 16, dtype=torch.float64) for n in (3, 5))
    seen = encoder_mask(torch.ones(1, 5))
    plain, scaled = cross_attention(), cross_attention(softmax_scale=0.5)  # 1 / sqrt(4)
    torch.testing.assert_close(plain(hidden, memory, seen), scaled(hidden, memory, seen), **SAME)
    other = cross_attention(softmax_scale=1.0)
    assert not torch.allclose(plain(hidden, memory, seen), other(hidden, memory, seen))
    normed = cross_attention(qk_layernorm=True)
    assert {"query_norm.weight", "key_norm.weight"} <= {n for n, _ in normed.named_parameters()}
    larger = normed(3 * hidden, memory, seen)
    assert not torch.equal(larger, cross_attention()(3 * hidden, memory, seen))


@pytest.mark.parametrize("place", NormPlacement)
def test_a_block_adds_what_the_encoder_gives_after_its_own_attention(place: NormPlacement) -> None:
    config, build = tiny_config(norm_placement=place), tiny_build()
    geometry = StackGeometry(config, build, EncoderDecoderConfig(), causal=True)
    made = DecoderBlock(config, build, geometry, layer=0).eval()
    roughen(made, build.ctx)
    hidden, memory = (torch.randn(n, 2, 16, dtype=torch.float64) for n in (3, 5))
    mask = torch.ones(2, 5, dtype=torch.int64)
    found, *others = made((hidden, memory, mask))
    assert others == [memory, mask]

    def branch(before: Any, after: Any, function: Any, stream: Tensor) -> Tensor:
        given = stream if before is None else before(stream)
        result = function(given)
        return stream + (result if after is None else after(result))

    own, seen = geometry.of_carry(hidden, (memory, mask)), encoder_mask(mask)
    stream = branch(
        made.input_norm, made.attention_output_norm, lambda x: made.attention(x, own), hidden
    )
    stream = branch(
        made.cross_norm,
        made.cross_output_norm,
        lambda x: made.cross_attention(x, memory, seen),
        stream,
    )
    stream = branch(made.post_attention_norm, made.mlp_output_norm, made.mlp, stream)
    torch.testing.assert_close(found, stream, **SAME)
