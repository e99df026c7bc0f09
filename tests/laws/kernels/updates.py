"""AdamW as the law of kernels sees it: how exact the results of a step have to be."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.ops.adamw import adamw_step_reference, join_halves, split_halves

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
# Of the weight, its gradient, both moving averages, and the weight that is published.
DTYPES = (
    (F32, F32, F32, F32, None),
    (F32, F32, BF16, F32, BF16),
    (F32, BF16, F32, BF16, BF16),
    (F32, F16, F32, F32, F16),
    (F32, BF16, BF16, BF16, F16),
    (F64, F64, F64, F64, None),
    (F64, F64, BF16, BF16, None),
)
# Those of which weights may be split.
SPLIT_DTYPES = tuple(dtypes for dtypes in DTYPES if dtypes[-1] is BF16)
SIZES = (0, 1, 7, 31, 64, 4095, 4096, 4097, 9000)
# rate, beta1, beta2, epsilon, decay
NUMBERS = [0.01, 0.9, 0.95, 1e-8, 0.1]
# Units in the last place of the weight's dtype, for each product, sum, quotient and root.
COMPUTED_ULPS = 8
KERNEL = torch.ops.megatron.adamw_step_.default


class Operands(NamedTuple):
    """The lists of the operator, and its scalars."""

    weights: list[Tensor]
    grads: list[Tensor]
    means: list[Tensor]
    squares: list[Tensor]
    published: list[Tensor]
    scalars: Tensor

    def moved(self, move: Callable[[Tensor], Tensor]) -> "Operands":
        """Return a copy with `move` applied to every tensor."""
        lists = ([move(tensor) for tensor in tensors] for tensors in self[:5])
        return Operands(*lists, move(self.scalars))


def draw(
    dtypes: Sequence[torch.dtype | None], sizes: Sequence[int] = SIZES, seed: int = 0
) -> Operands:
    """Return operands at step 3, with a factor of 0.37 on gradients."""
    drawn = torch.Generator().manual_seed(seed)
    of_weight, of_grad, of_mean, of_square, of_published = dtypes

    def normal(dtype: torch.dtype | None) -> list[Tensor]:
        return [
            torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype or F32)
            for size in sizes
        ]

    squares = [tensor.square() for tensor in normal(of_square)]
    published = [] if of_published is None else normal(of_published)
    scalars = torch.tensor([0.37, 1.0, 1 - NUMBERS[1] ** 3, (1 - NUMBERS[2] ** 3) ** 0.5])
    lists = (normal(of_weight), normal(of_grad), normal(of_mean), squares, published)
    return Operands(*lists, scalars.double())


def check(operands: Operands, *, step: Callable[..., None] = KERNEL) -> None:
    """Make a step, and check what it wrote against the reference in fp64."""
    exact = operands.moved(lambda tensor: tensor.double())
    before = operands.moved(lambda tensor: tensor.clone())
    adamw_step_reference(*exact, NUMBERS)
    step(*operands, NUMBERS)
    for index, weight in enumerate(operands.weights):
        assert torch.equal(operands.grads[index], before.grads[index])
        computed = COMPUTED_ULPS * torch.finfo(weight.dtype).eps
        scaled = operands.scalars[0] * before.grads[index].double()
        old_mean, old_square = before.means[index].double(), before.squares[index].double()
        rate = NUMBERS[0] / operands.scalars[2] * operands.scalars[3]
        root = exact.squares[index].sqrt()
        # The change is in proportion to the mean; where the mean cancels, to what it is made of.
        changes = rate * (old_mean.abs() + scaled.abs()) / root.clamp(min=1e-300)
        for made, expected, scale in (
            (operands.means[index], exact.means[index], old_mean.abs() + scaled.abs()),
            (operands.squares[index], exact.squares[index], old_square + scaled.square()),
            (weight, exact.weights[index], before.weights[index].double().abs() + changes),
        ):
            of_dtype = torch.finfo(made.dtype)
            rounding = of_dtype.eps / 2 * expected.abs() + of_dtype.smallest_normal
            error = (made.double() - expected).abs()
            worst = (error / (rounding + computed * scale)).max().item() if error.numel() else 0.0
            assert worst <= 1, f"{worst:.3g} times the error that is allowed"
        if operands.published:
            made = operands.published[index]
            assert torch.equal(made, weight.to(made.dtype))


def split(operands: Operands) -> Operands:
    """Return the operands with the lower halves of weights in place of the weights.

    The weights themselves become what the halves make.
    """
    lower = [torch.empty_like(weight, dtype=torch.int16) for weight in operands.weights]
    for weight, *halves in zip(operands.weights, operands.published, lower, strict=True):
        split_halves(weight, *halves)
        join_halves(*halves, out=weight)
    return operands.moved(lambda tensor: tensor.clone())._replace(weights=lower)


def check_halves(operands: Operands, *, step: Callable[..., None] = KERNEL) -> None:
    """Make a step with split weights, and check that it has the bits of one with whole ones."""
    halves = split(operands)
    KERNEL(*operands, NUMBERS)
    step(*halves, NUMBERS)
    whole = [join_halves(*each) for each in zip(halves.published, halves.weights, strict=True)]
    for found, expected in zip(halves._replace(weights=whole)[:5], operands[:5], strict=True):
        for made, one in zip(found, expected, strict=True):
            assert torch.equal(made, one)


def check_some() -> None:
    """Check all sizes in every combination of dtypes."""
    for number, dtypes in enumerate(DTYPES):
        check(draw(dtypes, seed=number))
    for number, dtypes in enumerate(SPLIT_DTYPES):
        check_halves(draw(dtypes, seed=number))
