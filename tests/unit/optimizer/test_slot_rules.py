"""Which rule updates a parameter."""

import dataclasses

import pytest
import torch
from torch.nn import Parameter

from megatron.config.optimizer import OptimizerConfig, OptimizerKind
from megatron.mpu.context import ParallelContext
from megatron.optimizer.host_state import HostState
from megatron.optimizer.slot_rules import GroupNumbers, SlotRules
from megatron.optimizer.slots import Slot, StepScalars
from megatron.optimizer.update_rule import fresh_state

MATRIX, TABLE = "layers.0.mlp.fc1.weight", "embedding.word.weight"
ADAM, LION, MUON = OptimizerKind.ADAM, OptimizerKind.LION, OptimizerKind.MUON


@pytest.mark.parametrize(
    ("kind", "beside", "expected"),
    [
        (ADAM, ADAM, (ADAM, ADAM)),
        (LION, ADAM, (LION, LION)),
        (MUON, ADAM, (MUON, ADAM)),
        (MUON, LION, (MUON, LION)),
    ],
)
def test_each_parameter_has_its_rule_and_is_updated_by_it(
    kind: OptimizerKind, beside: OptimizerKind, expected: tuple[OptimizerKind, OptimizerKind]
) -> None:
    config = OptimizerConfig(optimizer=kind, muon_scalar_optimizer=beside, lion_beta1=0.5)
    rules = SlotRules(config, ParallelContext.single())
    slots = []
    for name in (MATRIX, TABLE):
        parameter = Parameter(torch.zeros(2, 2))
        values = parameter.detach()
        state = fresh_state(values, config, rules.kind(name, parameter))
        slots.append(Slot(name, parameter, None, values, values, state))
    assert tuple(rules.kind(slot.name, slot.parameter) for slot in slots) == expected
    one = torch.ones((), dtype=torch.float64)
    gradients = {slot.name: torch.tensor([[3.0, 0.0], [0.0, 2.0]]) for slot in slots}
    rules.update(
        rules.by_kind(slots),
        gradients,
        GroupNumbers(0.5, 0.0),
        StepScalars(one, one.bool(), one),
        HostState(),
    )
    signs = torch.tensor([[0.5, 0.0], [0.0, 0.5]])
    for slot, rule in zip(slots, expected):
        if rule is MUON:  # near the identity, times sqrt(2), times the rate
            assert (slot.values + signs * 2**0.5).abs().max() < 0.35 * 0.5 * 2**0.5
        else:  # the first step of AdamW is the sign too, but for epsilon
            torch.testing.assert_close(slot.values, -signs)
        assert slot.state.keys() == fresh_state(slot.values, config, rule).keys()


def test_without_a_word_about_it_the_rule_of_the_config_gives_the_state() -> None:
    lion = dataclasses.replace(OptimizerConfig(), optimizer=LION)
    assert fresh_state(torch.ones(2), lion).keys() == {"exp_avg"}
    assert fresh_state(torch.ones(2), lion, ADAM).keys() == {"exp_avg", "exp_avg_sq", "step"}


def test_a_factor_on_epsilon_reaches_adamw() -> None:
    config = OptimizerConfig(adam_eps=0.5)
    parameter = Parameter(torch.zeros(2, 2, dtype=torch.float64))
    values = parameter.detach()
    slot = Slot(MATRIX, parameter, None, values, values, fresh_state(values, config))
    one = torch.ones((), dtype=torch.float64)
    gradients = {MATRIX: torch.full((2, 2), 3.0, dtype=torch.float64)}
    rules = SlotRules(config, ParallelContext.single())
    numbers = GroupNumbers(1.0, 0.0, epsilon_multiplier=2.0)
    rules.update(
        rules.by_kind([slot]), gradients, numbers, StepScalars(one, one.bool(), one), HostState()
    )
    torch.testing.assert_close(values, torch.full_like(values, -3 / (3 + 1)))
