"""A block's residual stream, and what it does with the ids of the carry."""

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.model.geometry import AttentionGeometry
from megatron.model.transformer import Block
from megatron.mpu.context import ParallelContext
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


@pytest.mark.parametrize("recompute", [False, True])
def test_an_fp32_stream_stays_fp32_in_a_bfloat16_block(recompute: bool) -> None:
    wide = PrecisionConfig(bf16=True, fp32_residual_connection=True)
    made = block(precision=wide, recompute=recompute)
    hidden = torch.randn(4, 2, 16, requires_grad=True)
    (out,) = made((hidden,))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert hidden.grad is not None
    assert {p.grad.dtype for p in made.parameters() if p.grad is not None} == {torch.bfloat16}


def test_recomputation_keeps_less_for_backward() -> None:
    kept = []
    for recompute in (False, True):
        made, sizes = block(recompute=recompute), []
        hidden = torch.randn(4, 2, 16, dtype=torch.float64, requires_grad=True)

        def note(t: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(t.numel())
            return t

        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            made((hidden,))
        kept.append(sum(sizes))
    assert kept[1] < kept[0] / 10
