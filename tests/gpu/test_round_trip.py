"""State that waits in host memory, on a GPU: updates are those of state that stays, to the bit."""

import pytest
import torch

from megatron import device
from megatron.optimizer.host_state import HostState

pytestmark = pytest.mark.gpu


def test_parts_come_are_changed_and_go_back_many_times() -> None:
    here = device.select("cuda", 0)
    host = HostState(part_bytes=1 << 16)
    sizes = (100_000, 3, 70_001)
    kept = [[host.keep(torch.zeros(n, device=here)), host.keep(torch.ones(n))] for n in sizes]
    assert all(tensor.is_pinned() for pair in kept for tensor in pair)
    for _ in range(20):
        for _, tensors in host.parts(kept):
            for first, second in tensors:
                assert first.device == here
                first += second
                second *= 1.5
    host.settle()
    total = sum(1.5**n for n in range(20))
    for first, second in kept:
        torch.testing.assert_close(first, torch.full_like(first, total))
        torch.testing.assert_close(second, torch.full_like(second, 1.5**20))
