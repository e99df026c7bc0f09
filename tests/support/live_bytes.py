"""Counts the bytes of tensors that are alive: what a forward pass really keeps for its backward."""

from collections.abc import Iterable
from typing import Any

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
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._passed_over:
                    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._made[reference.cdata] = (reference, storage.nbytes())
        return result

    @property
    def count(self) -> int:
        """Bytes of the storages that are still there."""
        held = (
            size
            for reference, size in self._made.values()
            if not reference.expired()  # type: ignore[no-untyped-call]
        )
        return sum(held)
