"""What `--optimizer` means, and the state it begins from."""

import pytest
import torch

from megatron.config.optimizer import OptimizerConfig, OptimizerKind, StateDtype
from megatron.optimizer.update_rule import fresh_state, update_rule

SGD = OptimizerConfig(optimizer=OptimizerKind.SGD, sgd_momentum=0.5)
ADAM = OptimizerConfig(adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-3)


def test_the_flags_reach_torchs_rules() -> None:
    weights = [[torch.ones(2)], [torch.ones(3)]]
    adam = update_rule(weights, ADAM)
    assert isinstance(adam, torch.optim.AdamW)
    assert [group["betas"] for group in adam.param_groups] == [(0.8, 0.9)] * 2
    assert [group["eps"] for group in adam.param_groups] == [1e-3] * 2
    assert [group["lr"] for group in adam.param_groups] == [0.0] * 2
    sgd = update_rule(weights, SGD)
    assert isinstance(sgd, torch.optim.SGD)
    assert [group["momentum"] for group in sgd.param_groups] == [0.5] * 2
    assert not adam.state
    assert not sgd.state


@pytest.mark.parametrize("config", [SGD, ADAM], ids=["sgd", "adam"])
def test_fresh_state_changes_no_result(config: OptimizerConfig) -> None:
    """It is what torch would have made at the first step."""
    results = []
    for given in (True, False):
        weight = torch.ones(4)
        rule = update_rule([[weight]], config)
        if given:
            rule.state[weight] = fresh_state(weight, config)
        rule.param_groups[0]["lr"] = 0.1
        for step in range(3):
            weight.grad = torch.arange(4.0) * (step + 1)
            rule.step()
        results.append((weight, rule.state[weight]))
    (one, state), (other, made) = results
    assert torch.equal(one, other)
    assert state.keys() == made.keys()
    assert all(torch.equal(torch.as_tensor(state[k]), torch.as_tensor(made[k])) for k in made)


def test_state_is_as_narrow_as_asked() -> None:
    narrow = OptimizerConfig(exp_avg_dtype=StateDtype.BF16)
    state = fresh_state(torch.ones(2), narrow)
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (torch.bfloat16, torch.float32)
    assert state["step"] == 0
    assert (
        fresh_state(torch.ones(2), OptimizerConfig(optimizer=OptimizerKind.SGD, sgd_momentum=0.0))
        == {}
    )
