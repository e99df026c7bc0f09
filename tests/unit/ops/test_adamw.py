"""AdamW means what torch's does; the law of kernels is in tests/laws."""

import pytest
import torch
from torch import Tensor

from megatron.ops.adamw import AdamwRule, AdamwTensors, adamw_step_, adamw_step_reference

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
