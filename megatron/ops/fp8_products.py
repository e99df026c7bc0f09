"""The three matrix products of a linear layer with 8-bit operands: Y = X W^T, dX = G W, dW = G^T X.

Every operand is quantised along the dimension that the product sums over, so a matrix that occurs
in two products is quantised for each of them. What other ranks hold parts of has the scale of the
whole: the largest values of such blocks are reduced, and results do not depend on the layout.
With an `OperandHistory` scales come from the largest values of steps before, and reduce nothing.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.ops.quantize import Blocks, Quantized, block_amax, quantize
from megatron.ops.scaled_matmul import scaled_matmul

_INPUT, _WEIGHT, _GRADIENT = range(3)  # of a history
_FEWEST_TOKENS = 16  # that a product may sum over on CUDA: it takes multiples of them


class Fp8Scaling(NamedTuple):
    """How operands are rounded: the blocks that share a scale, and the format of gradients."""

    rows: Blocks  # of activations and gradients
    weight: Blocks
    gradient_dtype: torch.dtype
    margin: int = 0  # scales are 2^margin times what the largest value needs


class Fp8Amax(NamedTuple):
    """The largest values of input and weight, where the backward pass uses them again."""

    input: Tensor | None = None
    weight: Tensor | None = None
    measured: tuple[Tensor, ...] = ()  # of this step, where scales come from steps before

    @classmethod
    def of(cls, values: Tensor) -> "Fp8Amax":
        """Return what `values` was made of."""
        if not len(values):
            return cls()
        one, other, *measured = values.view(-1, 1, 1)
        return cls(one, other, tuple(measured))

    def values(self, like: Tensor) -> Tensor:
        """Return all of it, [0] or [`Fp8Products.keeps`] in fp32, on the device of a tensor."""
        if self.input is None or self.weight is None:
            return like.new_empty(0, dtype=torch.float32)
        return torch.cat([one.view(-1) for one in (self.input, self.weight, *self.measured)])


class OperandHistory:
    """The largest values of one layer's input, weight and gradient: of steps before, and of this.

    Args:
        seen: [3] in fp32, of this step on this rank so far; the caller reduces and clears it.
    """

    def __init__(self, seen: Tensor) -> None:
        # [3], what scales come from; None before the first step, whose own values have to do.
        self.before: Tensor | None = None
        self._seen = seen

    def record(self, amax: Sequence[Tensor]) -> None:
        """Note the largest values of one micro-batch: of input, weight and gradient."""
        values = torch.cat([one.view(-1) for one in amax])
        torch.maximum(self._seen, values, out=self._seen)


class Fp8Products:
    """The products of one linear layer; counts those that ran.

    Without tokens, as an expert may be, there is no product, and nothing is reduced. It counts.

    Args:
        splits_output: whether ranks share the weight by output features, else by input features.
        reduce_max: replaces a tensor by the maximum over these ranks.
        wgrad: whether gradients of weights are computed in 8 bits too.
        matrices: how many matrices the layer has, each with products of its own.

    Attributes:
        history: where scales come from, if not from the values at hand; only for scales that a
            whole matrix shares.
    """

    def __init__(
        self,
        scaling: Fp8Scaling,
        *,
        splits_output: bool,
        reduce_max: Callable[[Tensor], Tensor],
        wgrad: bool = True,
        matrices: int = 1,
    ) -> None:
        self.wgrad, self.matrices = wgrad, matrices
        self.history: OperandHistory | None = None
        self._scaling, self._rows, self._weight = scaling, scaling.rows, scaling.weight
        self._splits_output, self._reduce_max = splits_output, reduce_max
        self._outputs = self._input_gradients = self._weight_gradients = 0

    @property
    def keeps(self) -> int:
        """How many largest values an output keeps for the backward pass."""
        return 4 if self._rows is Blocks.TENSOR else 0

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many outputs, gradients of inputs and gradients of weights were computed."""
        return self._outputs, self._input_gradients, self._weight_gradients

    def output(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Fp8Amax]:
        """Return X W^T of X [.., in], and what the backward pass needs of it."""
        if not hidden.numel():
            self._outputs += 1
            return hidden.new_empty(*hidden.shape[:-1], weight.shape[0]), Fp8Amax()
        rows = _matrix(hidden)
        split = not self._splits_output
        measured = self._amaxes(
            (rows, self._rows, _is_shared(self._rows, split=split, summed=split)),
            (weight, self._weight, _is_shared(self._weight, split=True, summed=split)),
        )
        of_input = self._for_scale(measured[0], _INPUT)
        of_weight = self._for_scale(measured[1], _WEIGHT)
        product = scaled_matmul(
            self._quantize(rows, self._rows, of_input),
            self._quantize(weight, self._weight, of_weight),
            hidden.dtype,
        )
        self._outputs += 1
        # Of other blocks the backward pass needs those along its own sums.
        is_whole = self._rows is Blocks.TENSOR
        amax = Fp8Amax(of_input, of_weight, tuple(measured)) if is_whole else Fp8Amax()
        return product.view(*hidden.shape[:-1], weight.shape[0]), amax

    def input_gradient(
        self, grad: Tensor, weight: Tensor, amax: Fp8Amax
    ) -> tuple[Tensor, Tensor | None]:
        """Return G W of G [.., out], and what `of_weight` needs of it."""
        if not grad.numel():
            self._input_gradients += 1
            return grad.new_empty(*grad.shape[:-1], weight.shape[1]), None
        rows, columns = _matrix(grad), weight.t()
        split = self._splits_output
        wanted = [(rows, self._rows, _is_shared(self._rows, split=split, summed=split))]
        if amax.weight is None:
            shared = _is_shared(self._weight, split=True, summed=split)
            wanted.append((columns, self._weight, shared))
        measured, *others = self._amaxes(*wanted)
        of_grad = self._for_scale(measured, _GRADIENT)
        of_weight = others[0] if amax.weight is None else amax.weight
        product = scaled_matmul(
            self._quantize(rows, self._rows, of_grad, self._scaling.gradient_dtype),
            self._quantize(columns, self._weight, of_weight),
            grad.dtype,
        )
        self._input_gradients += 1
        if self.history is not None:
            # Here, not in `output`: an evaluation comes without, and recomputation twice.
            self.history.record((*amax.measured, measured))
        again = of_grad if amax.input is not None else None
        return product.view(*grad.shape[:-1], weight.shape[1]), again

    def of_weight(
        self, amax: Fp8Amax, of_grad: Tensor | None
    ) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function of (X, G) that computes the gradient G^T X, now or later.

        It reduces nothing. `of_grad` is what `input_gradient` returned.
        """
        return partial(self._weight_gradient, amax.input, of_grad)

    def _weight_gradient(
        self, of_input: Tensor | None, of_grad: Tensor | None, rows_in: Tensor, rows_out: Tensor
    ) -> Tensor:
        self._weight_gradients += 1
        if not rows_in.numel():
            return rows_in.new_zeros(rows_out.shape[-1], rows_in.shape[-1])
        grad, hidden = (self._by_tokens(rows) for rows in (rows_out, rows_in))
        return scaled_matmul(
            self._quantize(grad, self._rows, of_grad, self._scaling.gradient_dtype),
            self._quantize(hidden, self._rows, of_input),
            rows_in.dtype,
        )

    def _by_tokens(self, rows: Tensor) -> Tensor:
        """Return [.., n] as [n, tokens], with zeros where scales or the device need more tokens."""
        tokens = _matrix(rows).t()
        multiple = max(_FEWEST_TOKENS, self._rows.value[1])
        return F.pad(tokens, (0, -tokens.shape[1] % multiple))

    def _amaxes(self, *matrices: tuple[Tensor, Blocks, bool]) -> list[Tensor]:
        """Return the largest values of blocks; those that ranks share in one reduction.

        Where scales come from a history, they are those of this rank alone.
        """
        found = [block_amax(matrix, blocks) for matrix, blocks, _ in matrices]
        if self.history is not None and self.history.before is not None:
            return found
        shared = [at for at, (_, _, is_shared) in enumerate(matrices) if is_shared]
        if shared:
            together = self._reduce_max(torch.cat([found[at].view(-1) for at in shared]))
            parts = torch.split(together, [found[at].numel() for at in shared])
            for at, part in zip(shared, parts):
                found[at] = part.view(found[at].shape)
        return found

    def _for_scale(self, measured: Tensor, operand: int) -> Tensor:
        """Return the largest value that the scale of an operand comes from."""
        if self.history is None or self.history.before is None:
            return measured
        # A matrix that is not finite has to become NaN, not the largest codes.
        return torch.where(measured.isfinite(), self.history.before[operand], measured)

    def _quantize(
        self,
        matrix: Tensor,
        blocks: Blocks,
        amax: Tensor | None,
        dtype: torch.dtype = torch.float8_e4m3fn,
    ) -> Quantized:
        return quantize(matrix, dtype, blocks, amax=amax, margin=self._scaling.margin)


def _is_shared(blocks: Blocks, *, split: bool, summed: bool) -> bool:
    """Return whether blocks of a matrix reach over ranks.

    Args:
        split: whether ranks share the matrix at all.
        summed: whether they share the dimension that the product sums over.
    """
    return {Blocks.TENSOR: split, Blocks.ROW: summed}.get(blocks, False)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
