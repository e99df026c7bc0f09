"""A copy of what a rank will write, in host memory that one save hands on to the next.

Pinned where a GPU copies into it. The copy is taken at once, so that training may go on; only one
copy exists at a time, and whoever writes it must be done before the next is taken.
"""

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor

from megatron import device
from megatron.checkpoint.sharded import GeneratorStates, Part, Snapshot

_ALIGNMENT = 64  # bytes; of any element type


class HostMemory:
    """Memory of the host for one copy, kept between copies and only ever made larger."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy_of(self, snapshot: Snapshot) -> Snapshot:
        """The same snapshot, of values that nobody else holds; complete on return."""
        sizes = [
            _padded(part.view.element_size() * part.view.numel())
            for tensor in snapshot.tensors
            for part in tensor.parts
        ]
        self._make_room(sum(sizes))
        at, tensors = 0, []
        for tensor in snapshot.tensors:
            parts = []
            for part in tensor.parts:
                values = self._at(at, part.view)
                values.copy_(part.view, non_blocking=True)
                parts.append(Part(part.box, values))
                at += _padded(part.view.element_size() * part.view.numel())
            tensors.append(replace(tensor, parts=tuple(parts), padding=()))
        device.synchronize()
        return replace(
            snapshot,
            tensors=tuple(tensors),
            generators=_copied(snapshot.generators),
            progress=copy.deepcopy(dict(snapshot.progress)),
            scalars=copy.deepcopy(dict(snapshot.scalars)),
        )

    def _make_room(self, size: int) -> None:
        if self._bytes.numel() < size:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # the old memory goes first
            pinned = device.current().type == "cuda"
            self._bytes = torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def _at(self, start: int, like: Tensor) -> Tensor:
        size = like.element_size() * math.prod(like.shape)
        return self._bytes[start : start + size].view(like.dtype).view(like.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _copied(states: GeneratorStates | None) -> GeneratorStates | None:
    if states is None:
        return None
    tensors = {name: tensor.clone() for name, tensor in states.tensors.items()}
    return GeneratorStates(tensors, copy.deepcopy(dict(states.values)))
