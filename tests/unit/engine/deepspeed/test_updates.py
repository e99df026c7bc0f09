"""Which optimizer steps under DeepSpeed, and its settings; updates are tested in distributed."""

import pytest
import torch
from torch.nn import Parameter

from megatron.engine.deepspeed.updates import (
    FrozenLossScale,
    NativeUpdates,
    ZeroUpdates,
    _replay_steps,
    updates_for,
)
from megatron.errors import CheckpointError, ConfigError
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import Init, set_parameter_metadata
from megatron.optimizer.grad_scaler import DynamicGradScaler
from megatron.optimizer.param_groups import UpdateRates
from tests.support.tiny import tiny_run

ALONE = ParallelContext.single()


def named() -> list[tuple[str, Parameter]]:
    pairs = [("a.weight", Parameter(torch.ones(2, 3))), ("a.bias", Parameter(torch.ones(3)))]
    for _, parameter in pairs:
        set_parameter_metadata(parameter, init=Init("ones"))
    return pairs


def config(**flags: object) -> object:
    return tiny_run("nowhere", fp64=False, **flags)


def test_stage_0_steps_by_our_own_optimizer() -> None:
    parameters = named()
    updates = updates_for(config(clip_grad=1.0), parameters, ALONE, stage=0)
    assert isinstance(updates, NativeUpdates)
    updates.begin(1, UpdateRates(0.1, 0.0))
    torch.autograd.backward([parameter.sum() for _, parameter in parameters])
    reduced, experts = updates.torch_optimizer.get_grads_for_reduction()  # type: ignore[attr-defined]
    assert experts == {}
    assert sum(float(tensor.sum()) for tensor in reduced) == 9
    updates.torch_optimizer.step()
    report = updates.outcome()
    assert report.applied
    assert report.grad_norm == pytest.approx(3.0)
    assert updates.scalars()["steps"] == 1
    # AdamW's first step is one learning rate, whatever the gradient.
    for _, parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full_like(parameter, 0.9))
    assert {tensor.name for tensor in updates.tensors(optimizer=True)} == {
        f"{what}/{name}"
        for what in ("model", "optimizer/exp_avg", "optimizer/exp_avg_sq")
        for name, _ in parameters
    }


def test_a_step_that_is_not_finite_is_told_to_deepspeed() -> None:
    parameters = named()
    updates = updates_for(config(), parameters, ALONE, stage=0)
    updates.begin(1, UpdateRates(0.1, 0.0))
    torch.autograd.backward([(parameter * torch.inf).sum() for _, parameter in parameters])
    updates.torch_optimizer.step()
    assert updates.torch_optimizer.overflow  # type: ignore[attr-defined]
    assert not updates.outcome().applied


def test_decay_is_decided_by_the_shape_of_the_whole_parameter() -> None:
    """At stage 3 a parameter that is not in use has no elements and one dimension."""
    parameters = named()
    for _, parameter in parameters:
        parameter.ds_shape = parameter.shape  # type: ignore[attr-defined]
        parameter.data = torch.empty(0)
    updates = updates_for(config(), parameters, ALONE, stage=3)
    assert isinstance(updates, ZeroUpdates)
    updates.begin(1, UpdateRates(0.1, 0.5))
    groups = updates.torch_optimizer.param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(0.1, 0.5), (0.1, 0.0)]
    assert [len(group["params"]) for group in groups] == [1, 1]
    assert (updates.loss_scale, updates.loss_factor) == (1.0, 1.0)


def test_narrow_state_is_refused_where_zero_keeps_it() -> None:
    narrow = config(exp_avg_dtype="bf16")
    with pytest.raises(ConfigError, match="ZeRO keeps the optimizer's state in fp32"):
        updates_for(narrow, named(), ALONE, stage=1)
    updates_for(narrow, named(), ALONE, stage=0)


def test_a_checkpoint_without_counts_is_refused() -> None:
    updates = updates_for(config(), named(), ALONE, stage=1)
    assert isinstance(updates, ZeroUpdates)

    class Shards:
        has_masters = True

        def refresh(self, *, masters: bool) -> None:
            assert not masters

    updates._shards = Shards()  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match="lacks the optimizer's number of updates"):
        updates.restored({}, optimizer=True)


def test_a_loss_scale_stands_still_while_deepspeed_steps() -> None:
    scaler = DynamicGradScaler(initial_scale=8.0, min_scale=1.0, growth_interval=1, hysteresis=1)

    held = FrozenLossScale(scaler, dynamic=True)
    held.update_scale(False)
    assert (held.cur_scale, held.loss_scale, held.dynamic) == (8.0, 8.0, True)
    assert held.scale_loss(torch.tensor(2.0)) == 16.0
    scaler.update(torch.tensor(False))
    assert held.cur_scale == 16.0


def test_cpu_adam_counts_its_steps_again() -> None:
    """Or its powers of beta, which it multiplies up, would be rounded otherwise after a resume."""

    class Compiled:
        def adam_update(self, number: int, step: int, lr: float, *rest: object) -> None:
            assert (number, lr, rest[:2]) == (7, 0.0, (0.9, 0.99))
            steps.append(step)

    class CPUAdam:
        opt_id, ds_opt_adam, defaults = 7, Compiled(), {"betas": (0.9, 0.99), "eps": 1e-8}

    steps: list[int] = []
    _replay_steps(CPUAdam(), 3)
    assert steps == [1, 2, 3]
