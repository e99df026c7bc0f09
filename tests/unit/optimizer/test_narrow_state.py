"""Tests of megatron.optimizer.narrow_state."""

import pytest
import torch
from torch import Tensor

from megatron.optimizer.narrow_state import step_in_fp32


def rule_over(weights: list[Tensor], dtype: torch.dtype) -> torch.optim.Optimizer:
    rule = torch.optim.AdamW(weights, lr=0.1, betas=(0.9, 0.95))
    for weight in weights:
        rule.state[weight] = {
            "step": torch.zeros(()),
            "exp_avg": torch.zeros_like(weight, dtype=dtype),
            "exp_avg_sq": torch.zeros_like(weight),
        }
    return rule


def seeded(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in (5, 1, 30)]


@pytest.mark.parametrize("batch_elements", [1, 6, 10**9])
def test_a_step_is_a_wide_step_from_rounded_state(batch_elements: int) -> None:
    weights, wide = seeded(0), seeded(0)
    rule, reference = rule_over(weights, torch.bfloat16), rule_over(wide, torch.float32)
    for seed in range(1, 4):
        gradients = seeded(seed)
        step_in_fp32(rule, list(zip(weights, gradients)), batch_elements=batch_elements)
        for weight, gradient in zip(wide, gradients, strict=True):
            weight.grad = gradient
        reference.step()
        for weight in wide:  # what lies in memory between steps is rounded
            mean = reference.state[weight]["exp_avg"]
            mean.copy_(mean.bfloat16())
        for one, other in zip(weights, wide, strict=True):
            assert torch.equal(one, other)
            assert rule.state[one]["exp_avg"].dtype == torch.bfloat16
            assert torch.equal(
                rule.state[one]["exp_avg"].float(), reference.state[other]["exp_avg"]
            )
            assert float(rule.state[one]["step"]) == seed
            assert one.grad is None


def test_state_stays_in_the_tensors_that_it_was_in() -> None:
    weights = seeded(0)
    rule = rule_over(weights, torch.bfloat16)
    before = [rule.state[weight]["exp_avg"] for weight in weights]
    step_in_fp32(rule, list(zip(weights, seeded(1))))
    for weight, tensor in zip(weights, before, strict=True):
        assert rule.state[weight]["exp_avg"] is tensor
        assert tensor.any()
