"""Dropout, and the addition of a residual after it, in one pass each way, without a stored mask.

The mask is a function of a seed, of the number of the row, and of the element's place in it:
Philox4x32-10 (Salmon et al. 2011, doi:10.1145/2063384.2063405), a generator without state. Backward
draws it again from seed and numbers, so that nothing else is saved. Reference and kernels, on every
device, drop the same elements; so does every rank that gives a row the same number.
Sums are computed in fp32 (fp64 of fp64) and rounded once.
"""

from typing import Any

import torch
from torch import Tensor

from megatron.ops.library import gradient_of, operator, shapes_of, statistics_dtype

_GRAIN = 16  # as `quarter_of` in csrc/ops/dropout_call.h
_MASK = 0xFFFFFFFF
_REDUCED = (torch.bfloat16, torch.float16)


def dropout_add(
    x: Tensor, residual: Tensor | None, probability: float, seed: Tensor, numbers: Tensor
) -> Tensor:
    """Return `x` with elements zeroed and the others scaled up, plus `residual` if there is one.

    The gradient of `x` is the same dropout of the gradient. A product with zero drops an element:
    what is not finite is not hidden.

    Args:
        residual: of the shape of `x`; of its dtype, or fp32 beside half precision.
        probability: that an element is dropped: in [0, 1), to 2^-32.
        seed: int64, one element, on the device of `x`.
        numbers: int64, likewise: one for each row, of as many rows as `x` divides into. Rows of one
            length, number and seed have one mask.

    Raises:
        ValueError: the probability, or a shape or a dtype, does not fit.
    """
    if not 0 <= probability < 1:
        raise ValueError(
            "a dropout probability is outside [0, 1)\n"
            f"  found: {probability}\n"
            "  fix: use a number from 0 up to, not including, 1"
        )
    fits = residual is None or (
        residual.shape == x.shape
        and (residual.dtype == x.dtype or (residual.dtype == torch.float32 and x.dtype in _REDUCED))
    )
    if residual is not None and not fits:
        raise ValueError(
            "a residual does not fit what is added to it\n"
            f"  found: {tuple(x.shape)} {x.dtype}; {tuple(residual.shape)} {residual.dtype}\n"
            "  fix: give both one shape, and one dtype or a residual in float32"
        )
    out: Tensor = torch.ops.megatron.dropout_add(x, residual, probability, seed, numbers)
    return out


def add_into(x: Tensor, residual: Tensor) -> Tensor:
    """Return `x` plus `residual`, in the memory of `x`, which must not be read afterwards.

    An `x` that autograd has saved is refused in the backward pass. In place of `Tensor.add_`, which
    does not take what a custom function returns as a view, as a linear layer does.
    """
    out: Tensor = _AddInto.apply(x, residual)  # type: ignore[no-untyped-call]  # torch's
    return out


class _AddInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor) -> Tensor:
        return x.detach().add_(residual)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, grad


def philox(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return the four random words of every counter, of four words, under a key of two.

    Words are int64 from 0 to 2^32 - 1.
    """
    first, second, third, fourth = counter
    low, high = key
    for _ in range(10):
        product, other = first * 0xD2511F53, third * 0xCD9E8D57  # modulo 2^64
        first, second, third, fourth = (
            (other >> 32 & _MASK) ^ second ^ low,
            other & _MASK,
            (product >> 32 & _MASK) ^ fourth ^ high,
            product & _MASK,
        )
        low, high = low + 0x9E3779B9 & _MASK, high + 0xBB67AE85 & _MASK
    return first, second, third, fourth


def is_kept(width: int, probability: float, seed: Tensor, numbers: Tensor) -> Tensor:
    """Return which of the `width` elements of rows with these numbers dropout keeps: [rows, width].

    Word q of the random words of counter (i, number) is of element q * quarter + i, where a quarter
    is a fourth of the width, rounded up to 16 elements.
    """
    quarter = _GRAIN * -(-width // (4 * _GRAIN))
    index = torch.arange(quarter, device=seed.device)
    number = numbers.reshape(-1, 1)
    none = torch.zeros_like(index)
    seed = seed.reshape(())
    key = seed & _MASK, seed >> 32 & _MASK
    words = philox((index, number & _MASK, number >> 32 & _MASK, none), key)
    return torch.cat(words, dim=1)[:, :width] >= int(probability * 2**32)


@operator(
    "dropout_add(Tensor x, Tensor? residual, float probability, Tensor seed, Tensor numbers)"
    " -> Tensor"
)
def dropout_add_reference(
    x: Tensor, residual: Tensor | None, probability: float, seed: Tensor, numbers: Tensor
) -> Tensor:
    """Return the dropout of `x`, plus the residual."""
    wide = x.to(statistics_dtype(x))
    rows = numbers.numel()
    kept = is_kept(x.numel() // max(rows, 1), probability, seed, numbers).view(x.shape)
    dropped = wide * (kept.to(wide.dtype) / (1 - probability))
    if residual is None:
        return dropped.to(x.dtype)
    return (residual.to(wide.dtype) + dropped).to(residual.dtype)


@shapes_of("dropout_add")
def _shapes(
    x: Tensor, residual: Tensor | None, probability: float, seed: Tensor, numbers: Tensor
) -> Tensor:
    return x.new_empty(x.shape, dtype=(x if residual is None else residual).dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, residual, ctx.probability, *names = inputs
    ctx.dtype, ctx.has_residual = x.dtype, residual is not None
    ctx.save_for_backward(*names)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_x = None
    if ctx.needs_input_grad[0]:
        of_x = grad.to(ctx.dtype)
        grad_x = torch.ops.megatron.dropout_add(of_x, None, ctx.probability, *ctx.saved_tensors)
    return grad_x, grad if ctx.has_residual else None, None, None, None


gradient_of("dropout_add", _backward, _save)
