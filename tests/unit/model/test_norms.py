"""Norms against their formulas, and what happens to half precision."""

import pytest
import torch

from megatron.config.blocks import QkNormScope
from megatron.config.model import Normalization
from megatron.config.precision import PrecisionConfig
from megatron.model.norms import LayerNorm, NormOfAllHeads, RMSNorm, build_head_norm, build_norm
from megatron.mpu.partition import Partition, is_sequence_parallel, partition_of
from tests.support.models import second_of_two, tiny_build, tiny_config

BF16 = PrecisionConfig(bf16=True)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_statistics_of_bfloat16_are_computed_in_float32(kind: type[LayerNorm | RMSNorm]) -> None:
    width = 4096
    norm = kind(width, epsilon=1e-5, sequence_parallel=False, dtype=torch.bfloat16)
    torch.nn.init.ones_(norm.weight)
    if isinstance(norm, LayerNorm):
        torch.nn.init.zeros_(norm.bias)
    hidden = torch.randn(3, width, generator=torch.Generator().manual_seed(0)) + 3
    hidden = hidden.bfloat16()
    wide = hidden.double()
    centre = wide.mean(-1, keepdim=True) if kind is LayerNorm else 0.0
    expected = (wide - centre) / ((wide - centre).square().mean(-1, keepdim=True) + 1e-5).sqrt()
    # Summed in bfloat16, 4096 numbers near 3 would be wrong in the first digit; what is left is
    # the rounding of the result, half of 2^-7.
    torch.testing.assert_close(norm(hidden).double(), expected, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("kind", Normalization)
def test_an_fp32_stream_stays_fp32_and_the_final_norm_returns_the_model_dtype(
    kind: Normalization,
) -> None:
    norm = build_norm(tiny_config(normalization=kind), tiny_build(precision=BF16))
    torch.nn.init.ones_(norm.weight)
    hidden = torch.randn(2, 3, 16)
    assert norm(hidden).dtype == torch.float32
    (final,) = norm.final((hidden, torch.zeros(1)))
    assert final.dtype == torch.bfloat16


def test_rms_norm_has_no_bias_and_keeps_the_mean() -> None:
    norm = build_norm(tiny_config(normalization=Normalization.RMS_NORM), tiny_build())
    assert [name for name, _ in norm.named_parameters()] == ["weight"]
    torch.nn.init.ones_(norm.weight)
    constant = torch.full((1, 1, 16), 5.0, dtype=torch.float64)
    torch.testing.assert_close(norm(constant), torch.ones_like(constant), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", Normalization)
@pytest.mark.parametrize("split", [False, True])
def test_gains_say_when_they_see_a_part_of_the_sequence(kind: Normalization, split: bool) -> None:
    norm = build_norm(tiny_config(normalization=kind), tiny_build(sequence_parallel=split))
    assert [is_sequence_parallel(gain) for gain in norm.parameters()] == [split] * len(
        list(norm.parameters())
    )


@pytest.mark.parametrize("kind", Normalization)
def test_a_norm_of_all_heads_is_that_of_their_channels_side_by_side(kind: Normalization) -> None:
    config = tiny_config(
        normalization=kind, qk_layernorm=True, qk_layernorm_scope=QkNormScope.ALL_HEADS
    )
    norm = build_head_norm(config, tiny_build(), heads=4)
    assert isinstance(norm, NormOfAllHeads)
    generator = torch.Generator().manual_seed(0)
    for gain in norm.parameters():
        torch.nn.init.normal_(gain, generator=generator)
    heads = torch.randn(3, 2, 2, 2, 4, generator=generator, dtype=torch.float64)
    rows = heads.reshape(3, 2, 16)
    centred = rows - rows.mean(-1, keepdim=True) * (kind is Normalization.LAYER_NORM)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    expected = expected if norm.bias is None else expected + norm.bias
    torch.testing.assert_close(norm(heads), expected.view_as(heads))


def test_a_norm_of_all_heads_is_split_as_the_heads_are() -> None:
    config = tiny_config(qk_layernorm=True, qk_layernorm_scope=QkNormScope.ALL_HEADS)
    norm = build_head_norm(config, tiny_build(second_of_two()), heads=4)
    assert [(p.shape, partition_of(p)) for p in norm.parameters()] == [
        (torch.Size([8]), Partition("tp", dim=0))
    ] * 2
