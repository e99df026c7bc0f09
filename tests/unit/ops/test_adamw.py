"""AdamW means what torch's does; the law of kernels is in tests/laws."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron.ops.adamw import (
    AdamwRule,
    AdamwTensors,
    adamw_step_,
    adamw_step_reference,
    join_halves,
    split_halves,
)

RULE = AdamwRule(rate=0.1, beta1=0.9, beta2=0.95, epsilon=1e-6, decay=0.2)


def seeded(seed: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=dtype) for size in (5, 1, 30)]


def zeros(weights: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros_like(weight, dtype=dtype) for weight in weights]


def step(weights: list[Tensor], grads: list[Tensor], state: list[list[Tensor]], at: int) -> None:
    one = torch.ones(())
    steps = torch.tensor(float(at))
    tensors = AdamwTensors(weights, grads, *state, published=[])
    adamw_step_(tensors, RULE, factor=one / 2, applied=one.bool(), steps=steps)


@pytest.mark.parametrize("by", ["operator", "reference"])
def test_a_step_is_that_of_torchs_plain_rule(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if by == "reference":
        monkeypatch.setattr(torch.ops.megatron, "adamw_step_", adamw_step_reference)
    weights, plain = seeded(0, torch.float64), seeded(0, torch.float64)
    state = [zeros(weights, torch.float64) for _ in range(2)]
    reference = torch.optim.AdamW(
        plain, lr=0.1, betas=(0.9, 0.95), eps=1e-6, weight_decay=0.2, foreach=False
    )
    for at in range(1, 5):
        grads = seeded(at, torch.float64)
        for weight, grad in zip(plain, grads, strict=True):
            weight.grad = grad / 2
        reference.step()
        step(weights, grads, state, at)
        for ours, expected in zip(weights, plain, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-13, atol=1e-13)


def test_a_step_with_narrow_state_is_a_wide_step_from_rounded_state() -> None:
    weights, wide = seeded(0, torch.float32), seeded(0, torch.float32)
    state = [zeros(weights, torch.bfloat16), zeros(weights, torch.float32)]
    of_wide = [zeros(weights, torch.float32) for _ in range(2)]
    for at in range(1, 4):
        grads = seeded(at, torch.float32)
        step(weights, grads, state, at)
        step(wide, grads, of_wide, at)
        for mean in of_wide[0]:  # what lies in memory between steps is rounded
            mean.copy_(mean.bfloat16())
        for ours, expected in zip([*weights, *state[0]], [*wide, *of_wide[0]], strict=True):
            assert torch.equal(ours.float(), expected)


def test_a_graph_with_the_weights_of_before_has_no_backward_pass() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = weight.square().sum()
    step([weight.detach()], [torch.ones(3)], [zeros([weight], torch.float32) for _ in range(2)], 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def halves_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    upper, lower = weight.bfloat16(), torch.empty_like(weight, dtype=torch.int16)
    split_halves(weight, upper, lower)
    return upper, lower


def test_halves_of_a_weight_are_what_it_rounds_to_and_the_rest() -> None:
    """All numbers with these upper 16 bits: of every sign, subnormal, next to zero and infinity."""
    for first in (0x0000, 0x0001, 0x3F80, 0x3F81, 0x7F7F, 0x8000, 0xBF81, 0xFF7F):
        numbers = (torch.arange(1 << 16) + (first << 16)).to(torch.int32)
        weight = numbers.view(torch.float32)
        upper, lower = halves_of(weight)
        assert torch.equal(upper, weight.bfloat16())
        differs = join_halves(upper, lower) != weight
        # Halfway, and rounded down to an even number.
        assert differs.nonzero().flatten().tolist() == ([] if first % 2 else [0x8000])
        made = join_halves(upper, lower)[differs].view(torch.int32)
        assert torch.equal(made, numbers[differs] - 1)
    infinity = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(join_halves(*halves_of(infinity)), infinity)
    of_nan = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    assert join_halves(*halves_of(of_nan)).isnan().all()


@pytest.mark.parametrize(
    "by", [torch.ops.megatron.adamw_step_, adamw_step_reference], ids=["kernel", "reference"]
)
def test_halves_and_whole_weights_give_way_alike(by: Callable[..., None]) -> None:
    """A step that moves a weight to where no halves can be, from the number above it."""
    halfway = torch.tensor([0x3F808000], dtype=torch.int32).view(torch.float32)
    below = torch.tensor([0x3F807FFF], dtype=torch.int32).view(torch.float32)
    grad, scalars = torch.zeros(1), torch.tensor([1.0, 1.0, 1.0, 1.0], dtype=torch.float64)
    mean, square, published = torch.zeros(1), torch.zeros(1), halfway.bfloat16()
    numbers = [0.0, 0.9, 0.95, 1e-8, 0.0]
    weight = halfway.clone()
    by([weight], [grad], [mean], [square], [published], scalars, numbers)
    assert torch.equal(weight, below)
    assert torch.equal(published, halfway.bfloat16())
    of_half = halfway.clone()
    by([of_half], [grad], [mean], [square], [halfway.half()], scalars, numbers)
    assert torch.equal(of_half, halfway)
