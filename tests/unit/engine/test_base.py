"""The values that cross the seam between loop and engine."""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from megatron.data.data_samplers import MegatronPretrainingSampler
from megatron.engine.base import EvaluationSum, StepPlan, StepReport
from megatron.errors import ConfigError
from megatron.mpu.context import Group
from pretrain_gpt import gpt_task


def test_an_evaluation_is_a_mean_over_tokens() -> None:
    assert EvaluationSum(total=30.0, tokens=12).mean == 2.5


def test_the_mean_of_several_losses_is_the_sum_of_their_means() -> None:
    both = EvaluationSum(6.0, 3, (EvaluationSum(2.0, 4),))
    assert both.means == (2.0, 0.5)
    assert both.mean == 2.5
    assert StepReport(2.5, 1.0, means=both.means).each_loss == (2.0, 0.5)
    assert StepReport(2.5, 1.0).each_loss == (2.5,)


def test_samples_of_micro_batches_are_those_that_samplers_share_out() -> None:
    plan = StepPlan(2, 12, 0.1, 0.0, 16, first_sample=24)
    for replica in range(3):
        sampler = MegatronPretrainingSampler(
            total_samples=99,
            consumed_samples=24,
            micro_batch_size=2,
            data_parallel_rank=replica,
            data_parallel_size=3,
        )
        found = [plan.samples(at, Group((0, 1, 2), replica)) for at in range(2)]
        numbers = [list(range(first, first + size)) for first, size, *_ in found]
        assert numbers == list(itertools.islice(sampler, 2))


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        ({"loss": lambda carry, labels: None}, "loss is called with (last carry, labels, build)"),
        ({"datasets": ("train", "valid", "test")}, "datasets is tuple, not a function of (request"),
        ({"batch": partial(lambda raw, options: None, 1)}, "batch is called with (raw batch, opt"),
        ({"counted": None}, "counted is NoneType"),
        ({"name": ""}, "name is no text"),
        ({"reads": "gpt"}, "reads is str, not ProgramData"),
        ({"losses": "lm loss"}, "losses is 'lm loss', not a tuple of names"),
        ({"losses": ()}, "losses names none"),
    ],
)
def test_a_part_in_the_place_of_another_is_named(parts: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match="not what its place asks for") as caught:
        replace(gpt_task(), **parts)
    assert found in caught.value.found
    assert "by its name" in caught.value.fix


def test_all_parts_that_were_exchanged_are_named_at_once_and_more_arguments_do_no_harm() -> None:
    task = gpt_task()
    with pytest.raises(ConfigError) as caught:
        replace(task, layers=task.loss, loss=task.layers)
    assert "layers is called with" in caught.value.found
    assert "loss is called with" in caught.value.found
    replace(task, layers=lambda config, build, more=None: (), batch=lambda *all_of_them: None)
