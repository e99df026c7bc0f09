"""The likeliest token over a split vocabulary is that of the whole one."""

import pytest
import torch

from megatron.mpu.argmax import vocab_parallel_argmax
from tests.distributed.mpu.reference import build, sample
from tests.support.ranks import run_on_ranks

PADDED = 16


def equals_torchs(tp: int) -> None:
    ctx = build(tp)
    for true in (16, 13, 3):  # 3: at tp = 2 and 4 some ranks hold nothing but padding
        whole = sample(6, 2, PADDED, seed=true)
        whole[..., true:] = 100.0  # padding has no effect
        whole[0, 0, :true] = 7.0  # all equal: the lowest
        own = whole.chunk(tp, -1)[ctx.tp.rank]
        found = vocab_parallel_argmax(own, ctx=ctx, true_vocab_size=true)
        assert torch.equal(found, whole[..., :true].argmax(-1))


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_agree_on_the_likeliest_token(tp: int) -> None:
    run_on_ranks(tp, equals_torchs, tp)
