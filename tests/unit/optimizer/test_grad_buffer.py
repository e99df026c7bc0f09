"""Tests of megatron.optimizer.grad_buffer."""

import pytest
import torch
from torch import Tensor, nn

from megatron.errors import ConfigError
from megatron.mpu.context import ParallelContext
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
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=gradient_dtype)
    sums = [torch.zeros_like(p, dtype=gradient_dtype) for p in plain.parameters()]
    for seed in range(3):
        module(batch(seed, dtype)).square().sum().backward()
        plain(batch(seed, dtype)).square().sum().backward()
        for total, parameter in zip(sums, plain.parameters()):
            assert parameter.grad is not None
            total.add_(parameter.grad)
            parameter.grad = None
    buffer.all_reduce(SINGLE.dp)
    for total, parameter in zip(sums, module.parameters()):
        assert main_grad(parameter).dtype == gradient_dtype
        assert torch.equal(main_grad(parameter), total)


def test_wide_parameters_have_their_gradient_in_the_buffer_itself() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == main_grad(parameter).data_ptr()
    buffer.scale_(0.0)
    assert all(not parameter.grad.any() for parameter in module.parameters())  # type: ignore[union-attr]


def test_half_precision_parameters_keep_no_gradient_of_their_own() -> None:
    module = model(torch.bfloat16)
    GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module(batch(0, torch.bfloat16)).sum().backward()
    assert all(parameter.grad is None for parameter in module.parameters())


def test_zero_zeroes_and_brings_back_views_that_were_lost() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    module.zero_grad(set_to_none=True)
    buffer.zero()
    for parameter in module.parameters():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == main_grad(parameter).data_ptr()
        assert not parameter.grad.any()


def test_scale_multiplies_every_gradient() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    before = [main_grad(parameter).clone() for parameter in module.parameters()]
    buffer.scale_(0.25)
    assert all(
        torch.equal(main_grad(parameter), 0.25 * old)
        for parameter, old in zip(module.parameters(), before)
    )


@pytest.mark.parametrize("bucket_elements", [1, 64, 100, 10**9])
def test_buckets_hold_every_parameter_once_in_reverse_order(bucket_elements: int) -> None:
    module = model()
    buffer = GradBuffer(
        module.named_parameters(), gradient_dtype=torch.float32, bucket_elements=bucket_elements
    )
    (flat,) = buffer._flats
    members = [parameter for bucket in flat.buckets for parameter in bucket.parameters]
    assert members == list(reversed(list(module.parameters())))
    assert [bucket.start for bucket in flat.buckets[1:]] == [b.end for b in flat.buckets[:-1]]
    assert (flat.buckets[0].start, flat.buckets[-1].end) == (0, flat.data.numel())
    for bucket in flat.buckets:
        for parameter in bucket.parameters:
            offset = main_grad(parameter).storage_offset()
            assert bucket.start <= offset
            assert offset + parameter.numel() <= bucket.end
            assert offset % 64 == 0
    assert buffer.size_bytes == 4 * flat.data.numel()


def test_dtypes_have_a_buffer_each_and_frozen_parameters_none() -> None:
    module = model(torch.bfloat16)
    module[2].double()
    module[0].bias.requires_grad_(False)
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    assert {flat.data.dtype for flat in buffer._flats} == {torch.float32, torch.float64}
    assert not hasattr(module[0].bias, "main_grad")


def test_a_parameter_without_gradient_is_an_error_that_names_it() -> None:
    module = nn.ModuleDict({"used": nn.Linear(5, 2), "unused": nn.Linear(5, 2)})
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module["used"](batch(0, torch.float32)).sum().backward()
    with pytest.raises(
        ConfigError, match=r"no part in the backward(.|\n)*unused.weight, unused.bias"
    ):
        buffer.all_reduce(SINGLE.dp)


def test_many_parameters_without_gradient_are_counted() -> None:
    module = nn.ModuleList(nn.Linear(1, 1) for _ in range(4))
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"2\.weight and 3 more"):
        buffer.all_reduce(SINGLE.dp)


def test_an_optional_parameter_may_go_without_gradient() -> None:
    module = nn.ModuleDict({"used": nn.Linear(5, 2), "unused": nn.Linear(5, 2, bias=False)})
    buffer = GradBuffer(
        module.named_parameters(), gradient_dtype=torch.float32, optional=["unused.weight"]
    )
    module["used"](batch(0, torch.float32)).sum().backward()
    buffer.all_reduce(SINGLE.dp)
    assert not main_grad(module["unused"].weight).any()


def test_gradients_of_the_last_iteration_do_not_count_for_this_one() -> None:
    module = model()
    buffer = GradBuffer(module.named_parameters(), gradient_dtype=torch.float32)
    module(batch(0, torch.float32)).sum().backward()
    buffer.zero()
    with pytest.raises(ConfigError, match="no part in the backward"):
        buffer.all_reduce(SINGLE.dp)
