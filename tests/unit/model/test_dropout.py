"""Dropout between layers: its masks have names, and when nothing is drawn."""

import pytest
import torch

from megatron.model.dropout import HiddenDropout
from megatron.mpu.random import Samples
from megatron.ops.dropout import add_into
from tests.support.models import second_of_two, tiny_build
from tests.support.operators import Operators


@pytest.mark.parametrize("fused", [True, False])
def test_it_drops_by_sample_and_keeps_the_mean(fused: bool) -> None:
    build = tiny_build(fuse_dropout=fused)
    dropout, ones = HiddenDropout(0.25, build, "layer", 3), torch.ones(100, 4, 250)
    before = torch.get_rng_state()
    with Operators() as called, build.streams.of(Samples(8, 4)):
        dropped = dropout(ones)
    assert ("megatron::dropout_add" in called.names) == fused
    assert torch.equal(torch.get_rng_state(), before)
    # 100,000 draws: the share is known to 0.0014.
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.01
    assert abs(dropped.mean().item() - 1) < 0.01
    with build.streams.of(Samples(10, 2)):
        assert torch.equal(dropout(ones[:, 2:]), dropped[:, 2:])
        assert not torch.equal(HiddenDropout(0.25, build, "layer", 4)(ones), dropped)
        residual = torch.randn(100, 2, 250)
        added = dropout(ones[:, 2:], residual)
    torch.testing.assert_close(added, residual + dropped[:, 2:])
    assert repr(dropout) == "HiddenDropout(0.25, layer, 3)"


def test_a_residual_is_added_in_the_memory_of_a_branch() -> None:
    add = HiddenDropout(0.0, tiny_build(), "a")
    residual = torch.randn(6, 2, 16, dtype=torch.float64, requires_grad=True)

    def branch() -> torch.Tensor:
        # A view that a custom function returns, as linear layers do.
        return add_into(torch.zeros_like(residual, requires_grad=True) + 0.0, residual)

    branch_out = branch()
    memory, values = branch_out.data_ptr(), branch_out.detach().clone()
    added = add(branch_out, residual)
    assert added.data_ptr() == memory
    assert torch.equal(added, residual + values)
    added.sum().backward()
    assert residual.grad is not None
    assert residual.grad.unique().tolist() == [2.0]
    for other in (add.eval()(branch(), residual), add.train()(values, residual)):
        assert other.data_ptr() not in (memory, values.data_ptr())
    with torch.no_grad():
        assert add(values, residual).data_ptr() != values.data_ptr()
    assert add(branch().float(), residual).dtype == torch.float64


def test_both_ways_drop_the_same() -> None:
    hidden = torch.randn(6, 2, 16)
    ways = [HiddenDropout(0.5, tiny_build(fuse_dropout=fused), "a") for fused in (True, False)]
    torch.testing.assert_close(*(way(hidden) for way in ways))


def test_a_part_of_a_sequence_is_dropped_as_in_the_whole() -> None:
    hidden = torch.randn(12, 2, 16)
    whole = HiddenDropout(0.5, tiny_build(), "a")(hidden)
    part = tiny_build(second_of_two(), sequence_parallel=True)
    assert torch.equal(HiddenDropout(0.5, part, "a")(hidden[6:]), whole[6:])


def test_rows_that_every_rank_holds_whole_are_dropped_by_their_number() -> None:
    pooled = torch.randn(4, 16)
    build = tiny_build(second_of_two(), sequence_parallel=True)
    dropout = HiddenDropout(0.5, build, "a", whole=True)
    with build.streams.of(Samples(6, 2)):  # two rows of each sample
        dropped = dropout(pooled)
    with build.streams.of(Samples(7, 1)):
        assert torch.equal(dropout(pooled[2:]), dropped[2:])
    assert not torch.equal(dropped[:2] == 0, dropped[2:] == 0)


def test_with_probability_zero_or_in_evaluation_it_hands_back_its_input() -> None:
    hidden, build = torch.ones(4, 1, 1), tiny_build()
    off = HiddenDropout(0.0, build, "a")
    with build.streams.of(None):  # nothing is drawn
        assert off(hidden) is hidden
        assert torch.equal(off(hidden, 2 * hidden), 3 * hidden)
        assert HiddenDropout(0.5, build, "a").eval()(hidden) is hidden
