"""Tests of the differentiable collectives: forward values, and gradients of the whole sum."""

import torch

from megatron.mpu import mappings
from tests.distributed.mpu.reference import EXACT, build, sample
from tests.support.ranks import run_on_ranks


def pairs_are_conjugate() -> None:
    tp = build(tp=4).tp
    whole = sample(4, 3, 8, seed=1)
    ours = sample(4, 3, 8, seed=2 + tp.rank)  # differs by rank
    total = torch.stack([sample(4, 3, 8, seed=2 + r) for r in range(4)]).sum(0)
    first = whole.chunk(4, 0)[tp.rank]

    def check(function, tensor, expected, upstream, expected_gradient):  # type: ignore[no-untyped-def]
        leaf = tensor.clone().requires_grad_()
        output = function(leaf, tp)
        torch.testing.assert_close(output, expected, **EXACT)
        (gradient,) = torch.autograd.grad(output, leaf, upstream)
        torch.testing.assert_close(gradient, expected_gradient, **EXACT)

    check(mappings.copy_to_tp, whole, whole, ours, total)
    check(mappings.reduce_from_tp, ours, total, whole, whole)
    check(mappings.gather_from_sequence, first, whole, ours, total.chunk(4, 0)[tp.rank])
    check(mappings.reduce_scatter_to_sequence, ours, total.chunk(4, 0)[tp.rank], first, whole)


def inputs_and_shared_gradients_are_not_changed() -> None:
    tp = build(tp=4).tp
    leaf = torch.ones(4, requires_grad=True)
    mappings.reduce_from_tp(leaf, tp)
    assert leaf.tolist() == [1] * 4
    upstream = torch.ones(4)
    torch.autograd.grad(mappings.copy_to_tp(leaf, tp), leaf, upstream)
    assert upstream.tolist() == [1] * 4


def both() -> None:
    pairs_are_conjugate()
    inputs_and_shared_gradients_are_not_changed()


def test_mappings_are_conjugate_and_change_no_input() -> None:
    run_on_ranks(4, both)
