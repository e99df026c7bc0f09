"""Keeps what autograd saves for backward in host memory until it is needed.

Whole storages are copied, once each however many views of them are saved, and views are made again
with their own strides: the numbers and the kernels of backward are those without offloading. On a
CPU the copies are real copies too, so that every test of it tests the same code.
"""

from collections.abc import Iterable
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.device import HostCopy

Packed: TypeAlias = "Tensor | _View"  # the form in which a graph stores a tensor


class Offload:
    """A context in which tensors saved for backward go to host memory.

    Args:
        keep: tensors that stay where they are, with all views of them (the weights).
    """

    def __init__(self, keep: Iterable[Tensor] = ()) -> None:
        # By the storage itself: that of a sharded parameter has memory only for a time.
        self._kept = frozenset(tensor.untyped_storage()._cdata for tensor in keep)
        # By the address of the storage's own record, which its weak reference keeps from reuse.
        self._stored: dict[tuple[int, int], tuple[StorageWeakRef, _Stored]] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def __enter__(self) -> "Offload":
        self._hooks.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._stored.clear()  # from here on only the graph keeps the copies

    @torch.no_grad()
    def pack(self, tensor: Tensor) -> Packed:
        """Return what the graph stores of a tensor: itself, or a view of its copy on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._kept or storage.nbytes() == 0:
            return tensor
        reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        key = (reference.cdata, tensor._version)
        stored = self._stored.get(key)
        if stored is None:
            stored = (reference, _Stored(tensor))
            self._stored[key] = stored
        stored[1].views += 1
        return _View(stored[1], tensor)

    @staticmethod
    @torch.no_grad()
    def unpack(packed: Packed) -> Tensor:
        """Return the tensor that was packed, bit for bit and stride for stride."""
        return packed.tensor() if isinstance(packed, _View) else packed


class _Stored:
    """A storage in host memory, brought back to its device by its first view until its last."""

    def __init__(self, tensor: Tensor) -> None:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self._copy = HostCopy(whole.set_(tensor.untyped_storage()))
        self._back: Tensor | None = None
        self.views = 0

    def back(self) -> Tensor:
        """Return all bytes of the storage, on the device."""
        whole = self._copy.back() if self._back is None else self._back
        self.views -= 1
        self._back = whole if self.views > 0 else None
        return whole


class _View:
    """The part of a stored storage that a saved tensor used."""

    def __init__(self, stored: _Stored, tensor: Tensor) -> None:
        self._stored, self._dtype = stored, tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()

    def tensor(self) -> Tensor:
        """Return the tensor again, with its own memory."""
        whole = self._stored.back()
        made = torch.empty(0, dtype=self._dtype, device=whole.device)
        return made.set_(whole.untyped_storage(), self._offset, self._size, self._stride)
