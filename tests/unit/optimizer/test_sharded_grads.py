"""Tests of megatron.optimizer.sharded_grads in one process; sums are in tests/distributed."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import set_sharding_unit
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.sharded_grads import ShardedGradBuffer

SINGLE = ParallelContext.single()


def two_units(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)
    for name, parameter in module.named_parameters():
        set_sharding_unit(parameter, name.split(".")[0])
    return module


def buffer_of(
    module: nn.Module, kind: type[GradBuffer] = ShardedGradBuffer, *, overlap: bool = False
) -> GradBuffer:
    return kind(
        module.named_parameters(),
        SINGLE.replicas,
        gradient_dtype=torch.float32,
        overlap=overlap,
        sharded=True,
    )


def backward(module: nn.Module, dtype: torch.dtype, *, passes: int = 3) -> None:
    for seed in range(passes):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        module(inputs).square().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overlap", [False, True])
def test_what_is_kept_is_the_sum_over_micro_batches(dtype: torch.dtype, overlap: bool) -> None:
    sums = []
    for kind in (GradBuffer, ShardedGradBuffer):
        module = two_units(dtype)
        buffer = buffer_of(module, kind, overlap=overlap)
        for _ in range(2):  # the second step forgets the first
            buffer.start_step(3)
            backward(module, dtype)
            buffer.finish()
        sums.append([vars(parameter)["main_grad"].view(-1) for parameter in module.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*sums, strict=True))


def test_gradients_of_a_unit_have_memory_for_a_part_of_a_backward_pass() -> None:
    module = two_units()
    buffer = buffer_of(module)
    rooms = [flat.room for flat in buffer.flats]
    seen = []

    def look(parameters: Sequence[Parameter]) -> None:
        seen.append((len(parameters), [room.is_taken for room in rooms if room is not None]))

    buffer.after_unit = look  # type: ignore[attr-defined]
    buffer.start_step(1)
    backward(module, torch.float32, passes=1)
    # The last layer's are done, and given back, before those of the first begin.
    assert seen == [(2, [False, False]), (2, [False, False])]
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_sum_under_way_is_finished_before_its_memory_is_written_again() -> None:
    layer = nn.Linear(2, 1, bias=False)
    buffer = buffer_of(layer, overlap=True)
    (room,) = [flat.room for flat in buffer.flats]
    assert room is not None
    buffer.start_step(2)
    for factor in (1.0, 10.0):
        layer(torch.tensor([[1.0, 2.0]])).mul(factor).sum().backward()
        assert room.is_taken
    buffer.finish()
    assert not room.is_taken
    assert vars(layer.weight)["main_grad"].tolist() == [11.0, 22.0]


def test_a_parameter_without_a_gradient_is_named() -> None:
    module = two_units()
    buffer = buffer_of(module)
    buffer.start_step(1)
    module[0](torch.ones(1, 5)).sum().backward()
    with pytest.raises(ConfigError, match=r"no part in the backward pass\n  found: 2.weight"):
        buffer.finish()


def test_held_gradients_are_summed_over_other_ranks_after_those_of_replicas() -> None:
    module = two_units()
    buffer = buffer_of(module, overlap=True)
    gradients = [vars(parameter)["main_grad"] for parameter in module.parameters()]
    seen: list[list[Tensor]] = []

    def double() -> None:
        seen.append([gradient.clone() for gradient in gradients])
        for gradient in gradients:
            gradient.mul_(2)

    for before in (None, double):
        buffer.start_step(1)
        backward(module, torch.float32, passes=1)
        buffer.finish(before)
        seen.append([gradient.clone() for gradient in gradients])
    plain, before_doubling, doubled = seen
    assert all(map(torch.equal, plain, before_doubling))
    assert all(torch.equal(one, 2 * other) for one, other in zip(doubled, plain))
