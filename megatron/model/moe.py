"""A feed-forward half with several experts, of which each token takes some; none is dropped.

All tokens of an expert are one matrix, in the order in which they stand in the batch. Each expert
is split over tp as a dense MLP is; the router is whole on every rank. What is summed over tp in
backward is the gradient of the input and of the shares, since both are multiplied with split
weights.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig
from megatron.model.init import residual_init, weight_init
from megatron.model.mlp import MLP, unit_of
from megatron.model.moe_router import Router, counts_of
from megatron.model.specs import ModelBuild
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.layers import fp8_products, linear
from megatron.mpu.mappings import (
    copy_to_tp,
    gather_from_sequence,
    reduce_from_tp,
    reduce_scatter_to_sequence,
)
from megatron.mpu.partition import Init, Partition, local_shape, set_parameter_metadata
from megatron.ops.fp8_products import Fp8Products


def build_feed_forward(config: ModelConfig, build: ModelBuild) -> nn.Module:
    """Return the feed-forward half of a block that the config asks for; [s, b, h] to the same."""
    return MixtureOfExperts(config, build) if config.has_experts else MLP(config, build)


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of share times expert(x) (Shazeer et al. 2017, 1701.06538)."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self.router = Router(config, build)
        self.experts = Experts(config, build)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        shares, chosen = self.router(hidden)
        enter = gather_from_sequence if self._split else copy_to_tp
        shares, hidden = enter(shares, self._tp), enter(hidden, self._tp)
        if self._split:
            chosen = gather_from_sequence(chosen, self._tp)
        partial = self.experts(hidden, shares, chosen)
        leave = reduce_scatter_to_sequence if self._split else reduce_from_tp
        return leave(partial, self._tp)


class Experts(nn.Module):
    """All experts of a layer, each an MLP without biases, as two stacks of matrices."""

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._activate = unit_of(config, fused=build.fuse_gated_units)
        halves = 1 if config.glu is None else 2
        width = config.expert_width
        self._experts = experts = config.num_experts or 1
        self.fc1 = GroupedLinear(
            (experts, halves * width, config.hidden_size),
            Partition("tp", dim=1, blocks=halves),
            weight_init(config),
            build,
        )
        self.fc2 = GroupedLinear(
            (experts, config.hidden_size, width),
            Partition("tp", dim=2),
            residual_init(config),
            build,
        )

    def forward(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return this rank's summand of the output, [s, b, h].

        Args:
            hidden: [s, b, h], whole.
            shares: [s, b, k], fp32 or wider.
            chosen: [s, b, k] int64, the experts that they are the shares of.
        """
        taken, width = chosen.shape[-1], hidden.shape[-1]
        order = chosen.reshape(-1).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        # On an accelerator this waits for it: sizes of matrices are known to the host.
        counts = counts_of(chosen, self._experts).sum(dim=0).tolist()
        rows = _TAKE(hidden.reshape(-1, width), order, back, taken)
        middle = self._activate(self.fc1(rows, counts))
        rows = _TAKE(self.fc2(middle, counts), back, order, 1)
        output = (rows.view(*chosen.shape, width) * shares.unsqueeze(-1)).sum(dim=-2)
        return output.to(hidden.dtype)


class GroupedLinear(nn.Module):
    """Rows in groups, each multiplied by its own matrix.

    Args:
        shape: of the whole weight, [groups, out, in].
    """

    fp8: Fp8Products | None = None

    def __init__(
        self, shape: tuple[int, int, int], partition: Partition, init: Init, build: ModelBuild
    ) -> None:
        super().__init__()
        local = local_shape(shape, partition, build.ctx.tp.size)
        self._whole, self._here = shape, local
        self.weight = nn.Parameter(torch.empty(local, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=init, partition=partition)
        if build.fp8 is not None:
            self.fp8 = fp8_products(
                build.fp8, build.ctx.tp, splits_output=partition.dim == 1, matrices=shape[0]
            )

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Map [n, in] to [n, out]; the first counts[0] rows are of group 0, and so on."""
        # Unbound at once: taken one by one, each would have a gradient of the size of all.
        weights = self.weight.unbind(0)
        groups = torch.split(rows, list(counts))
        return torch.cat(
            [linear(group, weight, None, self.fp8) for group, weight in zip(groups, weights)]
        )

    def extra_repr(self) -> str:
        """Return the global sizes, for `print(model)`."""
        return f"{self._whole} in all, {self._here} here"


class _TakeContext(FunctionContext):
    copies: int


class _Take(torch.autograd.Function):
    """Reorder rows, where each row occurs `copies` times in the order's indices.

    Its gradient sums the copies of a row side by side, always in the same order, which adding into
    rows by index does not do on an accelerator.
    """

    @staticmethod
    def forward(
        ctx: _TakeContext, rows: Tensor, order: Tensor, back: Tensor, copies: int
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return rows.index_select(0, order if copies == 1 else order // copies)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _TakeContext, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        rows = grad.index_select(0, back)
        if ctx.copies > 1:
            rows = rows.view(-1, ctx.copies, rows.shape[-1]).sum(dim=1)
        return rows, None, None, None


_TAKE: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Take.apply
