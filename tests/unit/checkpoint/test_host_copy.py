"""The copy that is written beside the training: equal, nobody else's, in memory that is reused."""

import torch

from megatron.checkpoint.formats.sharded import ShardedFormat
from megatron.checkpoint.host_copy import HostMemory
from tests.unit.checkpoint.toy import rank_at, snapshot_at


def values(snapshot):
    return [
        (tensor.name, part.box, part.view.dtype, part.view.clone())
        for tensor in snapshot.tensors
        for part in tensor.parts
    ]


def equal(one, other):
    return len(one) == len(other) and all(
        a[:3] == b[:3] and torch.equal(a[3], b[3]) for a, b in zip(one, other)
    )


def test_a_copy_is_equal_and_does_not_follow_the_original():
    given = snapshot_at(2, 2, 3, seed=1)
    kept = values(given)
    copied = HostMemory().copy_of(given)
    assert equal(values(copied), kept)
    for tensor in given.tensors:
        for part in tensor.parts:
            part.view.zero_()
    given.generators.tensors["cpu"].zero_()
    assert equal(values(copied), kept)
    assert copied.generators.tensors["cpu"].tolist() == [3] * 5
    assert (copied.progress, copied.config) == (given.progress, given.config)


def test_memory_is_made_once_and_only_grows():
    memory = HostMemory()
    small, large = snapshot_at(2, 2, 0, seed=1), snapshot_at(1, 1, 0, seed=2)
    memory.copy_of(small)
    first = memory._bytes.data_ptr()
    memory.copy_of(small)
    assert memory._bytes.data_ptr() == first
    copied = memory.copy_of(large)
    size = memory._bytes.numel()
    assert equal(values(copied), values(large))
    memory.copy_of(small)
    assert memory._bytes.numel() == size


def test_a_rank_copies_what_it_writes_and_no_more():
    form = ShardedFormat()
    snapshots = [snapshot_at(1, 2, rank, seed=1) for rank in range(2)]
    plan = form.plan_write([form.describe(snapshot) for snapshot in snapshots])
    shares = [form.share(snapshot, plan, rank=rank) for rank, snapshot in enumerate(snapshots)]
    held = [[(name, box) for name, box, *_ in values(share)] for share in shares]
    assert not set(held[0]) & set(held[1]), "no replica twice"
    together = {name for name, _ in held[0] + held[1]}
    assert together == {tensor.name for tensor in rank_at(1, 1, 0).tensors}
    assert shares[0].generators is snapshots[0].generators
