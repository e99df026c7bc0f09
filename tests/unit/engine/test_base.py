"""The values that cross the seam between loop and engine."""

from megatron.engine.base import EvaluationSum


def test_an_evaluation_is_a_mean_over_tokens() -> None:
    assert EvaluationSum(total=30.0, tokens=12).mean == 2.5
