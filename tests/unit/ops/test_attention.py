"""Which blocks the gradient of attention is computed in; the law of kernels is in tests/laws."""

import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.model.attention import _KERNELS
from megatron.ops.attention import _blocks, _by_position, _with_columns, attend_by_torch


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_hold_every_row_of_every_group_once_and_the_keys_that_it_sees(causal: bool) -> None:
    for groups, length, queries in itertools.product((1, 5), (1, 511, 512, 1300), (1, 3, 600)):
        blocks = _blocks(groups, length, queries, causal, itemsize=2)
        held = [
            (group, position)
            for block in blocks
            for group in range(groups)[block.groups]
            for position in range(block.first, block.stop)
        ]
        assert sorted(held) == [*itertools.product(range(groups), range(length))]
        assert all(block.seen == (block.stop if causal else length) for block in blocks)


def test_rows_stand_by_position_and_then_by_query() -> None:
    heads = torch.arange(2 * 6 * 3).view(2, 6, 3)  # two groups of three queries
    rows = _by_position(heads, 2)
    assert rows.shape == (4, 9)
    assert rows[1].tolist() == [heads[0, 3 + n, s] for s in range(3) for n in range(3)]


def test_columns_subtract_a_number_that_has_more_digits_than_its_factor() -> None:
    factor = torch.randn(1, 4, 8, dtype=torch.bfloat16)
    column = torch.tensor([[33.21875, -7.0078125, 0.0, 1e-3]])
    rows, keys = _with_columns(factor, column), _with_columns(torch.zeros_like(factor))
    found = rows.float() @ keys.float().transpose(1, 2)
    torch.testing.assert_close(found[0, :, 0], -column[0], rtol=2**-14, atol=0.0)
    assert torch.equal(rows[..., :8], factor)
    assert not rows[..., 10:].any()


@pytest.mark.parametrize("kernel", [None, *_KERNELS.values()])
def test_scores_are_kept_on_meta_only_where_they_would_be_elsewhere(
    kernel: SDPBackend | None,
) -> None:
    b, groups, heads, length, width = 1, 2, 4, 64, 8
    shapes = [(b, heads, length, width), *[(b, groups, length, width)] * 2]
    q, k, v = (torch.empty(shape, device="meta", requires_grad=True) for shape in shapes)
    kept = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.shape)
        return tensor

    fused = kernel is not SDPBackend.MATH
    chosen = nullcontext() if kernel is None else sdpa_kernel(kernel)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), chosen:
        out = attend_by_torch(q, k, v, causal=True)
    assert out.shape == q.shape
    assert any(shape[-2:] == (length, length) for shape in kept) != fused
    out.sum().backward()
    assert k.grad is not None
    assert k.grad.shape == k.shape
