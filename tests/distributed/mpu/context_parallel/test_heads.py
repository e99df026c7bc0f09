"""The exchange of tokens for heads: a permutation, with its inverse as its gradient."""

import pytest
import torch
import torch.distributed as dist

from megatron.mpu.context_parallel.heads import (
    copies_of_keys,
    heads_to_tokens,
    tokens_to_heads,
)
from megatron.mpu.context_parallel.shares import SequenceShare
from tests.distributed.mpu.reference import build, sample
from tests.support.ranks import run_on_ranks


def tokens_are_exchanged_for_heads(groups: int) -> None:
    group = build(cp=dist.get_world_size()).cp
    share = SequenceShare(group.rank, group.size)
    length, heads, copies = 3 * group.size, 8, copies_of_keys(8, groups, group.size)
    q, k, v = (sample(2, n, length, 4, seed=n + at) for at, n in enumerate((heads, groups, groups)))
    own = [share.take(t, 2).clone().requires_grad_() for t in (q, k, v)]
    met = tokens_to_heads(*own, group)
    repeated = [t.repeat_interleave(n, 1) for t, n in ((q, 1), (k, copies), (v, copies))]
    wanted = [t.chunk(group.size, 1)[group.rank] for t in repeated]
    for found, expected in zip(met, wanted):
        assert torch.equal(found, expected)
    # Neighbouring queries still meet the keys of their group.
    assert met[0].shape[1] % met[1].shape[1] == 0
    back = heads_to_tokens(met[0], group)
    assert torch.equal(back, own[0])
    # The gradient of each is the other, and copies of keys are summed.
    grads = [sample(*t.shape, seed=50 + group.rank) for t in met]
    of_q, of_k, _ = torch.autograd.grad(met, own, grads)
    assert torch.equal(of_q, heads_to_tokens(grads[0], group))
    summed = heads_to_tokens(grads[1], group).unflatten(1, (groups, copies)).sum(2)
    torch.testing.assert_close(of_k, summed, rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("groups", [1, 2, 8])
def test_tokens_are_exchanged_for_heads(groups: int) -> None:
    run_on_ranks(4, tokens_are_exchanged_for_heads, groups)


@pytest.mark.parametrize(
    ("heads", "groups", "ranks", "copies"),
    [(8, 8, 4, 1), (8, 2, 4, 2), (8, 1, 4, 4), (12, 2, 3, 3), (12, 2, 4, 2), (24, 4, 6, 3)],
)
def test_keys_are_repeated_as_little_as_ranks_need(
    heads: int, groups: int, ranks: int, copies: int
) -> None:
    assert copies_of_keys(heads, groups, ranks) == copies
    assert (groups * copies) % ranks == 0
    assert heads % (groups * copies) == 0
