"""The two passes of a cross entropy make PyTorch's; the law of kernels is in tests/laws/kernels."""

import pytest
import torch
import torch.nn.functional as F

from megatron.ops.cross_entropy import cross_entropy_gradient_, cross_entropy_statistics


def test_both_passes_make_the_cross_entropy_of_pytorch():
    logits = torch.randn(4, 9, dtype=torch.float64, requires_grad=True)
    labels, factor = torch.tensor([0, 8, 3, 5]), torch.rand(4, dtype=torch.float64)
    largest, total, target = cross_entropy_statistics(logits.detach(), labels, 9)
    expected = F.cross_entropy(logits, labels, reduction="none")
    losses = total.log() - (target - largest)
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-14, atol=1e-14)
    (expected * factor).sum().backward()
    written = logits.detach().clone()
    given = {"shift": largest, "scale": factor / total, "at_label": factor}
    made = cross_entropy_gradient_(written, labels, **given, true_width=9)
    assert made is written
    torch.testing.assert_close(written, logits.grad, rtol=1e-14, atol=1e-14)


def test_operands_that_do_not_fit_are_refused_with_their_shapes():
    logits, labels = torch.zeros(4, 9), torch.zeros(4, dtype=torch.int64)
    for wrong in (logits[0], logits.t(), torch.zeros(5, 9)):
        with pytest.raises(ValueError, match="do not fit the logits"):
            cross_entropy_statistics(wrong, labels, 4)
    with pytest.raises(ValueError, match=r"\(4, 9\) torch.float32, of which 10 columns are true"):
        cross_entropy_statistics(logits, labels, 10)
    with pytest.raises(ValueError, match=r"\(4,\) torch.int32"):
        cross_entropy_statistics(logits, labels.int(), 9)
    factor = torch.ones(4)
    for name in ("shift", "scale", "at_label"):
        given = dict.fromkeys(("shift", "scale", "at_label"), factor) | {name: factor.double()}
        with pytest.raises(ValueError, match=r"\(4,\) torch.float64"):
            cross_entropy_gradient_(logits, labels, **given, true_width=9)
