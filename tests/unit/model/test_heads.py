"""The untied head."""

import torch

from megatron.model.heads import OutputLayer
from megatron.model.init import initialize_parameters
from megatron.mpu.context import ParallelContext
from tests.support.models import tiny_build, tiny_config


def test_the_head_scores_the_padded_vocabulary_without_a_bias() -> None:
    head = OutputLayer(tiny_config(), tiny_build())
    initialize_parameters(head, seed=1, ctx=ParallelContext.single())
    hidden = torch.randn(3, 2, 16, dtype=torch.float64)
    (logits,) = head.logits((hidden,))
    assert head.bias is None
    torch.testing.assert_close(logits, hidden @ head.weight.T, rtol=1e-12, atol=1e-12)
    assert logits.shape == (3, 2, 56)


def test_padding_rows_start_as_zeros() -> None:
    head = OutputLayer(tiny_config(), tiny_build())
    initialize_parameters(head, seed=1, ctx=ParallelContext.single())
    assert not head.weight[50:].any()
    assert head.weight[:50].any(dim=1).all()
