"""The norms as the law of kernels sees them: operands, what is computed, how exact it has to be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.ops import layer_norm, rms_norm
from megatron.ops.library import statistics_dtype

EPSILON = 1e-5
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (  # of x, and of weight, bias and output
    (torch.float32, torch.float32),
    (torch.float64, torch.float64),
    *((half, half) for half in HALVES),
    *((torch.float32, half) for half in HALVES),
    *((half, torch.float32) for half in HALVES),
)
# Sums of fp32 (fp64 of fp64) may be wrong by this many units in the last place of the largest term:
# they add blocks of 4,096 elements, each in four or more partial sums.
SUMMED_ULPS = 8


@dataclass(frozen=True)
class Norm:
    """One norm: its two operators by name, and what they mean."""

    name: str
    vectors: int  # weight, and bias
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]

    @property
    def statistics(self) -> int:
        """Return how many statistics the forward pass keeps for each row."""
        return self.vectors

    def kernel(self, suffix: str = "") -> Callable[..., tuple[Tensor, ...]]:
        """Return the operator (of the backward pass: `suffix` "_backward")."""
        operator: Callable[..., tuple[Tensor, ...]]
        operator = getattr(torch.ops.megatron, self.name + suffix).default
        return operator


NORMS = (
    Norm("rms_norm", 1, rms_norm.rms_norm_reference, rms_norm.rms_norm_backward_reference),
    Norm(
        "layer_norm", 2, layer_norm.layer_norm_reference, layer_norm.layer_norm_backward_reference
    ),
)


@dataclass(frozen=True)
class Operands:
    """Everything that a norm and its gradient take, with a mean that is not zero."""

    x: Tensor
    residual: Tensor | None
    vectors: tuple[Tensor, ...]
    grad: Tensor
    grad_added: Tensor | None

    @staticmethod
    def draw(
        norm: Norm,
        shape: Sequence[int],
        dtypes: tuple[torch.dtype, torch.dtype],
        *,
        has_residual: bool,
        seed: int = 0,
    ) -> "Operands":
        """Return random operands; equal arguments give equal ones."""
        generator = torch.Generator().manual_seed(seed)
        of_x, of_y = dtypes

        def normal(size: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

        return Operands(
            x=normal(shape, of_x) + 0.5,
            residual=normal(shape, of_x) if has_residual else None,
            vectors=tuple(normal(shape[-1:], of_y) for _ in range(norm.vectors)),
            grad=normal(shape, of_y),
            grad_added=normal(shape, of_x) if has_residual else None,
        )

    def to(self, device: torch.device) -> "Operands":
        """Return the same operands on another device."""
        optional = [
            None if one is None else one.to(device) for one in (self.residual, self.grad_added)
        ]
        vectors = tuple(vector.to(device) for vector in self.vectors)
        x, grad = self.x.to(device), self.grad.to(device)
        return Operands(x, optional[0], vectors, grad, optional[1])

    @property
    def added(self) -> Tensor:
        """Return what is normalised: x, or its sum with the residual, rounded as PyTorch does."""
        return self.x if self.residual is None else self.x + self.residual


def check_both(norm: Norm, operands: Operands) -> None:
    """Run the kernels of both directions and check their results."""
    made = norm.kernel()(operands.x, operands.residual, *operands.vectors, EPSILON)
    check_forward(norm, operands, made)
    arguments = backward_operands(norm, operands)
    check_backward(norm, arguments, norm.kernel("_backward")(*arguments))


def check_forward(norm: Norm, operands: Operands, made: Sequence[Tensor]) -> None:
    """Check the results of a forward pass against the reference in fp64."""
    x, vectors = operands.added, operands.vectors
    out, added, *statistics = made
    assert added.dtype == x.dtype
    assert torch.equal(added, x if operands.residual is not None else added[:0])
    expected, _, *expected_statistics = norm.forward(
        x.double(), None, *(vector.double() for vector in vectors), EPSILON
    )
    if x.numel() == 0:
        assert out.shape == expected.shape
        return
    rstd = expected_statistics[-1].unsqueeze(-1)
    largest = x.double().abs().amax(-1, keepdim=True)
    scale = largest * rstd * vectors[0].double().abs()
    scale = scale + sum(bias.double().abs() for bias in vectors[1:])
    kept = statistics_dtype(x)
    _check(out, expected, scale, vectors[0].dtype, kept)
    for statistic, wanted in zip(statistics, expected_statistics, strict=True):
        size = (
            largest.squeeze(-1) if len(statistics) == 2 and statistic is statistics[0] else wanted
        )
        # 1 / deviation is as wrong as the variance, whose terms are rounded as `largest` is.
        size = size * torch.clamp(largest.squeeze(-1) * wanted.abs(), min=1.0)
        _check(statistic, wanted, size, kept, kept)


def backward_operands(norm: Norm, operands: Operands) -> tuple[Tensor | None, ...]:
    """Return the arguments of the backward operator, with statistics of the reference."""
    x = operands.added
    wide = (vector.double() for vector in operands.vectors)
    _, _, *statistics = norm.forward(x.double(), None, *wide, EPSILON)
    kept = (statistic.to(statistics_dtype(x)) for statistic in statistics)
    return operands.grad, operands.grad_added, x, operands.vectors[0], *kept


def check_backward(norm: Norm, arguments: Sequence[Tensor | None], made: Sequence[Tensor]) -> None:
    """Check the results of a backward pass against the reference in fp64."""
    grad, grad_added, x, weight, *statistics = (
        None if argument is None else argument.double() for argument in arguments
    )
    of_x, of_y = arguments[2].dtype, arguments[3].dtype
    kept = statistics_dtype(arguments[2])
    expected = norm.backward(grad, grad_added, x, weight, *statistics)
    if x.numel() == 0:
        assert [one.shape for one in made] == [one.shape for one in expected]
        assert all(not one.any() for one in made)
        return
    rstd = statistics[-1].unsqueeze(-1)
    normalised = x.abs().amax(-1, keepdim=True) * rstd  # at least as large as each
    slope = (grad * weight).abs().amax(-1, keepdim=True)
    scale = slope * rstd * (1 + normalised) ** 2 + (0 if grad_added is None else grad_added.abs())
    _check(made[0], expected[0], scale, of_x, kept)
    n = weight.numel()
    for sums, wanted, terms in zip(
        made[1:], expected[1:], (grad.abs() * (1 + normalised), grad.abs()), strict=False
    ):
        _check(sums, wanted, terms.reshape(-1, n).sum(0), of_y, kept)


def check_some() -> None:
    """Check a few shapes in every pair of dtypes."""
    for norm in NORMS:
        for dtypes in DTYPES:
            for shape in ((1, 1), (37, 129), (3, 4097)):
                check_both(norm, Operands.draw(norm, shape, dtypes, has_residual=True))


def _check(
    actual: Tensor, expected: Tensor, scale: Tensor, dtype: torch.dtype, summed: torch.dtype
) -> None:
    """Check one result: rounded once to `dtype`, from sums in `summed` of terms up to `scale`."""
    assert actual.dtype == dtype
    assert actual.shape == expected.shape
    rounding = torch.finfo(dtype).eps / 2 * expected.abs() + torch.finfo(dtype).smallest_normal
    bound = rounding + SUMMED_ULPS * torch.finfo(summed).eps * scale
    error = (actual.double() - expected).abs()
    worst = (error / bound).max().item()
    assert (error <= bound).all(), f"{worst:.3g} times the error that is allowed"
