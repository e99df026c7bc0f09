"""Counts the bytes of tensors that are alive: what a pass or a step really keeps."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Remembers every storage that an operation inside made, without keeping it alive.

    Args:
        apart_from: tensors whose storages do not count, nor views of them (the weights).
    """

    def __init__(self, apart_from: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._passed_over = {tensor.untyped_storage().data_ptr() for tensor in apart_from}
        self._made: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._passed_over:
                    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._made[reference.cdata] = reference
        return result

    @property
    def count(self) -> int:
        """Bytes of the storages that are still there, at their present sizes."""
        size = 0
        for key in list(self._made):
            storage = torch.UntypedStorage._new_with_weak_ptr(key)
            if storage is None:
                del self._made[key]
            else:
                size += storage.nbytes()
        return size


class PeakBytes(LiveBytes):  # type: ignore[no-untyped-call]
    """The most bytes that were alive after any operation."""

    peak = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.peak = max(self.peak, self.count)
        return result
