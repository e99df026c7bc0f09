"""On one rank it is argmax without the padding."""

import torch

from megatron.mpu.argmax import vocab_parallel_argmax
from megatron.mpu.context import ParallelContext


def test_padding_is_never_chosen() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 9.0], [0.0, -1.0, -2.0, 9.0]])
    found = vocab_parallel_argmax(logits, ctx=ParallelContext.single(), true_vocab_size=3)
    assert found.tolist() == [1, 0]
    assert found.dtype == torch.int64
