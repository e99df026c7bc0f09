"""Linear layers and an embedding whose weights are split over the tensor-parallel ranks.

Parameters are created empty, on torch's default device, with `partition` and `init` attributes;
filling them is model initialisation's work. Parameters without a partition (a row layer's bias)
get equal gradients on all tp ranks by construction, because everything after the reduction is
computed from equal values: nobody may reduce them over tp again.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.errors import ConfigError, DataError
from megatron.mpu.collectives import start_all_reduce
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.mappings import gather_from_tp, reduce_from_tp, scatter_to_tp
from megatron.mpu.partition import Init, Partition, describe, local_shape


class ColumnParallelLinear(nn.Module):
    """Y = X W^T + b with the output features split over tp: each rank computes its own columns.

    The input is whole on every rank, and so is its gradient (summed over tp, while the weight's
    gradient is being computed).

    Args:
        gather_output: return all output features instead of this rank's.
        blocks: the output is this many stacked projections, each split evenly (2 for [gate; up]).
        skip_bias_add: leave the bias out, for a caller that fuses `layer.bias` into its next
            operation.

    Raises:
        ConfigError: the output features do not divide into `blocks * tp` equal parts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        init: Init,
        bias: bool = True,
        gather_output: bool = False,
        blocks: int = 1,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.blocks, self.skip_bias_add = gather_output, blocks, skip_bias_add
        self._tp = ctx.tp
        split = Partition("tp", dim=0, blocks=blocks)
        # Rows of the output features: [out/tp, in].
        self.weight = _parameter((out_features, in_features), split, self._tp, init, dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _parameter((out_features,), split, self._tp, Init("zeros"), dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [.., in] to [.., out/tp], or to [.., out] when the output is gathered."""
        bias = None if self.skip_bias_add else self.bias
        output = linear_with_input_reduction(hidden, self.weight, bias, self._tp)
        if self.gather_output and self._tp.size > 1:
            output = _unsplit_blocks(gather_from_tp(output, self._tp), self._tp.size, self.blocks)
        return output

    def extra_repr(self) -> str:
        """The whole sizes, for `print(model)`."""
        return f"{self.in_features}, {self.out_features} / tp={self._tp.size}"


class RowParallelLinear(nn.Module):
    """Y = X W^T + b with the input features split over tp: partial products are summed.

    The bias is whole on every rank and is added once, after the sum.

    Args:
        input_is_parallel: the input already holds only this rank's features; otherwise it is
            whole and is split here.
        skip_bias_add: leave the bias out, for a caller that fuses `layer.bias` into its next
            operation (with dropout and the residual, as a rule).

    Raises:
        ConfigError: the input features do not divide over tp.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        init: Init,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.skip_bias_add = input_is_parallel, skip_bias_add
        self._tp = ctx.tp
        split = Partition("tp", dim=1)
        # Columns of the input features: [out, in/tp].
        self.weight = _parameter((out_features, in_features), split, self._tp, init, dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _parameter((out_features,), None, self._tp, Init("zeros"), dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [.., in/tp] (or whole [.., in]) to [.., out], equal on every tp rank."""
        bias = None if self.skip_bias_add else self.bias
        if self._tp.size == 1:
            return F.linear(hidden, self.weight, bias)
        if not self.input_is_parallel:
            hidden = scatter_to_tp(hidden, self._tp)
        output = reduce_from_tp(F.linear(hidden, self.weight), self._tp)
        return output if bias is None else output + bias

    def extra_repr(self) -> str:
        """The whole sizes, for `print(model)`."""
        return f"{self.in_features} / tp={self._tp.size}, {self.out_features}"


class VocabParallelEmbedding(nn.Module):
    """Rows of a table whose vocabulary is split over tp; each rank looks up what it holds.

    Args:
        padded_size: rows of the whole table, a multiple of tp.
        true_size: rows that tokens may ask for; those beyond are padding and stay zero.

    Raises:
        ConfigError: the padded vocabulary does not divide over tp, or is the smaller one.
        DataError: (in `forward`) an id outside the vocabulary. On CUDA a check would have to wait
            for the device, so a device-side assert ends the process there instead.
    """

    def __init__(
        self,
        padded_size: int,
        hidden_size: int,
        *,
        ctx: ParallelContext,
        true_size: int,
        init: Init,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if true_size > padded_size:
            raise ConfigError(
                "the padded vocabulary is smaller than the vocabulary",
                found=f"padded size {padded_size}, {true_size} tokens",
                fix=f"pad to at least {true_size}",
            )
        self.padded_size, self.true_size, self.hidden_size = padded_size, true_size, hidden_size
        self._tp = ctx.tp
        init = Init(init.kind, init.std, true_rows=true_size)
        # Rows of the vocabulary: [v/tp, h].
        self.weight = _parameter(
            (padded_size, hidden_size), Partition("tp", dim=0), self._tp, init, dtype
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [..] int64 ids as [.., h], equal on every tp rank."""
        check_ids(ids, self.true_size)
        if self._tp.size == 1:
            return F.embedding(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self._tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return reduce_from_tp(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._tp)

    def extra_repr(self) -> str:
        """The whole sizes, for `print(model)`."""
        return f"{self.padded_size} / tp={self._tp.size}, {self.hidden_size}"


def linear_with_input_reduction(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, tp: Group
) -> Tensor:
    """`F.linear` for a weight split by output features: the input's gradient is summed over tp.

    Also right for the logits of a tied embedding: `weight` is then [v/tp, h].
    """
    if tp.size == 1:
        return F.linear(hidden, weight, bias)
    function: Callable[..., Tensor] = _LinearWithInputReduction.apply
    return function(hidden, weight, bias, tp)


class _LinearWithInputReduction(torch.autograd.Function):
    """Reduces the input's gradient while the weight's is computed, which hides most of it.

    As in Megatron-LM (Shoeybi et al. 2019, the conjugate operator f of section 3).
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tp: Group) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.tp = tp
        return F.linear(hidden, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        pending = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            pending = start_all_reduce(grad.matmul(weight), ctx.tp)
        rows = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            grad_weight = rows.t().matmul(hidden.reshape(-1, hidden.shape[-1]))
        if ctx.needs_input_grad[2]:
            grad_bias = rows.sum(dim=0)
        return None if pending is None else pending.wait(), grad_weight, grad_bias, None


def check_ids(ids: Tensor, true_size: int) -> None:
    """Refuse ids outside [0, true_size): by an exception on CPU, by a device assert on CUDA."""
    if ids.numel() == 0 or ids.is_meta:
        return
    if ids.device.type != "cpu":
        # Asynchronous: an exception would have to wait for the device at every step.
        torch._assert_async(((ids >= 0) & (ids < true_size)).all(), _TOO_HIGH)
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if highest >= true_size:
        raise DataError(
            _TOO_HIGH,
            found=f"input id {highest}, vocabulary of {true_size} (highest id {true_size - 1})",
            fix="use the tokenizer that the data was prepared with (--vocab-file, --vocab-size)",
        )
    if lowest < 0:
        raise DataError(
            "There is an input id in the input that is negative",
            found=f"input id {lowest}",
            fix="prepare the data again; ids start at 0",
        )


_TOO_HIGH = "There is an input id in the input that is greater than the highest possible input id"


def _parameter(
    whole: tuple[int, ...],
    partition: Partition | None,
    tp: Group,
    init: Init,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(local_shape(whole, partition, tp.size), dtype=dtype))
    describe(parameter, init=init, partition=partition)
    return parameter


def _unsplit_blocks(gathered: Tensor, size: int, blocks: int) -> Tensor:
    """Undo the interleaving of a gather: [tp, blocks, n] features become [blocks, tp, n]."""
    if blocks == 1:
        return gathered
    parts = gathered.view(*gathered.shape[:-1], size, blocks, -1)
    return parts.transpose(-3, -2).flatten(-3)
