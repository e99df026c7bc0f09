"""What `torch.autograd.Function` hands from forward to backward, with types.

A function that keeps more than tensors declares it in a subclass of `FunctionContext`. These
classes are for annotations: torch makes the contexts itself.
"""

from torch import Tensor
from torch.autograd.function import FunctionCtx


class FunctionContext(FunctionCtx):
    """The first argument of forward and backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
