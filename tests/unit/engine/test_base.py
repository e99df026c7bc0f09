"""The values that cross the seam between loop and engine."""

from megatron.engine.base import EvaluationSum, StepReport


def test_an_evaluation_is_a_mean_over_tokens() -> None:
    assert EvaluationSum(total=30.0, tokens=12).mean == 2.5


def test_the_mean_of_several_losses_is_the_sum_of_their_means() -> None:
    both = EvaluationSum(6.0, 3, (EvaluationSum(2.0, 4),))
    assert both.means == (2.0, 0.5)
    assert both.mean == 2.5
    assert StepReport(2.5, 1.0, means=both.means).each_loss == (2.0, 0.5)
    assert StepReport(2.5, 1.0).each_loss == (2.5,)
