"""The cross entropy as the law of kernels sees it: operands, and how exact results have to be."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.ops.cross_entropy import (
    cross_entropy_gradient_reference,
    cross_entropy_statistics_reference,
)
from megatron.ops.library import statistics_dtype

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# (rows, columns, true columns)
SHAPES = (
    (0, 5, 5),
    (3, 1, 1),
    (4, 7, 0),
    (5, 16, 16),
    (9, 33, 29),
    (2, 4097, 4096),  # one more than a block of a sum
    (3, 9000, 8500),
)
# Units in the last place of the sum's dtype: one for each exponential, a few for adding them up in
# blocks, and for the factor and the difference that the gradient is made of.
SUMMED_ULPS = 8
Z_LOSS = 0.05  # the weight of a z loss: slopes of about twice those of the cross entropy
KERNEL = torch.ops.megatron


@dataclass(frozen=True)
class Rows:
    """Logits, the labels' columns of which some are none, and a factor for each loss."""

    logits: Tensor
    labels: Tensor
    factors: Tensor
    true_width: int

    @staticmethod
    def draw(shape: tuple[int, int, int], dtype: torch.dtype, *, seed: int = 0) -> "Rows":
        """Return random rows, with a factor of zero in every third."""
        rows, columns, true_width = shape
        drawn = torch.Generator().manual_seed(seed)
        logits = 4 * torch.randn(rows, columns, generator=drawn, dtype=torch.float64) + 20
        labels = torch.randint(-1, true_width + 2, (rows,), generator=drawn)
        factors = torch.rand(rows, generator=drawn, dtype=torch.float64)
        factors[2::3] = 0
        logits = logits.to(dtype)
        return Rows(logits, labels, factors.to(statistics_dtype(logits)), true_width)

    def to(self, device: torch.device) -> "Rows":
        """Return the same rows on another device."""
        there = (one.to(device) for one in (self.logits, self.labels, self.factors))
        return Rows(*there, self.true_width)

    def statistics(self) -> Tensor:
        """Return the statistics of the reference in fp64."""
        return cross_entropy_statistics_reference(
            self.logits.double(), self.labels, self.true_width
        )

    def gradient_operands(self, z_loss_coeff: float = 0.0) -> tuple[Tensor, ...]:
        """Return shift, scale and at_label as a loss over these columns alone has them.

        With a z loss every fourth row has a scale of zero: its factor 1 + 2 C log Z may be zero,
        and its label still has a gradient.
        """
        largest, total, _ = self.statistics().to(self.factors.dtype)
        shift, total = largest.masked_fill(total == 0, 0.0), total.masked_fill(total == 0, 1.0)
        slopes = self.factors * (1 + 2 * z_loss_coeff * (shift + total.log()))
        if z_loss_coeff:
            slopes[::4] = 0
        return shift, slopes / total, self.factors


Statistics = Callable[[Tensor, Tensor, int], Tensor]
Gradient = Callable[..., None]


def check_rows(
    rows: Rows,
    statistics: Statistics = KERNEL.cross_entropy_statistics.default,
    gradient: Gradient = KERNEL.cross_entropy_gradient_.default,
) -> None:
    """Run both operators and check their results against the references in fp64."""
    made = statistics(rows.logits, rows.labels, rows.true_width)
    expected = rows.statistics()
    assert made.dtype == rows.factors.dtype
    assert torch.equal(made[0].double(), expected[0])
    assert torch.equal(made[2].double(), expected[2])
    eps = torch.finfo(made.dtype).eps
    distance = (rows.logits.double().amax() - rows.logits.double().amin()) if len(made[0]) else 0
    # e^(x - M) is as wrong as x - M, which is rounded: by half a unit of the distance at most.
    slack = SUMMED_ULPS + distance
    _check("the sum", made[1], expected[1], slack * eps * expected[1])

    for z_loss_coeff in (0.0, Z_LOSS):
        operands = rows.gradient_operands(z_loss_coeff)
        written = rows.logits.clone()
        gradient(written, rows.labels, *operands, rows.true_width)
        wide = rows.logits.double()
        shift, scale, at_label = (one.double() for one in operands)
        cross_entropy_gradient_reference(wide, rows.labels, shift, scale, at_label, rows.true_width)
        of_dtype = torch.finfo(rows.logits.dtype)
        rounding = of_dtype.eps / 2 * wide.abs() + of_dtype.smallest_normal
        largest_summand = torch.maximum((scale * expected[1]).abs(), at_label)
        _check("the gradient", written, wide, rounding + slack * eps * largest_summand[:, None])
        assert not written[:, rows.true_width :].any()
        assert not written[(scale == 0) & (at_label == 0)].any()


def check_some() -> None:
    """Check a few shapes in every dtype."""
    for dtype in DTYPES:
        for shape in SHAPES[3:6]:
            check_rows(Rows.draw(shape, dtype))


def _check(what: str, made: Tensor, expected: Tensor, bound: Tensor) -> None:
    error = (made.double() - expected).abs()
    worst = (error / bound.clamp_min(1e-300)).max().item() if error.numel() else 0.0
    assert (error <= bound).all(), f"{what} has {worst:.3g} times the error that is allowed"
