"""The values that cross the seam between loop and engine."""

import torch

from megatron import device
from megatron.engine.base import EvaluationSum, StepReport, on_device


def test_an_evaluation_is_a_mean_over_tokens() -> None:
    assert EvaluationSum(total=30.0, tokens=12).mean == 2.5


def test_the_mean_of_several_losses_is_the_sum_of_their_means() -> None:
    both = EvaluationSum(6.0, 3, (EvaluationSum(2.0, 4),))
    assert both.means == (2.0, 0.5)
    assert both.mean == 2.5
    assert StepReport(2.5, 1.0, means=both.means).each_loss == (2.0, 0.5)
    assert StepReport(2.5, 1.0).each_loss == (2.5,)


def test_a_raw_batch_keeps_its_names_and_values_where_it_goes() -> None:
    raw = {"text": torch.arange(4), "labels": torch.ones(2)}
    moved = on_device(raw)
    assert list(moved) == list(raw)
    assert all(moved[name].device == device.current() for name in raw)
    assert all(torch.equal(moved[name].cpu(), raw[name]) for name in raw)
