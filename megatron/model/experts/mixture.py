"""A feed-forward half with several experts, of which each token takes some.

All tokens of an expert are one matrix. Each expert is split over tp as a dense MLP is: what is
summed over tp in backward is then the gradient of the input and of the shares, since both are
multiplied with split weights. Or experts are shared out over ep and their matrices over etp: tokens
go to all parts of their experts, and come back as summands. The router is whole on every rank.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron import device
from megatron.config.model import ModelConfig
from megatron.errors import ConfigError
from megatron.model.experts.router import Router, counts_of
from megatron.model.init import residual_init, weight_init
from megatron.model.mlp import MLP, unit_of
from megatron.model.specs import ModelBuild
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import all_gather, all_to_all_rows
from megatron.mpu.context import Group
from megatron.mpu.layers import fp8_products, linear
from megatron.mpu.mappings import (
    copy_to_tp,
    gather_from_sequence,
    reduce_from_tp,
    reduce_scatter_to_sequence,
)
from megatron.mpu.partition import (
    EXPERTS,
    Init,
    Partition,
    Within,
    local_shape,
    set_parameter_metadata,
)
from megatron.mpu.topology import Topology
from megatron.ops.fp8_products import Fp8Products

ROW_COUNTS = "rows of each expert"  # what the host has to know of every layer


def build_feed_forward(config: ModelConfig, build: ModelBuild, *, layer: int) -> nn.Module:
    """Return the feed-forward half that the config gives a block; [s, b, h] to the same."""
    return (MixtureOfExperts if config.expert_layers[layer] else MLP)(config, build)


class MixtureOfExperts(nn.Module):
    """The sum over a token's experts of share times expert(x) (Shazeer et al. 2017, 1701.06538).

    To it a shared expert adds what it makes of all tokens.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self._shared_out = build.ctx.topology.shares_experts_out
        if self._shared_out:
            check_sharing_out(config, build.ctx.topology, sequence_parallel=self._split)
        self.router = Router(config, build)
        self.experts = Experts(config, build)
        shared = config.moe_shared_expert_intermediate_size
        self.shared_expert = None if shared is None else SharedExpert(config, build, width=shared)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        if self.shared_expert is None:
            return self._routed(hidden)
        # An accelerator computes it while the host waits for the sizes of the others' matrices.
        shared: Tensor = self.shared_expert(hidden)
        return shared + self._routed(hidden)

    def _routed(self, hidden: Tensor) -> Tensor:
        shares, chosen = self.router(hidden)
        if self._shared_out:
            # Every rank has other tokens, and the parts of an expert add up where they come back.
            output: Tensor = self.experts(hidden, shares, chosen)
            return output
        enter = gather_from_sequence if self._split else copy_to_tp
        shares, hidden = enter(shares, self._tp), enter(hidden, self._tp)
        if self._split:
            chosen = gather_from_sequence(chosen, self._tp)
        partial = self.experts(hidden, shares, chosen)
        leave = reduce_scatter_to_sequence if self._split else reduce_from_tp
        return leave(partial, self._tp)


