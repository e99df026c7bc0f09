"""A feed-forward half with several experts, of which each token takes some.

All tokens of an expert are one matrix. Each expert is split over tp as a dense MLP is: what is
summed over tp in backward is then the gradient of the input and of the shares, since both are
multiplied with split weights. Or experts are shared out over ep and their matrices over etp: tokens
go to all parts of their experts, and come back as summands. The router is whole on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron import device
from megatron.config.experts import MlpType
from megatron.config.model import ModelConfig
from megatron.errors import ConfigError
from megatron.model.experts.router import Router, counts_of
from megatron.model.init import residual_init, weight_init
from megatron.model.mlp import MLP, unit_of
from megatron.model.specs import ModelBuild
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.collectives import Pending, all_gather, start_all_to_all_rows
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
    InitKind,
    Partition,
    Within,
    local_shape,
    pieces,
    set_parameter_metadata,
)
from megatron.mpu.topology import Topology
from megatron.ops.fp8_products import Fp8Products
from megatron.ops.grouped_product import grouped_product, is_served
from megatron.ops.row_products import linear_rows, product_in_use

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
        self._repeated = build.ctx.etp_ep if build.repeats_tokens else None
        if self._shared_out:
            splits_tokens = self._split or build.repeats_tokens
            check_sharing_out(config, build.ctx.topology, splits_tokens=splits_tokens)
        self.router = Router(config, build)
        self.experts = Experts(config, build)
        width = config.shared_expert_width
        self.shared_expert = None if width is None else SharedExpert(config, build, width=width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [s, b, h] to [s, b, h], or under sequence parallelism [s/tp, b, h] to the same."""
        if self.shared_expert is None:
            return self._routed(hidden)
        if self._shared_out and self._repeated is None:
            return self._beside(self.shared_expert, hidden)
        # An accelerator computes it while the host waits for the sizes of the others' matrices.
        shared: Tensor = self.shared_expert(hidden)
        return self.shared_expert.join(shared, self._routed(hidden), hidden)

    def _beside(self, shared_expert: "SharedExpert", hidden: Tensor) -> Tensor:
        """Compute the halves of the shared expert while tokens travel to the others and back.

        In the backward pass autograd calls what was called last first, so that gradients travel
        beside the same halves. Without overlap the order is the same, and so are all sums.
        """
        shares, chosen = self.router(hidden)
        sent = self.experts.send(hidden, shares, chosen)
        middle = shared_expert.enter(hidden)
        back = self.experts.send_back(sent)
        shared = shared_expert.leave(middle)
        routed = self.experts.combine(sent, back, hidden.dtype)
        return shared_expert.join(shared, routed, hidden)

    def _routed(self, hidden: Tensor) -> Tensor:
        if self._shared_out and self._repeated is not None:
            return self._split_between(hidden, self._repeated)
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

    def _split_between(self, hidden: Tensor, group: Group) -> Tensor:
        """Send a part of the tokens that all ranks of a group have from each of them, without grad.

        Each row of every product is computed as without other ranks, and in one place.
        """
        rows = hidden.flatten(0, 1)
        count = -(-len(rows) // group.size)
        own = F.pad(rows, (0, 0, 0, count * group.size - len(rows))).chunk(group.size)[group.rank]
        own = own.unsqueeze(0)
        output = self.experts(own, *self.router(own))
        return all_gather(output[0], group)[: len(rows)].view_as(hidden)


class SharedExpert(MLP):
    """An MLP that all tokens take (DeepSeekMoE, arXiv 2401.06066, section 3.2), split over tp.

    With a gate its output is multiplied by the sigmoid of a product with the token, as in
    Qwen1.5-MoE. In a residual MoE it and the others are added up by two shares, the softmax over
    two products with the token (DeepSpeed-MoE, arXiv 2201.05596; the shares are
    those of DeepSpeed's `MoE(use_residual=True)`). Shares are fp32 or wider.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild, *, width: int) -> None:
        super().__init__(config, build, width=width)
        self._residual = config.mlp_type is MlpType.RESIDUAL
        self.gate: nn.Parameter | None = None
        self.gate_bias: nn.Parameter | None = None
        # Whole on every tp rank: [1, h]; in a residual MoE [2, h], of the others and of this one.
        outputs = 2 if self._residual else 1
        split = build.sequence_parallel
        if self._residual or config.moe_shared_expert_gate:
            self.gate = nn.Parameter(torch.empty(outputs, config.hidden_size, dtype=build.dtype))
            set_parameter_metadata(self.gate, init=weight_init(config), sequence_parallel=split)
        if self._residual:
            self.gate_bias = nn.Parameter(torch.empty(outputs, dtype=build.dtype))
            zeros = Init(InitKind.ZEROS)
            set_parameter_metadata(self.gate_bias, init=zeros, sequence_parallel=split)

    def join(self, output: Tensor, routed: Tensor, hidden: Tensor) -> Tensor:
        """Return the sum of the output of this MLP and of that of the others for `hidden`."""
        if self.gate is None:
            return output + routed
        scores = linear_rows(hidden, self.gate, self.gate_bias)  # [s, b, 1 or 2]
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if self._residual:
            of_others, own = torch.split(torch.softmax(scores, dim=-1), 1, dim=-1)
            return (routed * of_others + output * own).to(output.dtype)
        return (output * torch.sigmoid(scores)).to(output.dtype) + routed


def check_sharing_out(config: ModelConfig, grid: Topology, *, splits_tokens: bool) -> None:
    """Check that the experts of a layer can be shared out over ep, and their matrices over etp.

    Args:
        splits_tokens: whether tensor-parallel ranks send different tokens to experts.

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
    if grid.tp > 1 and not splits_tokens:
        raise ConfigError(
            "tensor-parallel ranks would send the same tokens to experts that are shared out",
            found=f"{given}, --expert-tensor-parallel-size {grid.expert_tp}, "
            f"--tensor-model-parallel-size {grid.tp} without --sequence-parallel",
            fix="add --sequence-parallel",
        )


class Experts(nn.Module):
    """All experts of a layer, each an MLP, as two stacks of matrices.

    Where they are shared out a rank holds `experts / ep` of them, of each a part over etp.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._activate = unit_of(config, fused=build.fuse_gated_units)
        halves = 1 if config.glu is None else 2
        width = config.expert_width
        self._experts, grid = config.num_experts or 1, build.ctx.topology
        # Where experts are split over tp no row travels.
        self._group, self._ep, self._etp = Group(ranks=(0,), rank=0), 1, 1
        self._overlaps = build.overlap_shared_expert
        self._drops = config.moe_expert_capacity_factor is not None
        # What an MLP adds at its end is cut into parts that add up, as its second matrix is.
        enter, leave, end = (
            Partition("tp", dim=1, blocks=halves),
            Partition("tp", dim=2),
            Partition("tp", dim=1),
        )
        if grid.shares_experts_out:
            self._group, self._ep, self._etp = build.ctx.etp_ep, grid.ep, grid.expert_tp
            enter = Partition(EXPERTS, within=Within(1, self._etp, blocks=halves))
            leave = Partition(EXPERTS, within=Within(2, self._etp))
            end = Partition(EXPERTS, within=Within(1, self._etp))
        hidden, has_bias = config.hidden_size, config.add_bias_linear
        self.fc1 = GroupedLinear(
            (self._experts, halves * width, hidden),
            enter,
            weight_init(config),
            build,
            bias=enter if has_bias else None,
        )
        self.fc2 = GroupedLinear(
            (self._experts, hidden, width),
            leave,
            residual_init(config),
            build,
            bias=end if has_bias else None,
        )

    def forward(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Return the output [s, b, h], or this rank's summand of it where experts are split.

        Args:
            hidden: [s, b, h]; whole where experts are split over tp.
            shares: [s, b, k], fp32 or wider.
            chosen: [s, b, k] int64, the experts that they are the shares of; the number of experts
                for a choice that was dropped, which adds nothing.
        """
        sent = self.send(hidden, shares, chosen)
        return self.combine(sent, self.send_back(sent), hidden.dtype)

    def send(self, hidden: Tensor, shares: Tensor, chosen: Tensor) -> "SentRows":
        """Begin to send tokens to their experts; arguments as for `forward`."""
        if self._etp > 1:
            chosen = parts_of_experts(chosen, self._experts, ep=self._ep, etp=self._etp)
            shares = shares.repeat_interleave(self._etp, dim=-1)
        taken, width = chosen.shape[-1], hidden.shape[-1]
        order = chosen.reshape(-1).argsort(stable=True)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        counts = counts_of(chosen, self._experts * self._etp).sum(dim=0)
        rows = _TAKE(hidden.reshape(-1, width), order, back, taken)
        if self._group.size == 1:
            groups = RowGroups(counts)
            plan = DispatchPlan.alone(groups, sum(groups.sizes) if self._drops else len(order))
        else:
            group = self._group
            plan = dispatch_plan(gather_counts(counts, group), group.rank, rows.device)
        traffic = _Traffic(plan.sends, plan.receives, self._group, self._overlaps)
        rows = _START(_first(rows, sum(plan.sends)), traffic)
        return SentRows(rows, traffic, plan, order, back, shares)

    def send_back(self, sent: "SentRows") -> tuple[Tensor, "_Traffic"]:
        """Compute with what has arrived, and begin to send the results back."""
        plan, rows = sent.plan, _ARRIVE(sent.rows, sent.traffic)
        if plan.order is not None and plan.back is not None:
            rows = self._compute(_TAKE(rows, plan.order, plan.back, 1), plan.groups)
            rows = _TAKE(rows, plan.back, plan.order, 1)
        else:
            rows = self._compute(rows, plan.groups)
        traffic = _Traffic(plan.receives, plan.sends, self._group, self._overlaps)
        return _START(rows, traffic), traffic

    def combine(
        self, sent: "SentRows", results: tuple[Tensor, "_Traffic"], dtype: torch.dtype
    ) -> Tensor:
        """Return the sum of results times shares for each token: [s, b, h]."""
        rows = _ARRIVE(*results)
        if (dropped := len(sent.order) - len(rows)) > 0:  # the last ones in this order
            rows = F.pad(rows, (0, 0, 0, dropped))
        rows = _TAKE(rows, sent.back, sent.order, 1)
        output = (rows.view(*sent.shares.shape, -1) * sent.shares.unsqueeze(-1)).sum(dim=-2)
        return output.to(dtype)

    def _compute(self, rows: Tensor, groups: "RowGroups") -> Tensor:
        """Apply the experts of this rank to rows that are sorted by expert."""
        return self.fc2(self._activate(self.fc1(rows, groups)), groups)  # type: ignore[no-any-return]


class RowGroups:
    """How many rows stand in each of several groups, [groups]: on the host or on the device."""

    def __init__(self, counts: Tensor) -> None:
        self.counts = counts

    @cached_property
    def sizes(self) -> list[int]:
        """The same for the host, which an accelerator makes wait once for it."""
        found: list[int] = device.values_for_host(self.counts, ROW_COUNTS).tolist()
        return found


def _first(rows: Tensor, number: int) -> Tensor:
    """Return the first rows; all of them without the copy that the gradient of a part takes."""
    return rows if number == len(rows) else rows[:number]


class GroupedLinear(nn.Module):
    """Rows in groups, each multiplied by its own matrix.

    Args:
        shape: of the whole weight, [groups, out, in].
        bias: how what is added to rows is split, [groups, out]; None: nothing is. Where the outputs
            of a rank are summands of all features, it adds the features that it holds.
    """

    fp8: Fp8Products | None = None

    def __init__(
        self,
        shape: tuple[int, int, int],
        partition: Partition,
        init: Init,
        build: ModelBuild,
        *,
        bias: Partition | None = None,
    ) -> None:
        super().__init__()
        local = local_shape(shape, partition, build.ctx.share(partition)[1])
        self._whole, self._here = shape, local
        self.weight = nn.Parameter(torch.empty(local, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=init, partition=partition)
        self.bias: nn.Parameter | None = None
        if bias is not None:
            index, size = build.ctx.share(bias)
            held = local_shape(shape[:2], bias, size)
            self.bias = nn.Parameter(torch.empty(held, dtype=build.dtype))
            set_parameter_metadata(self.bias, init=Init(InitKind.ZEROS), partition=bias)
            features = pieces(shape[:2], bias, index, size)[0].global_[1]
            # Zeros for the features of other ranks; none where the outputs are split alike.
            around = (features.start, local[1] - features.stop)
            self._around = around if held[1] < local[1] else (0, 0)
        if build.fp8 is not None:
            self.fp8 = fp8_products(
                build.fp8, build.ctx.tp, splits_output=partition.dim == 1, matrices=local[0]
            )

    def forward(self, rows: Tensor, groups: RowGroups) -> Tensor:
        """Map [n, in] to [n, out], where rows stand in order of their groups."""
        product = product_in_use(self.weight)
        if (
            product is None
            and self.bias is None
            and self.fp8 is None
            and is_served(rows, self.weight)
        ):
            return grouped_product(rows, self.weight, groups.counts.to(rows.device))
        weights = self.weight.unbind(0)  # one by one, each would have a gradient of the size of all
        biases: Sequence[Tensor | None] = [None] * len(weights)
        if self.bias is not None:
            whole = self.bias if self._around == (0, 0) else F.pad(self.bias, self._around)
            biases = whole.unbind(0)
        each = zip(torch.split(rows, groups.sizes), weights, biases)
        if product is not None and self.fp8 is None:
            parts = [product(part, bias, group=at) for at, (part, _, bias) in enumerate(each)]
            return torch.cat(parts)
        return torch.cat([linear(group, weight, bias, self.fp8) for group, weight, bias in each])

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
    source; `back` is its inverse; both are None where they are sorted. `groups` are the rows of
    each of the rank's experts.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    groups: RowGroups
    order: Tensor | None
    back: Tensor | None

    @classmethod
    def alone(cls, groups: RowGroups, rows: int) -> "DispatchPlan":
        """Return the plan of a rank that has all experts."""
        return cls((rows,), (rows,), groups, None, None)


@dataclass(slots=True)
class _Traffic:
    """An exchange of rows and, in the backward pass, that of their gradients.

    Unless it overlaps with what is called meanwhile, it is over when it has begun.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    group: Group
    overlaps: bool
    pending: Pending | None = None

    def start(self, rows: Tensor, *, back: bool = False) -> Tensor:
        sends, receives = (self.receives, self.sends) if back else (self.sends, self.receives)
        self.pending = start_all_to_all_rows(rows, sends, receives, self.group)
        return self.pending.tensor if self.overlaps else self.pending.wait()

    def wait(self) -> Tensor:
        assert self.pending is not None  # noqa: S101  # invariant: begun before it is waited for
        arrived, self.pending = self.pending.wait(), None
        return arrived


class SentRows(NamedTuple):
    """Rows of tokens on the way to their experts, and how the results are put together."""

    rows: Tensor
    traffic: _Traffic
    plan: DispatchPlan
    order: Tensor
    back: Tensor
    shares: Tensor


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
        groups=RowGroups(arriving.sum(0)),
        order=order,
        back=order.argsort(),
    )


class _TrafficContext(FunctionContext):
    traffic: _Traffic


class _Start(torch.autograd.Function):
    """Begin to send rows; in the backward pass wait for their gradients.

    The result has no values before `_Arrive`, its only reader, whose backward begins to send the
    gradients and whose result here is none.
    """

    @staticmethod
    def forward(ctx: _TrafficContext, rows: Tensor, traffic: _Traffic) -> Tensor:
        ctx.traffic = traffic
        arrives = traffic.start(rows)
        return arrives.view_as(arrives)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _TrafficContext, grad: Tensor) -> tuple[Tensor, None]:
        del grad
        return ctx.traffic.wait(), None


class _Arrive(torch.autograd.Function):
    """Wait for rows; in the backward pass begin to send their gradients."""

    @staticmethod
    def forward(ctx: _TrafficContext, rows: Tensor, traffic: _Traffic) -> Tensor:
        ctx.traffic = traffic
        traffic.wait()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _TrafficContext, grad: Tensor) -> tuple[Tensor, None]:
        ctx.traffic.start(grad, back=True)
        return grad, None


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


_START: Callable[[Tensor, _Traffic], Tensor] = _Start.apply
_ARRIVE: Callable[[Tensor, _Traffic], Tensor] = _Arrive.apply
_TAKE: Callable[[Tensor, Tensor, Tensor, int], Tensor] = _Take.apply
