"""Tests of batches sent over a tp group."""

import pytest
import torch

from megatron.errors import DataError
from megatron.mpu.data import broadcast_batch
from tests.distributed.mpu.reference import build
from tests.support.ranks import run_on_ranks


def batches_arrive_whole() -> None:
    ctx = build(tp=2)
    seed = ctx.tp.ranks[0]
    batch = {
        "text": torch.arange(6).view(2, 3) + seed,
        "loss_mask": torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)),
        "labels": torch.arange(6).view(3, 2).t() * seed,  # strided
        "is_random": torch.tensor([True, False]),
        "empty": torch.empty(0, dtype=torch.int64),
    }
    received = broadcast_batch(batch if ctx.tp.is_first else None, ctx.tp)
    assert list(received) == list(batch)
    for key, tensor in batch.items():
        assert received[key].dtype == tensor.dtype
        assert torch.equal(received[key], tensor)
    assert broadcast_batch({} if ctx.tp.is_first else None, ctx.tp) == {}


def bad_batches_are_refused_on_every_rank() -> None:
    tp = build(tp=2).tp
    with pytest.raises(DataError, match="has none to send"):
        broadcast_batch(None, tp)
    bad = {"text": torch.zeros(1, dtype=torch.complex64)}
    with pytest.raises(DataError, match="dtype cannot be sent") as caught:
        broadcast_batch(bad if tp.is_first else None, tp)
    assert "text: torch.complex64" in str(caught.value.found)


def test_batches_arrive_whole() -> None:
    run_on_ranks(4, batches_arrive_whole)


def test_bad_batches_are_refused_on_every_rank() -> None:
    run_on_ranks(2, bad_batches_are_refused_on_every_rank)
