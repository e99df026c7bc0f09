"""Attention's layout and its refusals; its numbers are tested through the whole GPT."""

import dataclasses

import pytest
import torch
from torch import Tensor

from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError
from megatron.model.attention import SelfAttention
from megatron.model.geometry import Geometry
from megatron.model.positions import RotaryAngles
from megatron.model.specs import ModelBuild
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.partition import row_runs
from megatron.mpu.random import Samples
from tests.support.models import roughen, second_of_two, tiny_build, tiny_config
from tests.support.operators import Operators


def test_rows_are_of_queries_keys_and_values() -> None:
    config = tiny_config(num_attention_heads=4, num_query_groups=2, kv_channels=3)
    attention = SelfAttention(config, tiny_build(), layer=0)
    assert row_runs(attention.qkv.weight) == (6, 3, 3)
    assert sum(row_runs(attention.qkv.weight) or ()) * 2 == len(attention.qkv.weight)


def test_groups_that_do_not_divide_over_the_ranks_are_refused() -> None:
    ctx = dataclasses.replace(ParallelContext.single(), tp=Group((0, 1), 0))
    build = dataclasses.replace(tiny_build(), ctx=ctx)
    with pytest.raises(ConfigError, match="query groups do not divide over the tensor-parallel"):
        SelfAttention(tiny_config(num_query_groups=1), build, layer=0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_a_mask_that_says_causal_equals_no_mask(groups: int) -> None:
    attention = SelfAttention(tiny_config(num_query_groups=groups), tiny_build(), layer=0)
    roughen(attention, ParallelContext.single())
    hidden = torch.randn(6, 2, 16, dtype=torch.float64)
    causal = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    # Two kernels of torch, in float64.
    torch.testing.assert_close(
        attention(hidden, Geometry(mask=causal)),
        attention(hidden, Geometry()),
        rtol=1e-12,
        atol=1e-12,
    )


# What each becomes on a CPU.
KERNELS = {
    AttentionBackend.AUTO: "aten::_scaled_dot_product_flash_attention_for_cpu",
    AttentionBackend.FLASH: "aten::_scaled_dot_product_flash_attention_for_cpu",
    AttentionBackend.UNFUSED: "aten::_safe_softmax",
    AttentionBackend.LOCAL: "aten::_safe_softmax",
}


@pytest.mark.parametrize("masked", [False, True])
def test_a_kernel_that_is_asked_for_computes_the_same(masked: bool) -> None:
    hidden, results = torch.randn(6, 2, 16, dtype=torch.float64), []
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6) if masked else None
    for backend, kernel in KERNELS.items():
        attention = SelfAttention(
            tiny_config(num_query_groups=2), tiny_build(attention_backend=backend), layer=0
        )
        roughen(attention, ParallelContext.single())
        with Operators() as called:
            out = attention(hidden, Geometry(mask=mask))
        assert called.names & set(KERNELS.values()) == {kernel}, backend
        results.append([out, *torch.autograd.grad(out.sin().sum(), list(attention.parameters()))])
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=1e-11, atol=1e-11)


def test_a_kernel_that_is_not_there_is_an_error_with_its_flag() -> None:
    build = tiny_build(attention_backend=AttentionBackend.FUSED)
    attention = SelfAttention(tiny_config(), build, layer=0)
    roughen(attention, ParallelContext.single())
    with pytest.raises(ConfigError, match="cannot compute this attention") as raised:
        attention(torch.randn(6, 2, 16, dtype=torch.float64), Geometry())
    assert "--attention-backend fused, torch.float64 on cpu, 4 channels" in str(raised.value)


@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_dropped_by_sample_and_head_where_they_are_in_memory(masked: bool) -> None:
    def dropped(build: ModelBuild, heads: slice, rows: slice) -> Tensor:
        attention = SelfAttention(tiny_config(attention_dropout=0.5), build, layer=1)
        q, k, v = qkv[:, rows, heads]
        with build.streams.of(Samples(rows.start, rows.stop - rows.start)):
            return attention._attend(q, k, v, mask, not masked)

    qkv = torch.randn(3, 4, 4, 6, 5, dtype=torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).triu() if masked else None
    before = torch.get_rng_state()
    whole = dropped(tiny_build(), slice(0, 4), slice(0, 4))
    part = dropped(tiny_build(second_of_two()), slice(2, 4), slice(2, 4))
    torch.testing.assert_close(part, whole[2:, 2:], rtol=1e-14, atol=1e-14)
    unfused = tiny_build(attention_backend=AttentionBackend.UNFUSED)
    assert torch.equal(dropped(unfused, slice(0, 4), slice(0, 4)), whole)
    plain = SelfAttention(tiny_config(), tiny_build(), layer=1)._attend(*qkv, mask, not masked)
    assert not torch.equal(whole, plain)
    assert torch.equal(torch.get_rng_state(), before)


