"""Comparing tensors by digest, in one process; tests/distributed has the ranks."""

import torch

from megatron.mpu.context import ParallelContext
from megatron.optimizer.agreement import _digest, check_bitwise_equal


def test_one_rank_agrees_with_itself() -> None:
    check_bitwise_equal([("weight", torch.ones(2))], ParallelContext.single().tp, problem="nothing")


def test_a_digest_is_of_the_bits_in_order() -> None:
    values = torch.arange(6.0)
    digests = {
        _digest(values),
        _digest(values.flip(0)),
        _digest(values.double()),
        _digest(torch.nextafter(values, torch.tensor(9.0))),
        _digest(torch.empty(0)),
    }
    assert len(digests) == 5
    assert _digest(values.view(2, 3).t().contiguous().t()) == _digest(values)
