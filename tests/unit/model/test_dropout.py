"""Dropout of replicated tensors."""

import torch

from megatron.model.dropout import ReplicatedDropout
from megatron.mpu.random import RandomStreams


def test_it_draws_from_the_replicated_stream_and_keeps_the_mean() -> None:
    streams = RandomStreams(1)
    before = streams.snapshot()
    outside = torch.get_rng_state()
    dropped = ReplicatedDropout(0.25, streams)(torch.ones(100_000))
    after = streams.snapshot()
    assert not torch.equal(before["replicated"], after["replicated"])
    assert torch.equal(before["tensor"], after["tensor"])
    assert torch.equal(torch.get_rng_state(), outside)
    # 100,000 draws: the share is known to 0.0014.
    assert abs((dropped == 0).float().mean().item() - 0.25) < 0.01
    assert abs(dropped.mean().item() - 1) < 0.01


def test_with_probability_zero_or_in_evaluation_it_hands_back_its_input() -> None:
    hidden, streams = torch.ones(4), RandomStreams(1)
    assert ReplicatedDropout(0.0, streams)(hidden) is hidden
    assert ReplicatedDropout(0.5, streams).eval()(hidden) is hidden