def test_layers_share_the_numbers_of_queries_and_drop_other_scores() -> None:
    build, config = tiny_build(), tiny_config(attention_dropout=0.5)
    first, second = (SelfAttention(config, build, layer=layer) for layer in range(2))
    q = torch.randn(2, 4, 6, 4, dtype=torch.float64)
    assert first._numbers_of(q) is second._numbers_of(q)
    assert first._numbers_of(q) is not first._numbers_of(q[:1])
    assert not torch.equal(first._attend(q, q, q, None, True), second._attend(q, q, q, None, True))


@pytest.mark.parametrize("masked", [False, True])
def test_a_sink_takes_its_share_before_scores_are_dropped(masked: bool) -> None:
    def attention(dropout: float) -> SelfAttention:
        config = tiny_config(softmax_type=SoftmaxType.LEARNABLE, attention_dropout=dropout)
        layer = SelfAttention(config, tiny_build(), layer=0)
        roughen(layer, ParallelContext.single())
        return layer

    q, k, v = torch.randn(3, 2, 4, 6, 4, dtype=torch.float64)
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked else None
    none, tiny = (attention(dropout)._attend(q, k, v, mask, True) for dropout in (0.0, 1e-12))
    torch.testing.assert_close(tiny, none, rtol=1e-10, atol=1e-10)
    half = attention(0.5)
    assert half.sinks is not None
    (gradient,) = torch.autograd.grad(half._attend(q, k, v, mask, True).sum(), [half.sinks])
    assert gradient.abs().min() > 0


def test_dropout_of_scores_keeps_their_mean() -> None:
    attention = SelfAttention(tiny_config(attention_dropout=0.25), tiny_build(), layer=0)
    q, v = torch.zeros(50, 4, 40, 4), torch.ones(50, 4, 40, 4)
    out = attention._attend(q, q, v, None, False)
    # Sums of 40 probabilities of 1/40 each; 8,000 of them of deviation 0.09 have 0.001.
    assert out[..., 0].mean().item() == pytest.approx(1, abs=0.005)
    assert out[..., 0].std().item() == pytest.approx((0.25 / 0.75 / 40) ** 0.5, rel=0.05)


def test_kernels_that_hold_no_scores_draw_from_a_seed_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = []

    def attend(*_: object, **__: object) -> Tensor:
        seeds.append(torch.initial_seed())
        return torch.zeros(())

    monkeypatch.setattr("megatron.model.attention.attend_by_torch", attend)
    q = torch.zeros(2, 2, 6, 4)
    before = torch.get_rng_state()
    for ctx, layer, first in ((None, 0, 0), (None, 0, 0), (None, 1, 0), (None, 0, 2)):
        build = tiny_build(ctx, attention_backend=AttentionBackend.FLASH)
        attention = SelfAttention(tiny_config(attention_dropout=0.5), build, layer=layer)
        with build.streams.of(Samples(first, 2)):
            attention._attend(q, q, q, None, True)
    build = tiny_build(second_of_two(), attention_backend=AttentionBackend.FLASH)
    attention = SelfAttention(tiny_config(attention_dropout=0.5), build, layer=0)
    with build.streams.of(Samples(0, 2)):
        attention._attend(q, q, q, None, True)
    assert seeds[0] == seeds[1]
    assert len(set(seeds)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_rotation_by_the_operations_of_pytorch_is_the_same() -> None:
    config = tiny_config(position_embedding_type=PositionEmbedding.ROPE, rotary_percent=0.5)
    rotation = RotaryAngles(config).at(torch.arange(6), torch.float64)
    hidden, results, operators = torch.randn(6, 2, 16, dtype=torch.float64), [], []
    for fused in (True, False):
        attention = SelfAttention(config, tiny_build(fuse_rope=fused), layer=0)
        roughen(attention, ParallelContext.single())
        with Operators() as called:
            out = attention(hidden, Geometry(rotation=rotation))
        weights = list(attention.parameters())
        results.append([out, *torch.autograd.grad(out.sin().sum(), weights)])
        operators.append("megatron::split_rotated" in called.names)
    assert operators == [True, False]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
