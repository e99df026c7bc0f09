"""Tests of megatron.optimizer.grad_buffer."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext
from megatron.mpu.weight_gradients import WeightGradients, defer_or_compute, gradient_sum
from megatron.optimizer.grad_buffer import GradBuffer

HALF_AND_WIDER = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
]
SINGLE = ParallelContext.single()


def model(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def batch(seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)


def main_grad(parameter: nn.Parameter) -> Tensor:
    view: Tensor = parameter.main_grad  # type: ignore[attr-defined]
    return view


@pytest.mark.parametrize(("dtype", "gradient_dtype"), HALF_AND_WIDER)
def test_gradients_of_micro_batches_add_up_in_the_wider_dtype(
    dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    module, plain = model(dtype), model(dtype)
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=gradient_dtype)
    sums = [torch.zeros_like(p, dtype=gradient_dtype) for p in plain.parameters()]
    for seed in range(3):
        module(batch(seed, dtype)).square().sum().backward()
        plain(batch(seed, dtype)).square().sum().backward()
        for total, parameter in zip(sums, plain.parameters()):
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None
    buffer.finish()
    for total, parameter in zip(sums, module.parameters()):
        assert main_grad(parameter).dtype == gradient_dtype
        assert torch.equal(main_grad(parameter), total)


def test_wide_parameters_have_their_gradient_in_the_buffer_itself() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == main_grad(parameter).data_ptr()
    for flat in buffer.flats:
        flat.data.zero_()
    assert all(not parameter.grad.any() for parameter in module.parameters())  # type: ignore[union-attr]


def test_half_precision_parameters_keep_no_gradient_of_their_own() -> None:
    module = model(torch.bfloat16)
    GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    module(batch(0, torch.bfloat16)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize(("dtype", "gradient_dtype"), HALF_AND_WIDER)
def test_a_step_begins_without_the_gradients_of_the_one_before(
    dtype: torch.dtype, gradient_dtype: torch.dtype
) -> None:
    module = model(dtype)
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=gradient_dtype)
    sums = []
    for seed, spoil in ((0, 1.0), (1, 1.0), (0, float("nan"))):
        for flat in buffer.flats:
            flat.data.mul_(spoil)
        module.zero_grad(set_to_none=True)  # views that are lost come back
        buffer.start_step()
        module(batch(seed, dtype)).square().sum().backward()
        buffer.finish()
        sums.append([main_grad(parameter).clone() for parameter in module.parameters()])
    assert all(map(torch.equal, sums[2], sums[0]))
    assert not any(map(torch.equal, sums[1][::2], sums[0][::2]))


@pytest.mark.parametrize("bucket_elements", [1, 64, 100, 10**9])
def test_gradients_lie_where_the_plan_says_in_reverse_order(bucket_elements: int) -> None:
    module = model()
    buffer = GradBuffer(
        module.named_parameters(),
        SINGLE.replicas,
        gradient_dtype=torch.float32,
        bucket_elements=bucket_elements,
    )
    (flat,) = buffer.flats
    members = [flat.parameters[i] for bucket in flat.plan.buckets for i in bucket.members]
    assert members == list(reversed(list(module.parameters())))
    assert flat.plan.elements == flat.data.numel()
    for parameter, place in zip(flat.parameters, flat.plan.places, strict=True):
        assert main_grad(parameter).storage_offset() == place.start
        assert main_grad(parameter).numel() == place.size
    assert buffer.size_bytes == 4 * flat.data.numel()


def test_memory_is_lent_until_a_gradient_comes_there() -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)), nn.Linear(64, 3))
    buffer = GradBuffer(
        layers.named_parameters(),
        SINGLE.replicas,
        gradient_dtype=torch.float32,
        fuse_accumulation=True,
    )
    (flat,) = buffer.flats
    size = 4 * 64 * 64
    # The bias of 3 elements is padded, and the weight of [3, 64] is together with the rest.
    lent = buffer.unwritten(4 * 3 * 64 + 4 * size, None)
    assert lent is not None
    lent.fill_(255)
    assert not flat.data[3:64].any()
    assert buffer.unwritten(4 * 3 * 64 + 4 * size + 1, None) is None

    def offset(size: int, besides: nn.Module) -> int | None:
        found = buffer.unwritten(size, gradient_sum(besides.weight))  # type: ignore[arg-type]
        return None if found is None else found.storage_offset() // 4

    # They lie in the reverse order: 0 is the last.
    first = [main_grad(layer.weight).storage_offset() for layer in layers]  # type: ignore[arg-type]
    assert offset(2 * size, layers[1]) == first[4]
    assert offset(2 * size, layers[2]) == first[1]
    assert offset(3 * size, layers[1]) is None
    layers[:4](torch.ones(1, 64)).sum().backward()
    assert offset(4 * 3 * 64, layers[0]) == first[4]
    assert offset(size, layers[0]) is None
    buffer.start_step()
    assert offset(3 * size, layers[0]) == first[4]


def test_dtypes_have_a_buffer_each_and_frozen_parameters_none() -> None:
    module = model(torch.bfloat16)
    module[2].double()
    module[0].bias.requires_grad_(False)
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    assert {flat.data.dtype for flat in buffer.flats} == {torch.float32, torch.float64}
    assert not hasattr(module[0].bias, "main_grad")


def test_a_parameter_without_gradient_is_an_error_that_names_it() -> None:
    module = nn.ModuleDict({"used": nn.Linear(5, 2), "unused": nn.Linear(5, 2)})
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    module["used"](batch(0, torch.float32)).sum().backward()
    with pytest.raises(
        ConfigError, match=r"no part in the backward(.|\n)*unused.weight, unused.bias"
    ):
        buffer.finish()


def test_many_parameters_without_gradient_are_counted() -> None:
    module = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"2\.weight and 3 more"):
        buffer.finish()


def test_gradients_of_the_last_iteration_do_not_count_for_this_one() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    buffer.start_step()
    with pytest.raises(ConfigError, match="no part in the backward"):
        buffer.finish()


def test_a_gradient_after_its_bucket_was_reduced_is_an_error() -> None:
    module = model()
    buffer = GradBuffer(
        module.named_parameters(), SINGLE.replicas, gradient_dtype=torch.float32, overlap=True
    )
    buffer.start_step(1)
    module(batch(0, torch.float32)).sum().backward()
    with pytest.raises(
        ConfigError, match=r"came after its sum(.|\n)*2.(weight|bias) had 2 gradients, for 1 micro"
    ):
        module(batch(1, torch.float32)).sum().backward()


def test_nothing_is_reduced_before_the_end_without_overlap_or_a_number_of_passes() -> None:
    for overlap, passes in ((False, 1), (True, None)):
        module = model()
        buffer = GradBuffer(
            module.named_parameters(),
            SINGLE.replicas,
            gradient_dtype=torch.float32,
            overlap=overlap,
        )
        buffer.start_step(passes)
        for seed in range(2):
            module(batch(seed, torch.float32)).sum().backward()
        buffer.finish()


def test_what_is_summed_elsewhere_first_is_held_back_in_buckets_of_its_own() -> None:
    module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    for index in (1, 2):
        vars(module[index].weight)["reduce_first"] = True  # as tied weights
    vars(module[3].weight).update(reduce_first=True, sequence_parallel=True)
    vars(module[0].weight)["sequence_parallel"] = True
    buffer = GradBuffer(
        module.named_parameters(),
        SINGLE.replicas,
        gradient_dtype=torch.float32,
        overlap=True,
    )
    (flat,) = buffer.flats
    assert [(bucket.members, bucket.held) for bucket in flat.plan.buckets] == [
        ((4,), False),
        ((3, 0), True),
        ((2,), True),
        ((1,), True),
    ]
    seen = []

    def before() -> None:
        seen.append([reduction.pending is not None for reduction in buffer._reductions])

    buffer.start_step(1)
    module(torch.ones(1, 8)).sum().backward()
    assert buffer._started == 1
    buffer.finish(before)
    assert seen == [[True, False, False, False]]


class Deferring(torch.autograd.Function):
    """A product whose weight's gradient may come later."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        ctx.weight = weight
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (inputs,) = ctx.saved_tensors
        return gradient @ ctx.weight.detach(), defer_or_compute(ctx.weight, inputs, gradient)


def test_a_gradient_that_comes_later_counts_when_it_comes() -> None:
    weight = nn.Parameter(torch.ones(3, 5))
    queue = WeightGradients()
    queue.adopt([weight])
    buffer = GradBuffer(
        [("weight", weight)], SINGLE.replicas, gradient_dtype=torch.float32, overlap=True
    )
    buffer.start_step(2)
    for key in range(2):
        with queue.collecting(key):
            inputs = batch(key, torch.float32).requires_grad_()
            Deferring.apply(inputs, weight).sum().backward()
    assert buffer._started == 0
    queue.compute(0)
    assert buffer._started == 0
    queue.compute(1)
    assert buffer._started == 1
    buffer.finish()
    expected = sum(batch(key, torch.float32).sum(0) for key in range(2))
    torch.testing.assert_close(main_grad(weight)[0], expected)
