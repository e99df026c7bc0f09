"""Shapes and dtypes of a message between stages, from which its receiver allocates it.

A receiver learns it from a header of fixed size, once for each kind of micro-batch: later messages
of that kind must look the same, and their sender checks it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.errors import MegatronError

HEADER_NUMBERS = 128
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


class TensorSignature(NamedTuple):
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool  # whether a gradient comes back for it

    def room(self, device: torch.device) -> Tensor:
        """Return an uninitialised tensor of this signature."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}{' with gradient' if self.needs_grad else ''}"


Signature = tuple[TensorSignature, ...]


def header_into(virtual_stage: int) -> str:
    """Return what the numbers of the header of a message into a virtual stage are called."""
    return f"header of a message into virtual stage {virtual_stage}"


def signature_of(carry: Sequence[Tensor]) -> Signature:
    """Return the signature of the tensors of a carry."""
    return tuple(
        TensorSignature(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in carry
    )


def format_signature(signature: Signature) -> str:
    """Return a signature as text for a message to the user."""
    return ", ".join(map(str, signature)) or "nothing"


def encode_signature(signature: Signature) -> list[int]:
    """Return `HEADER_NUMBERS` numbers that encode the signature of a message.

    Raises:
        MegatronError: more or larger tensors than a header can describe, or a strange dtype.
    """
    numbers = [len(signature)]
    for shape, dtype, needs_grad in signature:
        if dtype not in _DTYPES:
            raise _unfit(signature)
        numbers += [_DTYPES.index(dtype), int(needs_grad), len(shape), *shape]
    if len(numbers) > HEADER_NUMBERS:
        raise _unfit(signature)
    return numbers + [0] * (HEADER_NUMBERS - len(numbers))


def decode_signature(numbers: Sequence[int]) -> Signature:
    """Return the signature that `encode_signature` turned into these numbers."""
    found, at = [], 1
    for _ in range(numbers[0]):
        dtype, needs_grad, dims = numbers[at : at + 3]
        shape = tuple(numbers[at + 3 : at + 3 + dims])
        found.append(TensorSignature(shape, _DTYPES[dtype], bool(needs_grad)))
        at += 3 + dims
    return tuple(found)


def _unfit(signature: Signature) -> MegatronError:
    return MegatronError(
        "a layer hands over more tensors than the header of a message between stages can describe",
        found=format_signature(signature),
        fix=f"hand over fewer tensors (a header has {HEADER_NUMBERS} numbers), of plain dtypes",
    )
