"""The executor over real processes: the same bits as a plain loop, whatever the schedule."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.mpu.context import ParallelContext
from megatron.mpu.topology import Topology
from megatron.mpu.weight_gradients import WeightGradients
from megatron.pipeline.executor import Executor, StageWork
from tests.support.ranks import run_on_ranks
from tests.support.stages import Chunks, microbatches

LENGTHS = [4, 7, 4, 2, 7]
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1, "interleaved": 2}


def train_with_all() -> dict[str, tuple[list[Tensor], list[Tensor], list[int]]]:
    """By schedule: losses, gradients and virtual stages of this rank."""
    world = dist.get_world_size()
    group = ParallelContext.build(Topology(pp=world)).pp
    found = {}
    for number, (schedule, num_chunks) in enumerate(SCHEDULES.items()):
        held = Chunks(group.rank, world, num_chunks, depth=2 // num_chunks)
        queue = None
        if schedule == "zero-bubble":
            queue = WeightGradients()
            queue.adopt(held.layers.parameters())
        work = StageWork(held.run, held.loss, num_chunks)
        executor = Executor(
            work,
            group,
            schedule=schedule,
            weight_gradients=queue,
            overlaps=(number + world // 2) % 2 == 0,  # of each with two stages or with four
        )
        sums = executor.train(microbatches(LENGTHS), len(LENGTHS), scale=0.5)
        sums += executor.evaluate(microbatches(LENGTHS), len(LENGTHS))
        gradients = [p.grad for p in held.layers.parameters()]
        found[schedule] = sums, gradients, held.places
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("world", [2, 4])
def test_all_schedules_have_the_bits_of_a_plain_loop(world: int) -> None:
    model = Chunks(0, 1, 1, depth=2 * world)
    sums = []
    for inputs, labels in microbatches(LENGTHS):
        total, count = model.loss(model.run(0, inputs), labels)
        torch.autograd.backward(total * 0.5)
        sums.append(torch.stack([total.detach(), count]))
    (layers,) = model.layers
    by_rank = run_on_ranks(world, train_with_all)
    for schedule, num_chunks in SCHEDULES.items():
        depth = 2 // num_chunks
        last = by_rank[-1][schedule][0]
        assert all(torch.equal(one, two) for one, two in zip(last, sums * 2, strict=True))
        for found in by_rank:
            _, gradients, places = found[schedule]
            expected = [
                parameter.grad
                for place in places
                for layer in list(layers)[place * depth : (place + 1) * depth]  # type: ignore[call-overload]
                for parameter in layer.parameters()
            ]
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True)), (
                schedule
            )
