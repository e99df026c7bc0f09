"""Sends a batch from the first of the ranks that take the same samples to the others.

Only that rank reads data; the others would read the same samples. Batches go from host memory to
host memory: a receiver has to know shapes, and through a device it would wait for them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron import device
from megatron.errors import DataError
from megatron.mpu.collectives import broadcast, broadcast_object
from megatron.mpu.context import Group

_DTYPES = {
    str(dtype): dtype
    for dtype in (
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )
}


class _Entry(NamedTuple):
    """The header of one tensor, from which a rank allocates it."""

    key: str
    shape: tuple[int, ...]
    dtype: str


def broadcast_batch(batch: dict[str, Tensor] | None, group: Group) -> dict[str, Tensor]:
    """Broadcast the batch of the first rank of `group`, to host memory of every rank.

    A header with keys, shapes and dtypes goes first, then one message per dtype. The `batch` of the
    other ranks is ignored and may be None.

    Args:
        group: one that sends tensors of the host (`ParallelContext.host_tp_cp`).

    Raises:
        DataError: the first rank has no batch, or one with a dtype that cannot be sent. It is
            raised on every rank, so that none waits for the others.
    """
    entries = None if batch is None else [_entry(key, tensor) for key, tensor in batch.items()]
    header: list[_Entry] | None = broadcast_object(entries, group)
    if header is None:
        raise DataError(
            "the rank that reads a batch has none to send",
            found=f"global rank {group.ranks[0]}",
            fix="pass the batch on the first rank of the group; the others may pass None",
        )
    unknown = [f"{entry.key}: {entry.dtype}" for entry in header if entry.dtype not in _DTYPES]
    if unknown:
        raise DataError(
            "a batch holds what is no tensor, or one whose dtype cannot be sent",
            found=", ".join(unknown),
            fix=f"use tensors of {', '.join(_DTYPES)}",
        )
    if group.size == 1 and batch is not None:
        return batch
    received: dict[str, Tensor] = {}
    for dtype in dict.fromkeys(entry.dtype for entry in header):
        same = [entry for entry in header if entry.dtype == dtype]
        received.update(_broadcast_same_dtype(batch if group.is_first else None, same, group))
    return {entry.key: received[entry.key] for entry in header}


def _entry(key: str, value: object) -> _Entry:
    if not isinstance(value, Tensor):
        return _Entry(key, (), type(value).__name__)
    return _Entry(key, tuple(value.shape), str(value.dtype))


def _broadcast_same_dtype(
    batch: dict[str, Tensor] | None, entries: list[_Entry], group: Group
) -> dict[str, Tensor]:
    sizes = [torch.Size(entry.shape).numel() for entry in entries]
    flat = device.host_empty(sum(sizes), _DTYPES[entries[0].dtype])
    if batch is not None:
        torch.cat([batch[entry.key].reshape(-1) for entry in entries], out=flat)
    parts = torch.split(broadcast(flat, group), sizes)
    return {entry.key: part.view(entry.shape) for entry, part in zip(entries, parts)}
