"""Attention's layout and its refusals; its numbers are tested through the whole GPT."""

import dataclasses

import pytest
import torch

from megatron.config.model import PositionEmbedding
from megatron.config.training import AttentionBackend
from megatron.errors import ConfigError
from megatron.model.attention import SelfAttention
from megatron.model.geometry import Geometry
from megatron.model.positions import RotaryAngles
from megatron.mpu.context import Group, ParallelContext
from tests.support.models import roughen, tiny_build, tiny_config
from tests.support.operators import Operators


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


def test_attention_dropout_draws_from_the_stream_of_split_tensors() -> None:
    build = tiny_build()
    attention = SelfAttention(tiny_config(attention_dropout=0.5), build, layer=0)
    roughen(attention, ParallelContext.single())
    before, default = build.streams.snapshot(), torch.get_rng_state()
    attention(torch.randn(6, 2, 16, dtype=torch.float64), Geometry())
    after = build.streams.snapshot()
    assert torch.equal(before["replicated"], after["replicated"])
    assert not torch.equal(before["tensor"], after["tensor"])
    del default


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
        operators.append("megatron::rotate" in called.names)
    assert operators == [True, False]
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
