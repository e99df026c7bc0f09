"""The loss as a pipeline calls it, and the one sum of what stages share, without DeepSpeed."""

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from megatron.config.parallel import ParallelConfig, PipelineSchedule
from megatron.engine.deepspeed.pipeline import (
    TiedGradients,
    TokenLoss,
    _as_main_grad,
    _refuse_what_deepspeed_cannot,
)
from megatron.errors import ConfigError
from megatron.model.losses import LossSum
from megatron.model.specs import LayerSpec
from megatron.model.stage import PipelineStage
from megatron.model_build import model_build
from megatron.mpu.context import ParallelContext
from megatron.pipeline.plan import pipeline_plan
from pretrain_gpt import gpt_task
from tests.support.tiny import tiny_run
from tests.unit.engine.engines import runtime_of


def loss_of() -> TokenLoss:
    """A loss that sums its carry, and counts 4 tokens each time."""
    task = dataclasses.replace(
        gpt_task(),
        loss=lambda carry, labels, build: LossSum(
            carry[0].sum(0), torch.full(labels[0].shape, 4.0)
        ),
    )
    return TokenLoss(task, model_build(runtime_of(tiny_run("nowhere"))))


def test_a_loss_is_multiplied_and_its_sums_are_kept() -> None:
    loss = loss_of()
    hidden = torch.tensor([1.0, 2.0], requires_grad=True)
    with loss.multiplied_by(torch.tensor([0.5], dtype=torch.float64)) as sums:
        result = loss((hidden,), (torch.zeros(()),))
        loss((hidden * 10,), (torch.zeros(()),))
    assert result.dtype == torch.float32
    assert float(result.detach()) == 1.5
    assert [each.tolist() for each in sums] == [[3.0, 4.0], [30.0, 4.0]]
    assert not any(each.requires_grad for each in sums)


def test_each_of_several_losses_has_its_own_factor() -> None:
    loss = loss_of()
    carry = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    with loss.multiplied_by(torch.tensor([1.0, 10.0], dtype=torch.float64)) as sums:
        result = loss((carry,), (torch.zeros(2),))
    assert float(result) == 4.0 + 60.0
    assert sums[0].tolist() == [[4.0, 6.0], [4.0, 4.0]]


def test_something_else_is_read_off_the_carry_for_a_while() -> None:
    loss = loss_of()
    carry = torch.tensor([1.0, 2.0])
    with loss.replaced_by(lambda carry, labels: LossSum(carry[0], labels[0])) as found:
        one_number = loss((carry,), (torch.zeros(2),))
    assert one_number.shape == ()  # which is all that DeepSpeed takes for a loss
    assert [each.tolist() for each in found] == [[[1.0, 2.0], [0.0, 0.0]]]
    with loss.multiplied_by(torch.ones(1)) as sums:
        loss((carry,), (torch.zeros(()),))
    assert sums[0].tolist() == [3.0, 4.0]
    assert len(found) == 1


def test_gradients_are_lent_to_our_own_code_for_a_while() -> None:
    one, other = Parameter(torch.zeros(1)), Parameter(torch.zeros(1))
    own = torch.ones(1)
    vars(one)["main_grad"] = own
    lent = torch.full((1,), 2.0)
    with _as_main_grad({one: own, other: lent}):
        assert vars(other)["main_grad"] is lent
    assert vars(one)["main_grad"] is own
    assert "main_grad" not in vars(other)


def test_one_stage_shares_nothing() -> None:
    build = partial(nn.Linear, 2, 2)
    stage = PipelineStage([LayerSpec("a", build, tied="a"), LayerSpec("a", build, tied="a")])
    tied = TiedGradients(stage, ParallelContext.single())
    tied(lambda parameter: pytest.fail("nobody else holds it"))
    tied.check_equal()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"num_virtual_stages_per_pipeline_rank": 2}, "has one part of the model on each rank"),
        ({"pipeline_schedule": PipelineSchedule.ZERO_BUBBLE}, "works in one order only"),
    ],
)
def test_what_its_pipeline_cannot_do_is_refused(flags: dict[str, object], problem: str) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, **flags)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=problem):
        _refuse_what_deepspeed_cannot(pipeline_plan(parallel, 4))


def test_its_own_order_is_allowed() -> None:
    _refuse_what_deepspeed_cannot(pipeline_plan(ParallelConfig(pipeline_model_parallel_size=2), 4))
