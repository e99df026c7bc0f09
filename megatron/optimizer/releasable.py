"""Flat tensors whose memory is given back while nothing needs what is in them."""

import torch
from torch import Tensor


class ReleasableTensor:
    """A flat tensor that has memory from `take` to `release`, and none at first.

    Views of `tensor` stay views of it, also those that autograd has saved; after the next `take`
    they show what is written then. Whoever reads one that has no memory ends the process.
    """

    def __init__(self, elements: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor: Tensor = torch.empty(elements, dtype=dtype, device=device)
        self._storage = self.tensor.untyped_storage()
        self._bytes = self._storage.nbytes()
        self.release()

    @property
    def is_taken(self) -> bool:
        """Whether it has memory."""
        return self._storage.nbytes() == self._bytes

    def take(self) -> None:
        """Give it memory, with any content, if it has none."""
        if not self.is_taken:
            self._storage.resize_(self._bytes)

    def release(self) -> None:
        """Give its memory back."""
        self._storage.resize_(0)
