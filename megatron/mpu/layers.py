"""Linear layers and an embedding whose weights are split over the tensor-parallel ranks.

Parameters are created empty, on torch's default device, with `split_by` and `init` attributes;
filling them is model initialisation's work. Without sequence parallelism parameters that are not
split (a row layer's bias) get equal gradients on all tp ranks by construction, which must not be
reduced over tp again. With it, hidden states between layers are [s/tp, b, h] and those gradients
are summands: such parameters are marked (`is_sequence_parallel`), and summed once per step.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.fp8 import Fp8Config, Fp8Format, Fp8Recipe
from megatron.errors import ConfigError, DataError
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import (
    Pending,
    all_gather,
    all_reduce,
    reduce_scatter,
    ring,
    ring_order,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
    sum_on_ring,
)
from megatron.mpu.context import Group, ParallelContext
from megatron.mpu.mappings import (
    reduce_from_tp,
    reduce_scatter_to_sequence,
    sequence_part,
)
from megatron.mpu.partition import Init, InitKind, Partition, local_shape, set_parameter_metadata
from megatron.mpu.row_gradients import lookup
from megatron.mpu.weight_gradients import (
    WeightProduct,
    bypasses_autograd,
    defer_or_compute,
    weight_gradient,
)
from megatron.ops.cpu_products import matrix_product
from megatron.ops.fp8_products import Fp8Amax, Fp8Products, Fp8Scaling
from megatron.ops.opaque_linear import numbered, opaque_linear
from megatron.ops.quantize import Blocks
from megatron.ops.row_products import linear_rows

# The blocks of activations and gradients, and those of weights, that share a scale.
FP8_BLOCKS: Mapping[Fp8Recipe, tuple[Blocks, Blocks]] = {
    Fp8Recipe.TENSORWISE: (Blocks.TENSOR, Blocks.TENSOR),
    Fp8Recipe.DELAYED: (Blocks.TENSOR, Blocks.TENSOR),
    Fp8Recipe.ROWWISE: (Blocks.ROW, Blocks.ROW),
    Fp8Recipe.BLOCKWISE: (Blocks.ROW_128, Blocks.SQUARE_128),
    Fp8Recipe.MXFP8: (Blocks.ROW_32, Blocks.ROW_32),
}


class _ParallelLinear(nn.Module):
    """What the two linear layers share: a weight split over tp, and products in FP8."""

    weight: nn.Parameter
    fp8: Fp8Products | None = None
    _tp: Group
    _sequence_parallel: bool
    _on_ring = False
    _splits_output: bool
    _number: Tensor  # of this layer in compiled graphs
    _keeps = 0  # those of `fp8`; a plain number, which a graph is made for

    def in_fp8(self, config: Fp8Config | None) -> Self:
        """Compute with 8-bit operands, if a config is given; return this layer."""
        if config is not None:
            self.fp8 = fp8_products(config, self._tp, splits_output=self._splits_output)
            self._keeps = self.fp8.keeps
        return self

    def on_ring(self, wanted: bool) -> Self:
        """Compute with parts of a split sequence while others travel; return this layer."""
        self._on_ring = wanted and self._sequence_parallel and self._tp.size > 1
        return self

    def _own_product(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        output, amax = _product(hidden, self.weight, bias, self.fp8)
        return output, amax.values(hidden)

    def _own_gradients(self, grad: Tensor, hidden: Tensor, kept: Tensor, split: "_Split") -> Tensor:
        split = split._replace(fp8=self.fp8, amax=Fp8Amax.of(kept))
        grad_input, grad_weight = _gradients(grad, hidden, self.weight, split)
        assert grad_input is not None  # noqa: S101  # invariant: it was asked for
        assert grad_weight is None  # noqa: S101  # invariant: a buffer takes it, by preflight
        return grad_input


class ColumnParallelLinear(_ParallelLinear):
    """Y = X W^T + b with the output features split over tp: each rank computes its own columns.

    The input is whole on every rank, and so is its gradient (summed over tp, while the weight's
    gradient is being computed).

    Args:
        blocks: the output is this many stacked projections, each split evenly (2 for [gate; up]).
        sequence_parallel: the input is this rank's part of the sequence, and so is its gradient.

    Raises:
        ConfigError: the output features do not divide into `blocks * tp` equal parts.
    """

    _splits_output = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        init: Init,
        bias: bool = True,
        blocks: int = 1,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._tp, self._sequence_parallel = ctx.tp, sequence_parallel
        self._number = numbered(self)
        split = Partition("tp", dim=0, blocks=blocks)
        # Rows of the output features: [out/tp, in].
        self.weight = _parameter((out_features, in_features), split, self._tp, init, dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _parameter((out_features,), split, self._tp, Init(InitKind.ZEROS), dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [s, .., in], or [s/tp, .., in] under sequence parallelism, to [s, .., out/tp]."""
        if torch.compiler.is_compiling():
            gathers = self._tp.size if self._sequence_parallel else 1
            return opaque_linear(
                hidden, self.weight, self.bias, self._number, gathers=gathers, keeps=self._keeps
            )
        return linear_with_input_reduction(
            hidden,
            self.weight,
            self.bias,
            self._tp,
            sequence_parallel=self._sequence_parallel,
            on_ring=self._on_ring,
            fp8=self.fp8,
        )

    def product(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output without autograd, for `opaque_linear`, and what backward needs."""
        if self._on_ring:
            output = _gathered_product(hidden, self.weight.t(), self._tp, bias=bias)
            return output, Fp8Amax().values(hidden)
        whole = all_gather(hidden, self._tp) if self._sequence_parallel else hidden
        return self._own_product(whole, bias)

    def input_gradient(self, grad: Tensor, hidden: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient of the input, reduced; add that of the weight to its buffer."""
        return self._own_gradients(
            grad, hidden, kept, _Split(self.weight, self._tp, self._sequence_parallel)
        )

    def extra_repr(self) -> str:
        """Return the whole sizes, for `print(model)`."""
        return f"{self.in_features}, {self.out_features} / tp={self._tp.size}"


class RowParallelLinear(_ParallelLinear):
    """Y = X W^T + b with the input features split over tp: partial products are summed.

    The bias is whole on every rank and is added once, after the sum.

    Args:
        sequence_parallel: the output is this rank's part of the sequence; the bias is added to
            that part alone, so its gradient is a summand.

    Raises:
        ConfigError: the input features do not divide over tp.
    """

    _splits_output = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        ctx: ParallelContext,
        init: Init,
        bias: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._tp, self._sequence_parallel = ctx.tp, sequence_parallel
        self._number = numbered(self)
        split = Partition("tp", dim=1)
        # Columns of the input features: [out, in/tp].
        self.weight = _parameter((out_features, in_features), split, self._tp, init, dtype)
        self.bias: nn.Parameter | None = None
        if bias:
            self.bias = _parameter((out_features,), None, self._tp, Init(InitKind.ZEROS), dtype)
            set_parameter_metadata(
                self.bias, init=Init(InitKind.ZEROS), sequence_parallel=sequence_parallel
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Project [s, .., in/tp] to [s, .., out], equal on every tp rank.

        The output is [s/tp, .., out] under sequence parallelism.
        """
        if torch.compiler.is_compiling():
            own = self.bias if self._tp.size == 1 else None
            scatters = self._tp.size if self._sequence_parallel else 1
            output = opaque_linear(
                hidden, self.weight, own, self._number, scatters=scatters, keeps=self._keeps
            )
            return output if self.bias is None or own is not None else output + self.bias
        if self._tp.size == 1:
            return linear(hidden, self.weight, self.bias, self.fp8)
        reduce = reduce_scatter_to_sequence if self._sequence_parallel else reduce_from_tp
        if self._on_ring:
            output = _ROW_ON_RING(hidden, self.weight, self._tp)
        else:
            output = reduce(linear(hidden, self.weight, None, self.fp8), self._tp)
        return output if self.bias is None else output + self.bias

    def product(self, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the output without autograd, for `opaque_linear`, and what backward needs."""
        if self._on_ring:
            return _summed_product(hidden, self.weight, self._tp), Fp8Amax().values(hidden)
        reduce = reduce_scatter if self._sequence_parallel else all_reduce
        output, kept = self._own_product(hidden, bias)
        return reduce(output, self._tp), kept

    def input_gradient(self, grad: Tensor, hidden: Tensor, kept: Tensor) -> Tensor:
        """Return the gradient of the input; add that of the weight to its buffer."""
        if self._on_ring:
            grad_input, _ = _row_gradients(grad, hidden, self.weight, self.weight, self._tp)
            return grad_input
        whole = all_gather(grad, self._tp) if self._sequence_parallel else grad
        return self._own_gradients(whole, hidden, kept, _Split(self.weight))

    def extra_repr(self) -> str:
        """Return the whole sizes, for `print(model)`."""
        return f"{self.in_features} / tp={self._tp.size}, {self.out_features}"


class VocabParallelEmbedding(nn.Module):
    """A table whose vocabulary is split over tp; each rank looks up the rows of its part.

    Args:
        padded_size: rows of the whole table, a multiple of tp.
        true_size: rows of tokens; those beyond are padding and stay zero.
        sequence_parallel: the output is this rank's part of the sequence, the ids' first dimension.

    Raises:
        ConfigError: the padded vocabulary does not divide over tp, or is the smaller one; (in
            `forward`) a sequence does not divide over tp.
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
        sequence_parallel: bool = False,
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
        self._tp, self._sequence_parallel = ctx.tp, sequence_parallel
        init = Init(init.kind, init.std, true_rows=true_size)
        # Rows of the vocabulary: [v/tp, h].
        self.weight = _parameter(
            (padded_size, hidden_size), Partition("tp", dim=0), self._tp, init, dtype
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Look up [s, ..] int64 ids as [s, .., h], equal on every tp rank.

        The output is [s/tp, .., h] under sequence parallelism.
        """
        check_ids(ids, self.true_size)
        if self._tp.size == 1:
            return lookup(ids, self.weight)
        rows = self.weight.shape[0]
        local = ids - self._tp.rank * rows
        elsewhere = (local < 0) | (local >= rows)
        found = lookup(local.masked_fill(elsewhere, 0), self.weight)
        reduce = reduce_scatter_to_sequence if self._sequence_parallel else reduce_from_tp
        return reduce(found.masked_fill(elsewhere.unsqueeze(-1), 0.0), self._tp)

    def extra_repr(self) -> str:
        """Return the whole sizes, for `print(model)`."""
        return f"{self.padded_size} / tp={self._tp.size}, {self.hidden_size}"


def fp8_products(
    config: Fp8Config, tp: Group, *, splits_output: bool, matrices: int = 1
) -> Fp8Products:
    """Return the products of a linear layer whose weight is split over `tp`."""
    is_hybrid = config.fp8_format is Fp8Format.HYBRID
    gradient_dtype = torch.float8_e5m2 if is_hybrid else torch.float8_e4m3fn
    return Fp8Products(
        Fp8Scaling(*FP8_BLOCKS[config.fp8_recipe], gradient_dtype, config.fp8_margin),
        splits_output=splits_output,
        reduce_max=partial(all_reduce, group=tp, op="max"),
        wgrad=config.fp8_wgrad,
        matrices=matrices,
    )


def linear_with_input_reduction(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tp: Group,
    *,
    sequence_parallel: bool = False,
    on_ring: bool = False,
    fp8: Fp8Products | None = None,
) -> Tensor:
    """Apply `F.linear` to a weight split by output features; sum the input's gradient over tp.

    Under sequence parallelism the input is [s/tp, .., in] and is gathered first; its gradient is
    summed and split again. Also right for the logits of a tied embedding: `weight` is then
    [v/tp, h].

    Args:
        on_ring: the product of each part of the sequence is computed while the next part arrives.
    """
    if tp.size == 1:
        return linear(hidden, weight, bias, fp8)
    return _LINEAR_WITH_INPUT_REDUCTION(hidden, weight, bias, tp, sequence_parallel, fp8, on_ring)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Products | None) -> Tensor:
    """Apply `F.linear` without reductions of sums; the weight's gradient may go its own way."""
    if fp8 is not None:
        return _LINEAR_WITH_INPUT_REDUCTION(hidden, weight, bias, _ALONE, False, fp8, False)
    if bypasses_autograd(weight):
        return _LINEAR(hidden, weight, bias)
    return linear_rows(hidden, weight, bias)


class _LinearContext(FunctionContext):
    tp: Group
    sequence_parallel: bool
    parameter: Tensor
    fp8: Fp8Products | None
    amax: Fp8Amax


_ALONE = Group(ranks=(0,), rank=0)


class _Split(NamedTuple):
    """Those attributes of `_LinearContext` that say how gradients are computed."""

    parameter: Tensor
    tp: Group = _ALONE
    sequence_parallel: bool = False
    fp8: Fp8Products | None = None
    amax: Fp8Amax = Fp8Amax()


class _Linear(torch.autograd.Function):
    """`F.linear` of one rank, but for the way of the weight's gradient.

    `_LinearWithInputReduction` does the same; what it does beside it takes longer than a small
    product.
    """

    @staticmethod
    def forward(ctx: _LinearContext, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.parameter = weight  # the saved one may come back as another tensor object
        return linear_rows(hidden, weight, bias)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        rows, shape = _rows(grad), hidden.shape
        grad_weight = defer_or_compute(ctx.parameter, hidden, grad) if needs_weight else None
        del hidden  # where it was recomputed, its gradient takes its place
        return (
            matrix_product(rows, weight).view(shape) if needs_input else None,
            grad_weight,
            rows.sum(dim=0) if needs_bias else None,
        )


_LINEAR: Callable[[Tensor, Tensor, Tensor | None], Tensor] = _Linear.apply


class _LinearWithInputReduction(torch.autograd.Function):
    """Reduces the input's gradient while the weight's is computed, to overlap them.

    As in Megatron-LM (Shoeybi et al. 2019, the conjugate operator f of section 3). Of a split
    sequence only this rank's part is kept for backward, and gathered again there while the input's
    gradient is computed (Korthikanti et al. 2022, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: _LinearContext,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tp: Group,
        sequence_parallel: bool,
        fp8: Fp8Products | None,
        on_ring: bool,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.tp, ctx.sequence_parallel, ctx.fp8 = tp, sequence_parallel, fp8
        ctx.parameter = weight  # the saved one may come back as another tensor object
        if on_ring:
            assert fp8 is None  # noqa: S101  # invariant: refused by preflight
            return _gathered_product(hidden, weight.t(), tp, bias=bias)
        hidden = all_gather(hidden, tp) if sequence_parallel else hidden
        output, ctx.amax = _product(hidden, weight, bias, fp8)
        return output

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_input, grad_weight = _gradients(
            grad, hidden, weight, ctx, needs_input=needs_input, needs_weight=needs_weight
        )
        grad_bias = _rows(grad).sum(dim=0) if needs_bias else None
        return grad_input, grad_weight, grad_bias, None, None, None, None


_LINEAR_WITH_INPUT_REDUCTION: Callable[..., Tensor] = _LinearWithInputReduction.apply


def _product(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, fp8: Fp8Products | None
) -> tuple[Tensor, Fp8Amax]:
    """Return the output of [.., in], and what the backward pass needs of products in FP8."""
    if fp8 is None:
        return linear_rows(hidden, weight, bias), Fp8Amax()
    output, amax = fp8.output(hidden, weight)
    return output if bias is None else output.add_(bias), amax


def _gradients(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    call: _LinearContext | _Split,
    *,
    needs_input: bool = True,
    needs_weight: bool = True,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of input and weight; the latter may go its own way."""
    gathering, reducing = Pending(hidden, None), None
    if call.sequence_parallel and needs_weight:
        gathering = start_all_gather(hidden.contiguous(), call.tp)
    grad_input: Tensor | None = None
    product: WeightProduct = weight_gradient
    if call.fp8 is not None:
        # Computed in any case: the ranks reduce the gradient's largest value together.
        grad_input, of_grad = call.fp8.input_gradient(grad, weight, call.amax)
        if call.fp8.wgrad:
            product = call.fp8.of_weight(call.amax, of_grad)
    elif needs_input:
        grad_input = matrix_product(_rows(grad), weight).view(*grad.shape[:-1], weight.shape[1])
    hidden = gathering.wait()
    if grad_input is not None:
        start = start_reduce_scatter if call.sequence_parallel else start_all_reduce
        reducing = start(grad_input, call.tp)
    grad_weight = None
    if needs_weight:
        grad_weight = defer_or_compute(call.parameter, hidden, grad, product)
    return None if reducing is None else reducing.wait(), grad_weight


class _RowOnRing(torch.autograd.Function):
    """The product of a layer split by input features, and the reduce-scatter of its parts.

    Each part of the sequence is multiplied while the sum for another one travels; in backward the
    gradients of parts are multiplied while others arrive.
    """

    @staticmethod
    def forward(ctx: _LinearContext, hidden: Tensor, weight: Tensor, tp: Group) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.tp, ctx.parameter = tp, weight
        return _summed_product(hidden, weight, tp)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _LinearContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        parameter = ctx.parameter if ctx.needs_input_grad[1] else None
        return (*_row_gradients(grad, hidden, weight, parameter, ctx.tp), None)


_ROW_ON_RING: Callable[[Tensor, Tensor, Group], Tensor] = _RowOnRing.apply


def _gathered_product(
    own: Tensor,
    matrix: Tensor,
    tp: Group,
    *,
    bias: Tensor | None = None,
    gathered: Tensor | None = None,
) -> Tensor:
    """Return the product of [s/tp, .., n] of all ranks, gathered, and an [n, m]: [s, .., m].

    Args:
        bias: [m], which is added.
        gathered: [s, .., n], which takes the gathered tensor.
    """
    shape = (tp.size * own.shape[0], *own.shape[1:-1], matrix.shape[1])
    products = own.new_empty(shape)
    places = products.chunk(tp.size)
    for at, part in zip(ring_order(tp.rank, tp.size), ring(own.contiguous(), tp)):
        matrix_product(_rows(part), matrix, bias, out=_rows(places[at]))
        if gathered is not None:
            gathered.chunk(tp.size)[at].copy_(part)
    return products


def _summed_product(hidden: Tensor, weight: Tensor, tp: Group) -> Tensor:
    """Return this rank's part [s/tp, .., out] of the sum of X W^T over ranks' X [s, .., in/tp]."""
    sequence_part(hidden.shape[0], tp)  # raises where it does not divide
    parts = hidden.chunk(tp.size)
    return sum_on_ring(lambda at: linear_rows(parts[at], weight, None), tp)


def _row_gradients(
    grad: Tensor, hidden: Tensor, weight: Tensor, parameter: Tensor | None, tp: Group
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of input and weight; the latter may go its own way.

    Args:
        grad: of the output, [s/tp, .., out].
        parameter: the weight itself; None: its gradient is not wanted.
    """
    whole = grad.new_empty((tp.size * grad.shape[0], *grad.shape[1:]))
    grad_input = _gathered_product(grad, weight, tp, gathered=whole)
    return grad_input, None if parameter is None else defer_or_compute(parameter, hidden, whole)


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def check_ids(ids: Tensor, true_size: int) -> None:
    """Refuse ids outside [0, true_size): by an exception on CPU, by a device assert on CUDA."""
    if ids.numel() == 0 or ids.is_meta:
        return
    if ids.device.type != "cpu":
        # Asynchronous: an exception would have to wait for the device at every step.
        torch._assert_async(((ids >= 0) & (ids < true_size)).all(), _OUTSIDE)
        return
    lowest, highest = (int(bound) for bound in ids.aminmax())
    if highest >= true_size:
        raise DataError(
            _OUTSIDE,
            found=f"token id {highest}, vocabulary of {true_size} (highest id {true_size - 1})",
            fix="use the tokenizer that the data was prepared with (--vocab-file, --vocab-size)",
        )
    if lowest < 0:
        raise DataError(
            "a token id is negative",
            found=f"token id {lowest}",
            fix="prepare the data again; ids start at 0",
        )


_OUTSIDE = "a token id is outside the vocabulary"


def _parameter(
    whole: tuple[int, ...],
    partition: Partition | None,
    tp: Group,
    init: Init,
    dtype: torch.dtype | None,
) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(local_shape(whole, partition, tp.size), dtype=dtype))
    set_parameter_metadata(parameter, init=init, partition=partition)
    return parameter
