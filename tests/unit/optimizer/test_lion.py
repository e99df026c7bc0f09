"""Lion over slots, against the published algorithm written out."""

import torch
from torch.nn import Parameter

from megatron.optimizer.lion import LionRule, update_slots
from megatron.optimizer.slots import Slot, StepScalars

RULE = LionRule(0.1, 0.9, 0.5, 0.2)


def scalars(factor: float, applied: bool) -> StepScalars:
    one = torch.ones((), dtype=torch.float64)
    return StepScalars(one * factor, torch.tensor(applied), one)


def test_an_update_goes_by_signs_of_a_mean_that_the_gradient_leads() -> None:
    parameter = Parameter(torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64))
    state = {"exp_avg": torch.tensor([0.1, 1.0, 0.0, -4.0], dtype=torch.float64)}
    values = parameter.detach()
    before, mean = values.clone(), state["exp_avg"].clone()
    gradient = torch.tensor([-0.5, -2.0, 0.0, 2.0], dtype=torch.float64)
    slot = Slot("w", parameter, None, values, values, state)
    update_slots([slot], {"w": gradient}, RULE, scalars(2.0, applied=True))
    # 0.9 m + 0.1 * 2 g = (-0.01, 0.5, 0, -3.2)
    signs = torch.tensor([-1.0, 1.0, 0.0, -1.0], dtype=torch.float64)
    torch.testing.assert_close(parameter.detach(), before - 0.1 * (signs + 0.2 * before))
    torch.testing.assert_close(state["exp_avg"], 0.5 * mean + 0.5 * 2 * gradient)


def test_an_update_that_does_not_count_changes_nothing() -> None:
    parameter = Parameter(torch.ones(3, dtype=torch.bfloat16))
    values, master = parameter.detach(), torch.full((3,), 1.001)
    slot = Slot("w", parameter, None, values, master, {"exp_avg": torch.ones(3)})
    bad = {"w": torch.tensor([1.0, float("nan"), float("inf")])}
    update_slots([slot], bad, RULE, scalars(1.0, applied=False))
    assert torch.equal(master, torch.full((3,), 1.001))
    assert torch.equal(values, torch.ones(3, dtype=torch.bfloat16))
    assert torch.equal(slot.state["exp_avg"], torch.ones(3))
    update_slots([slot], {"w": torch.ones(3)}, RULE, scalars(1.0, applied=True))
    torch.testing.assert_close(master, torch.full((3,), 1.001 * (1 - 0.02) - 0.1))
    assert torch.equal(values, master.bfloat16())
