"""The copy that is written in the background: equal, independent, in memory that is reused."""

import errno
import mmap
import threading

import pytest
import torch

from megatron.checkpoint.files.durable import CANCELLED
from megatron.checkpoint.formats.native import sharded
from megatron.checkpoint.save import host_copy
from megatron.checkpoint.save.host_copy import HostMemory, copied_bytes, memory_taken
from megatron.checkpoint.sharded import ShardedTensor, Snapshot
from megatron.errors import MachineError
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
    snapshots = [snapshot_at(1, 2, rank, seed=1) for rank in range(2)]
    plan = sharded.plan_write([sharded.describe(snapshot) for snapshot in snapshots])
    shares = [sharded.share(snapshot, plan, rank=rank) for rank, snapshot in enumerate(snapshots)]
    held = [[(name, box) for name, box, *_ in values(share)] for share in shares]
    assert not set(held[0]) & set(held[1]), "no replica twice"
    together = {name for name, _ in held[0] + held[1]}
    assert together == {tensor.name for tensor in rank_at(1, 1, 0).tensors}
    assert shares[0].generators is snapshots[0].generators


def test_memory_that_was_made_before_is_what_a_copy_goes_to():
    given, memory = snapshot_at(1, 1, 0, seed=1), HostMemory()
    memory.make_room(copied_bytes(given))
    made = memory._bytes.data_ptr()
    assert memory._bytes.numel() == copied_bytes(given)
    copied = memory.copy_of(given)
    assert memory._bytes.data_ptr() == made
    assert equal(values(copied), values(given))


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_copy_the_same(monkeypatch, threads):
    monkeypatch.setattr(host_copy, "_BLOCK_BYTES", 64)
    tensors = [
        torch.randn(50, 7),
        torch.randn(7, 50).T,  # strided
        torch.randn(1, 1000).bfloat16(),  # one row that is larger than a block
        torch.tensor(3.0),
        torch.zeros(0, 4),
    ]
    given = Snapshot(
        tuple(ShardedTensor.of(f"model/{i}", one) for i, one in enumerate(tensors)),
        progress={},
        config={},
    )
    memory = HostMemory()
    memory.threads = threads
    assert equal(values(memory.copy_of(given)), values(given))
    assert not [t for t in threading.enumerate() if t.name.startswith("checkpoint")]


def test_a_copy_that_fails_in_a_thread_is_an_error(monkeypatch):
    monkeypatch.setattr(host_copy, "_BLOCK_BYTES", 64)
    given = torch.zeros(100)
    with pytest.raises(RuntimeError), host_copy._Copies(2) as copies:
        copies.take(torch.zeros(100, 2), given)


def test_a_system_that_gives_no_memory_is_said(monkeypatch):
    def refuse(*given, **flags):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    memory = HostMemory()
    with pytest.raises(MachineError, match="gives no host memory for the copy") as caught:
        memory.make_room(12_345)
    assert "12,345 bytes wanted" in str(caught.value)
    assert "drop --async-save" in str(caught.value)
    assert memory._bytes.numel() == 0


def test_a_kernel_without_large_pages_gives_small_ones(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12_345)
    memory = HostMemory()
    memory.make_room(10_000)
    assert memory._bytes.numel() == 10_000
    assert not memory._bytes.any()


def test_memory_that_is_no_longer_wanted_is_not_touched_on():
    cancelled = threading.Event()
    cancelled.set()
    token = CANCELLED.set(cancelled)
    try:
        with pytest.raises(OSError, match="canceled"):
            HostMemory().make_room(10_000)
    finally:
        CANCELLED.reset(token)


def test_pinned_memory_is_counted_as_torch_takes_it(monkeypatch):
    assert [memory_taken(size) for size in (0, 1, 5, 8)] == [0, 1, 5, 8]
    monkeypatch.setattr(host_copy.device, "current", lambda: torch.device("cuda", 0))
    assert [memory_taken(size) for size in (0, 1, 5, 8, 9)] == [0, 1, 8, 8, 16]
