"""Messages between ranks: any dtype, both ways at once, and an end to waiting that has a name."""

import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import PeerError
from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.pipeline.p2p import GroupExchanger, PipelineMessage
from tests.support.ranks import run_on_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)
TIMEOUT_S = 2.0


def stages(timeout_s: float = 30.0) -> ParallelContext:
    topology = Topology(pp=dist.get_world_size())
    return ParallelContext.build(topology, timedelta(seconds=timeout_s))


def around_the_ring() -> list[list[Tensor]]:
    """Every rank gives its numbers to both neighbours; with two ranks both are the same one."""
    group = stages().pp
    exchanger, received = GroupExchanger(group), []
    for size in (0, 3, 100_000):
        own = tuple(torch.full((size,), group.rank + 1).to(dtype) for dtype in DTYPES)
        rooms = [tuple(torch.empty_like(tensor) for tensor in own) for _ in range(2)]
        next_, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        exchanger.exchange(
            [
                PipelineMessage(True, next_, own, "forward"),
                PipelineMessage(
                    True, previous, tuple(t.logical_not() for t in own[-1:]), "backward"
                ),
                PipelineMessage(False, previous, rooms[0], "forward"),
                PipelineMessage(False, next_, rooms[1][-1:], "backward"),
            ]
        )
        received.append([*rooms[0], rooms[1][-1]])
    exchanger.exchange([])
    return [[tensor[:1] for tensor in each] for each in received]


def test_tensors_of_all_kinds_go_both_ways_at_once() -> None:
    for size in (2, 3):
        for rank, received in enumerate(run_on_ranks(size, around_the_ring)):
            empty, *full = received
            assert all(tensor.numel() == 0 for tensor in empty)
            for *forward, backward in full:
                assert [tensor.dtype for tensor in forward] == list(DTYPES)
                previous = (rank - 1) % size + 1
                assert all(tensor.item() == torch.tensor(previous).to(tensor.dtype).item()
                           for tensor in forward)  # fmt: skip
                assert not backward.item()


def wait_for_nobody() -> tuple[str, float]:
    group = stages(TIMEOUT_S).pp
    if group.rank == 1:
        time.sleep(2 * TIMEOUT_S)  # alive, but it never answers
        return "", 0.0
    start = time.monotonic()
    try:
        GroupExchanger(group).exchange(
            [PipelineMessage(False, 1, (torch.empty(3),), "recv_forward(4)")]
        )
    except PeerError as error:
        return str(error), time.monotonic() - start
    raise AssertionError("nobody sent this")


def test_a_wait_ends_with_the_name_of_the_stage_that_was_waited_for() -> None:
    (message, waited), _ = run_on_ranks(2, wait_for_nobody)
    assert "a message between pipeline stages was not exchanged" in message
    assert "at stage 0: recv_forward(4) from stage 1 (rank 1)" in message
    assert waited < 10 * TIMEOUT_S
