"""A block's residual stream, and what it does with the ids of the carry."""

import pytest
import torch

from megatron.config.activations import ActivationPolicy, RecomputeModule
from megatron.config.precision import PrecisionConfig
from megatron.model.geometry import AttentionGeometry
from megatron.model.transformer import Block
from megatron.mpu.context import ParallelContext
from tests.support.live_bytes import LiveBytes
from tests.support.models import roughen, tiny_build, tiny_config


def block(**changes: object) -> Block:
    build = tiny_build(**changes)
    config = tiny_config()
    made = Block(config, build, AttentionGeometry(config, build), layer=0)
    roughen(made, ParallelContext.single())
    return made


def test_a_block_whose_outputs_are_zero_is_the_identity() -> None:
    made, hidden = block(), torch.randn(4, 2, 16, dtype=torch.float64)
    for linear in (made.attention.output, made.mlp.fc2):
        torch.nn.init.zeros_(linear.weight)
        torch.nn.init.zeros_(linear.bias)
    assert torch.equal(made((hidden,))[0], hidden)


def test_ids_travel_on_unchanged() -> None:
    hidden = torch.randn(4, 2, 16, dtype=torch.float64)
    positions, documents = torch.arange(4).expand(2, 4), torch.zeros(2, 4, dtype=torch.int64)
    _, *ids = block()((hidden, positions, documents))
    assert ids[0] is positions
    assert ids[1] is documents


MODULES = [
    frozenset[RecomputeModule](),
    *(frozenset({module}) for module in RecomputeModule),
    frozenset(RecomputeModule),
]


@pytest.mark.parametrize("modules", MODULES)
def test_an_fp32_stream_stays_fp32_in_a_bfloat16_block(modules: frozenset[RecomputeModule]) -> None:
    wide = PrecisionConfig(bf16=True, fp32_residual_connection=True)
    made = block(precision=wide, activations=ActivationPolicy(modules=modules))
    hidden = torch.randn(4, 2, 16, requires_grad=True)
    (out,) = made((hidden,))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert hidden.grad is not None
    assert {p.grad.dtype for p in made.parameters() if p.grad is not None} == {torch.bfloat16}


def kept(modules: frozenset[RecomputeModule]) -> int:
    """Bytes that the forward pass of a block leaves for its backward pass."""
    made = block(activations=ActivationPolicy(modules=modules))
    hidden = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)
    with LiveBytes([*made.parameters(), hidden]) as live:
        output = made((hidden,))
        assert output[0].requires_grad
        return live.count


def test_every_recomputed_part_keeps_less_for_backward() -> None:
    everything = kept(frozenset())
    for module in RecomputeModule:
        assert kept(frozenset({module})) < everything, module
    wide = 4 * 2 * 16 * 8  # bytes of one [s, b, h] in float64
    # The inputs of both branches are not there, nor the middle of the MLP before and after gelu.
    assert kept(frozenset({RecomputeModule.LAYERNORM})) == everything - 2 * wide
    assert kept(frozenset({RecomputeModule.MLP})) <= everything - 8 * wide
    assert kept(frozenset(RecomputeModule)) < everything - 10 * wide


@pytest.mark.parametrize("after_norm", [False, True])
@pytest.mark.parametrize("modules", MODULES)
def test_recomputed_parts_change_no_bit(
    modules: frozenset[RecomputeModule], after_norm: bool
) -> None:
    results = []
    for chosen in (frozenset[RecomputeModule](), modules):
        build = tiny_build(activations=ActivationPolicy(modules=chosen))
        config = tiny_config(
            hidden_dropout=0.3,
            attention_dropout=0.2,
            apply_residual_connection_post_layernorm=after_norm,
        )
        made = Block(config, build, AttentionGeometry(config, build), layer=0)
        roughen(made, ParallelContext.single())
        torch.manual_seed(0)
        hidden = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)
        (output,) = made((hidden,))
        output.square().sum().backward()
        gradients = [hidden.grad, *(p.grad for p in made.parameters())]
        results.append([output, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
