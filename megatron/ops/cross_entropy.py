"""Cross entropy of rows of logits in two passes: the sums of a softmax, then the gradient in place.

Between the two a caller adds up the sums of ranks that hold other columns of the vocabulary. With
M the largest logit and S the sum of e^(logit - M), both over the whole vocabulary, the loss of a
row is log S - (logit of the label - M). Numbers of a row are fp32 (fp64 of fp64); the gradient is
rounded once.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron.ops.library import operator, shapes_of, statistics_dtype

# Elements that the references handle at once. On a CPU the passes over a block then find it in the
# cache; on a GPU blocks only bound the temporary memory.
_BLOCK_ELEMENTS = {"cpu": 2**19}
_BLOCK_ELEMENTS_ELSEWHERE = 2**28


def cross_entropy_statistics(logits: Tensor, labels: Tensor, true_width: int) -> Tensor:
    """Return [3, n]: the largest logit of each row, the sum S of a softmax, the label's logit.

    Args:
        logits: [n, columns], contiguous.
        labels: [n] int64 columns. A row whose number is no true column has the logit -inf.
        true_width: how many columns count; those behind them are padding.
    """
    _check(logits, labels, true_width)
    statistics: Tensor = torch.ops.megatron.cross_entropy_statistics(logits, labels, true_width)
    return statistics


def cross_entropy_gradient_(
    logits: Tensor,
    labels: Tensor,
    *,
    shift: Tensor,
    scale: Tensor,
    at_label: Tensor,
    true_width: int,
) -> Tensor:
    """Replace each logit by e^(logit - shift) * scale, minus `at_label` in the label's column.

    With the factor f on the loss of a row, `shift` M, `scale` f / S and `at_label` f that is the
    gradient. With C log^2 Z added to the loss, log Z being M + log S, `scale` is
    f (1 + 2 C log Z) / S. Padded columns become zero, and so does a row whose `scale` and
    `at_label` are zero.

    Args:
        shift, scale, at_label: [n] of the dtype of the statistics.

    Returns:
        `logits`; the other arguments are as in `cross_entropy_statistics`.
    """
    _check(logits, labels, true_width, shift, scale, at_label)
    torch.ops.megatron.cross_entropy_gradient_(logits, labels, shift, scale, at_label, true_width)
    return logits


@operator("cross_entropy_statistics(Tensor logits, Tensor labels, int true_width) -> Tensor")
def cross_entropy_statistics_reference(logits: Tensor, labels: Tensor, true_width: int) -> Tensor:
    """Return the statistics, block by block of rows."""
    statistics = logits.new_empty((3, logits.shape[0]), dtype=statistics_dtype(logits))
    if true_width == 0:
        statistics.fill_(-torch.inf)[1] = 0
        return statistics
    elsewhere = (labels < 0) | (labels >= true_width)
    for rows in _blocks(logits):
        wide = logits[rows, :true_width].to(statistics.dtype)
        torch.amax(wide, 1, out=statistics[0, rows])
        at_label = wide.gather(1, labels[rows].masked_fill(elsewhere[rows], 0).unsqueeze(1))
        statistics[2, rows] = at_label.squeeze(1)
        shift = statistics[0, rows].unsqueeze(1)
        shift = shift.masked_fill(shift == -torch.inf, 0.0)
        torch.sum((wide - shift).exp_(), 1, out=statistics[1, rows])
    statistics[2].masked_fill_(elsewhere, -torch.inf)
    return statistics


@operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor shift, Tensor scale, "
    "Tensor at_label, int true_width) -> ()"
)
def cross_entropy_gradient_reference(
    logits: Tensor,
    labels: Tensor,
    shift: Tensor,
    scale: Tensor,
    at_label: Tensor,
    true_width: int,
) -> None:
    """Write the gradient in place of the logits, block by block of rows."""
    nothing = ((scale == 0) & (at_label == 0)).unsqueeze(1)
    columns = torch.arange(logits.shape[1], device=logits.device)
    for rows in _blocks(logits):
        wide = logits[rows].to(scale.dtype)
        slope = (wide - shift[rows].unsqueeze(1)).exp_().mul_(scale[rows].unsqueeze(1))
        is_label = columns == labels[rows].unsqueeze(1)
        slope -= is_label * at_label[rows].unsqueeze(1)
        slope[:, true_width:] = 0.0
        logits[rows] = slope.masked_fill_(nothing[rows], 0.0)


@shapes_of("cross_entropy_statistics")
def _shapes(logits: Tensor, labels: Tensor, true_width: int) -> Tensor:
    return logits.new_empty((3, logits.shape[0]), dtype=statistics_dtype(logits))


@shapes_of("cross_entropy_gradient_")
def _gradient_shapes(
    logits: Tensor,
    labels: Tensor,
    shift: Tensor,
    scale: Tensor,
    at_label: Tensor,
    true_width: int,
) -> None:
    return None


def _check(logits: Tensor, labels: Tensor, true_width: int, *factors: Tensor) -> None:
    rows = tuple(logits.shape[:1])
    fits = (
        logits.dim() == 2
        and logits.is_contiguous()
        and labels.dtype == torch.int64
        and 0 <= true_width <= logits.shape[1]
        and all(one.shape == rows for one in (labels, *factors))
        and all(one.dtype == statistics_dtype(logits) for one in factors)
    )
    if not fits:
        shapes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in (labels, *factors))
        raise ValueError(
            "labels, factors or the number of true columns do not fit the logits\n"
            f"  found: logits {tuple(logits.shape)} {logits.dtype}, of which {true_width} columns "
            f"are true; {shapes}\n"
            "  fix: give contiguous [n, columns] logits, [n] int64 labels, [n] factors in "
            f"{statistics_dtype(logits)}, and at most as many true columns as there are"
        )


def _blocks(logits: Tensor) -> Iterator[slice]:
    limit = _BLOCK_ELEMENTS.get(logits.device.type, _BLOCK_ELEMENTS_ELSEWHERE)
    size = max(1, limit // max(1, logits.shape[1]))
    for start in range(0, logits.shape[0], size):
        yield slice(start, start + size)
