"""Tests of batches in a process that runs alone."""

import pytest
import torch

from megatron.errors import DataError
from megatron.mpu.context import ParallelContext
from megatron.mpu.data import broadcast_batch

ALONE = ParallelContext.single().tp


def test_a_lone_process_keeps_its_batch() -> None:
    batch = {"text": torch.arange(3)}
    assert broadcast_batch(batch, ALONE) is batch


def test_a_missing_batch_is_refused() -> None:
    with pytest.raises(DataError, match="the rank that reads a batch has none"):
        broadcast_batch(None, ALONE)


def test_a_lone_process_refuses_what_several_would() -> None:
    bad = {"text": torch.zeros(2, dtype=torch.complex64), "names": ["a", "b"]}
    with pytest.raises(DataError, match="no tensor, or one whose dtype cannot be sent") as caught:
        broadcast_batch(bad, ALONE)  # type: ignore[arg-type]
    assert caught.value.found == "text: torch.complex64, names: list"
