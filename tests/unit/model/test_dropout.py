"""Dropout between layers: its streams, and when nothing is drawn."""

import pytest
import torch

from megatron.model.dropout import HiddenDropout
from megatron.mpu.random import RandomStreams
from tests.support.operators import Operators


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(
    ("sequence_parallel", "drawn", "other"),
    [(False, "replicated", "tensor"), (True, "tensor", "replicated")],
)
def test_it_draws_from_the_stream_of_who_holds_what_and_keeps_the_mean(
    sequence_parallel: bool, drawn: str, other: str, fused: bool
) -> None:
    streams = RandomStreams(1)
    before = streams.snapshot()
    outside = torch.get_rng_state()
    dropout = HiddenDropout(0.25, streams, sequence_parallel=sequence_parallel, fused=fused)
    dropped = dropout(torch.ones(100_000))
    after = streams.snapshot()
    assert not torch.equal(before[drawn], after[drawn])
    assert torch.equal(before[other], after[other])
    assert torch.equal(torch.get_rng_state(), outside)
    # 100,000 draws: the share is known to 0.0014.
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.01
    assert abs(dropped.mean().item() - 1) < 0.01
    with Operators() as called:
        hidden, residual = torch.ones(2, 1000), torch.randn(2, 1000)
        streams.restore(before)
        added = dropout(hidden, residual)
    assert ("megatron::dropout_add" in called.names) == fused
    streams.restore(before)
    torch.testing.assert_close(added, residual + dropout(hidden))
    assert repr(dropout) == f"HiddenDropout(0.25, stream={drawn})"


def test_with_probability_zero_or_in_evaluation_it_hands_back_its_input() -> None:
    hidden, streams = torch.ones(4), RandomStreams(1)
    off = HiddenDropout(0.0, streams, sequence_parallel=True)
    before = streams.snapshot()
    assert off(hidden) is hidden
    assert torch.equal(off(hidden, 2 * hidden), 3 * hidden)
    assert all(torch.equal(state, before[name]) for name, state in streams.snapshot().items())
    assert HiddenDropout(0.5, streams, sequence_parallel=True).eval()(hidden) is hidden
