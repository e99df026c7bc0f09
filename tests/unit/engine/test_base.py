"""The values that cross the seam between loop and engine."""

import itertools

from megatron.data.data_samplers import MegatronPretrainingSampler
from megatron.engine.base import EvaluationSum, StepPlan, StepReport
from megatron.mpu.context import Group


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
        numbers = [list(range(first, first + size)) for first, size in found]
        assert numbers == list(itertools.islice(sampler, 2))