class SharedExpert(MLP):
    """An MLP that all tokens take (DeepSeekMoE, arXiv 2401.06066, section 3.2), split over tp.

    With a gate its output is multiplied by the sigmoid of a product with the token, as in
    Qwen1.5-MoE; that share is fp32 or wider.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, width: int) -> None:
        super().__init__(config, build, width=width)
        self.gate = None
        if config.moe_shared_expert_gate:
            # Whole on every tp rank: [1, h].
            self.gate = nn.Parameter(torch.empty(1, config.hidden_size, dtype=build.dtype))
            set_parameter_metadata(
                self.gate, init=weight_init(config), sequence_parallel=build.sequence_parallel
            )

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        output = super().forward(hidden)
        if self.gate is None:
            return output
        scores = F.linear(hidden, self.gate)  # [s, b, 1]
        share = torch.sigmoid(scores.to(torch.promote_types(scores.dtype, torch.float32)))
        return (output * share).to(output.dtype)


def check_sharing_out(config: ModelConfig, grid: Topology, *, sequence_parallel: bool) -> None:
    """Check that the experts of a layer can be shared out over ep, and their matrices over etp.

    Raises:
        ConfigError: they do not divide, or tensor-parallel ranks would send the same tokens.
    """
    given = f"--expert-model-parallel-size {grid.ep}"
    if config.expert_width % grid.expert_tp:
        raise ConfigError(
            "the matrices of an expert cannot be shared out evenly",
            found=f"experts of width {config.expert_width}, --expert-tensor-parallel-size "
            f"{grid.expert_tp}",
            fix="use a size that divides the width, such as 1",
        )
    if (config.num_experts or 1) % grid.ep:
        raise ConfigError(
            "the experts cannot be shared out evenly",
            found=f"--num-experts {config.num_experts or 1}, {given}",
            fix="use a size that divides the number of experts",
        )
    if grid.tp > 1 and not sequence_parallel:
        raise ConfigError(
            "tensor-parallel ranks would send the same tokens to experts that are shared out",
            found=f"{given}, --expert-tensor-parallel-size {grid.expert_tp}, "
            f"--tensor-model-parallel-size {grid.tp} without --sequence-parallel",
            fix="add --sequence-parallel",
        )


class Experts(nn.Module):
    """All experts of a layer, each an MLP without biases, as two stacks of matrices.

    Where they are shared out a rank holds `experts / ep` of them, of each a part over etp.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._activate = unit_of(config, fused=build.fuse_gated_units)
        halves = 1 if config.glu is None else 2
        width = config.expert_width
        self._experts, grid = config.num_experts or 1, build.ctx.topology
        self._group, self._ep, self._etp = build.ctx.etp_ep, 1, 1
        enter, leave = Partition("tp", dim=1, blocks=halves), Partition("tp", dim=2)
        if grid.shares_experts_out:
            self._ep, self._etp = grid.ep, grid.expert_tp
            enter = Partition(EXPERTS, within=Within(1, self._etp, blocks=halves))
            leave = Partition(EXPERTS, within=Within(2, self._etp))
        self.fc1 = GroupedLinear(
            (self._experts, halves * width, config.hidden_size), enter, weight_init(config), build
        )
        self.fc2 = GroupedLinear(
            (self._experts, config.hidden_size, width), leave, residual_init(config), build
        )

    def forward(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return the output [s, b, h], or this rank's summand of it where experts are split.

        Args:
            hidden: [s, b, h]; whole where experts are split over tp.
            shares: [s, b, k], fp32 or wider.
            chosen: [s, b, k] int64, the experts that they are the shares of; the number of experts
                for a choice that was dropped, which adds nothing.
        """
        if self._etp > 1:
            chosen = parts_of_experts(chosen, self._experts, ep=self._ep, etp=self._etp)
            shares = shares.repeat_interleave(self._etp, dim=-1)
        taken, width = chosen.shape[-1], hidden.shape[-1]
        order = chosen.reshape(-1).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        # On an accelerator this waits for it: sizes of matrices are known to the host.
        counts = counts_of(chosen, self._experts * self._etp).sum(dim=0)
        rows = _TAKE(hidden.reshape(-1, width), order, back, taken)
        if self._ep * self._etp == 1:
            on_host = device.values_for_host(counts, ROW_COUNTS).tolist()
            rows = self._compute(_first(rows, sum(on_host)), on_host)
        else:
            group = self._group
            plan = dispatch_plan(gather_counts(counts, group), group.rank, rows.device)
            rows = _first(rows, sum(plan.sends))
            here = _TAKE(_TO_EXPERTS(rows, plan, group), plan.order, plan.back, 1)
            here = _TAKE(self._compute(here, plan.counts), plan.back, plan.order, 1)
            rows = _TO_EXPERTS(here, plan.reversed(), group)
        if (dropped := len(order) - len(rows)) > 0:  # the last ones in this order
            rows = F.pad(rows, (0, 0, 0, dropped))
        rows = _TAKE(rows, back, order, 1)
        output = (rows.view(*chosen.shape, width) * shares.unsqueeze(-1)).sum(dim=-2)
        return output.to(hidden.dtype)

    def _compute(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Apply the experts of this rank to rows that are sorted by expert."""
        return self.fc2(self._activate(self.fc1(rows, counts)), counts)  # type: ignore[no-any-return]


def _first(rows: Tensor, number: int) -> Tensor:
    """Return the first rows; all of them without the copy that the gradient of a part takes."""
    return rows if number == len(rows) else rows[:number]


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
        local = local_shape(shape, partition, build.ctx.share(partition)[1])
        self._whole, self._here = shape, local
        self.weight = nn.Parameter(torch.empty(local, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=init, partition=partition)
        if build.fp8 is not None:
            self.fp8 = fp8_products(
                build.fp8, build.ctx.tp, splits_output=partition.dim == 1, matrices=local[0]
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


def parts_of_experts(chosen: Tensor, experts: int, *, ep: int, etp: int) -> Tensor:
    """Return for each choice [.., k] the etp parts of that expert: [.., k etp] int64.

    Parts are numbered by rank of `etp_ep`, and on a rank by expert: rank (e, t), of which t is the
    faster, has part t of experts e E/ep and following. A dropped choice, of index E, is E etp.
    """
    own = experts // ep
    parts = torch.arange(etp, device=chosen.device)
    owner, expert = chosen // own, chosen % own
    found = (owner.unsqueeze(-1) * etp + parts) * own + expert.unsqueeze(-1)
    return found.flatten(-2).clamp(max=experts * etp)


class DispatchPlan(NamedTuple):
    """Which rows a rank sends to the others, and in what order it computes with what arrives.

    `order` sorts arrived rows, which stand by source and then by expert, by expert and then by
    source; `back` is its inverse. `counts` are the rows of each of the rank's experts.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...]
    order: Tensor
    back: Tensor

    def reversed(self) -> "DispatchPlan":
        """Return the plan by which the rows go back."""
        return self._replace(sends=self.receives, receives=self.sends)


def gather_counts(counts: Tensor, group: Group) -> Tensor:
    """Return on the host how many rows each rank has for each part of an expert: [n, parts]."""
    # On an accelerator this waits for it: sizes of messages are known to the host.
    return device.values_for_host(all_gather(counts.unsqueeze(0), group), ROW_COUNTS)


def dispatch_plan(counts: Tensor, rank: int, device: torch.device) -> DispatchPlan:
    """Return the plan of one rank of n from the rows of all for all parts of experts: [n, parts].

    The counts are on the host, the orders on `device`.
    """
    ranks, experts = counts.shape
    own = experts // ranks
    arriving = counts[:, rank * own : (rank + 1) * own]  # [source, own expert]
    experts_of_rows = torch.arange(own).repeat(ranks).repeat_interleave(arriving.reshape(-1))
    order = experts_of_rows.argsort(stable=True).to(device)
    return DispatchPlan(
        sends=tuple(counts[rank].view(ranks, own).sum(1).tolist()),
        receives=tuple(arriving.sum(1).tolist()),
        counts=tuple(arriving.sum(0).tolist()),
        order=order,
        back=order.argsort(),
    )


class _DispatchContext(FunctionContext):
    plan: DispatchPlan
    group: Group


class _ToExperts(torch.autograd.Function):
    """Send rows to the ranks of their experts; the gradients come back the same way."""

    @staticmethod
    def forward(ctx: _DispatchContext, rows: Tensor, plan: DispatchPlan, group: Group) -> Tensor:
        ctx.plan, ctx.group = plan, group
        return all_to_all_rows(rows, plan.sends, plan.receives, group)

    @staticmethod
    def backward(ctx: _DispatchContext, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_to_all_rows(grad, ctx.plan.receives, ctx.plan.sends, ctx.group), None, None


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


_TO_EXPERTS: Callable[[Tensor, DispatchPlan, Group], Tensor] = _ToExperts.apply
_TAKE: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Take.apply
