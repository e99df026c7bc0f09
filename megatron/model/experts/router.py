"""Which experts a token takes, with what shares, and the losses that keep a router in order.

A loss of the router is of one sequence at a time and enters the step by its gradient alone, so that
nothing of it travels through the pipeline and no split of a batch changes it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.experts import LoadBalancing, RouterScoreFunction, TokenDropPolicy
from megatron.config.model import ModelConfig
from megatron.errors import MegatronError
from megatron.model.experts.balance import BusyExperts, balance_loss, sinkhorn, z_loss
from megatron.model.experts.capacity import WholeSequences, capacity_of, within_capacity
from megatron.model.init import weight_init
from megatron.model.specs import ModelBuild
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.mappings import reduce_from_tp
from megatron.mpu.partition import Init, InitKind, set_parameter_metadata
from megatron.ops.row_products import linear_rows


class Router(nn.Module):
    """Scores of every expert for every token; the best `moe_router_topk` are taken.

    Shares are the softmax over the scores of those taken, which is the softmax over all, scaled to
    a sum of 1 (Mixtral, arXiv 2401.04088, section 2.1); or before the choice, unscaled (Switch,
    arXiv 2101.03961, eq. 2). With the sigmoid, shares are the sigmoids of the scores of those
    taken, scaled to a sum of 1 if there are several (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 15).
    All are multiplied by `moe_router_topk_scaling_factor`. In fp32 or wider. With groups of experts
    see `best_experts`.

    With `moe_router_enable_expert_bias` experts are chosen by sigmoid and bias, and the bias has no
    part in the shares (eq. 16). It is a parameter that is not trained: whoever trains moves it by
    what `taken_load` counts.

    With `moe_expert_capacity_factor` an expert takes so many tokens of a sequence at most. What is
    dropped has the index after the last expert, and no share is scaled up for it. Loads, losses and
    biases are of what was chosen.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._experts, self._width = config.num_experts or 1, config.hidden_size
        self.taken, self._pre_softmax = config.moe_router_topk, config.moe_router_pre_softmax
        self._sigmoid = config.moe_router_score_function is RouterScoreFunction.SIGMOID
        self._scaling = config.moe_router_topk_scaling_factor
        self._groups = Groups(config.moe_router_num_groups or 1, config.moe_router_group_topk or 1)
        self._balance, self._z = config.balance_weight, config.moe_z_loss_coeff
        self._busy = BusyExperts(config.moe_router_load_balancing_type, build.ctx.dp)
        self._sinkhorn = config.moe_router_load_balancing_type is LoadBalancing.SINKHORN
        self._capacity = _Capacity.of(config)
        self._sequences = WholeSequences(build)
        self._has_loss, self.router_loss = config.has_router_loss, build.router_loss
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self._cp = build.ctx.cp
        # Whole on every tp rank: [experts, h].
        self.weight = nn.Parameter(torch.empty(self._experts, self._width, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=weight_init(config), sequence_parallel=self._split)
        self.bias: nn.Parameter | None = None
        if config.moe_router_add_bias:
            self.bias = nn.Parameter(torch.empty(self._experts, dtype=build.dtype))
            zeros = Init(InitKind.ZEROS)
            set_parameter_metadata(self.bias, init=zeros, sequence_parallel=self._split)
        self.expert_bias: nn.Parameter | None = None
        if config.moe_router_enable_expert_bias:
            dtype = torch.promote_types(build.dtype, torch.float32)
            bias = torch.empty(self._experts, dtype=dtype)
            self.expert_bias = nn.Parameter(bias, requires_grad=False)
            set_parameter_metadata(self.expert_bias, init=Init(InitKind.ZEROS))
        self._load: Tensor | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and experts of every token, [s, b, k] each, best first, for [s, b, h].

        Under sequence parallelism all of them are of this rank's part of the sequence. A choice
        that was dropped is the number of experts.
        """
        scores = linear_rows(hidden, self.weight, self.bias)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # The softmax over logs of sigmoids is the sigmoids over their sum, which may underflow.
        logits = F.logsigmoid(scores) if self._sigmoid else scores
        if self._pre_softmax:
            likely = torch.softmax(scores, dim=-1)
            chosen = self._choose(likely, scores)
            shares = likely.gather(-1, chosen)
        else:
            chosen = self._choose(self._affinity(logits), scores)
            best = logits.gather(-1, chosen)
            # Of one expert with the sigmoid alone, see `expert_problems`.
            shares = best.exp() if self.taken == 1 else torch.softmax(best, dim=-1)
        if self._scaling != 1.0:
            shares = shares * self._scaling
        taken = self._within_capacity(chosen, shares)
        if self.training and torch.is_grad_enabled():
            counts = counts_of(chosen, self._experts)
            loss = balance = None
            if self._has_loss:
                loss, balance = self._losses(scores, logits, counts)
            dropped = (taken == self._experts).sum().view(1)
            load = torch.cat([counts.sum(0), dropped])
            shares = _WITH_LOSS(shares, loss, balance, load, self)
        return shares, taken

    def _choose(self, affinity: Tensor, scores: Tensor) -> Tensor:
        if self._sinkhorn and self.training:
            affinity = sinkhorn(scores.flatten(0, 1)).view_as(scores)
        return best_experts(affinity, self.taken, self._groups)

    def _within_capacity(self, chosen: Tensor, shares: Tensor) -> Tensor:
        """Return `chosen` with the number of experts for each choice that is dropped."""
        if self._capacity is None:
            return chosen
        whole = self._sequences.gather(chosen)
        kept = within_capacity(
            whole,
            self._sequences.gather(shares.detach()),
            self._capacity.tokens(whole.shape[0], training=self.training),
            self._capacity.policy,
            experts=self._experts,
        )
        return chosen.masked_fill(~self._sequences.own(kept), self._experts)

    def note(self, balance: Tensor | None, load: Tensor) -> None:
        """Add what one backward pass has gone through: a loss, and a load (`taken_load`)."""
        if balance is not None:
            self.router_loss.note(balance)
        self._load = load if self._load is None else self._load + load

    def taken_load(self) -> Tensor:
        """Return what all backward passes since the last call went through: [experts + 1] int64.

        How many tokens chose each expert, and how many choices were dropped, of this rank's tokens;
        those of tensor-parallel ranks are the same without sequence parallelism.
        """
        load, self._load = self._load, None
        self._busy.forget()
        if load is None:
            return torch.zeros(self._experts + 1, dtype=torch.int64, device=self.weight.device)
        return load

    def _losses(self, scores: Tensor, logits: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return each loss summed over the sequences, or this rank's summand of it.

        Ranks that share sequences, over tp or cp, have a summand each.

        The second result is the balance alone, without its weight.
        """
        length = scores.shape[0] * self._cp.size * (self._tp.size if self._split else 1)
        loss = balance = scores.new_zeros(())
        if self._balance > 0:
            # As in the paper, of the best experts of all, whatever else has a say in the choice.
            is_best = self._groups.number == 1 and self.expert_bias is None
            if not is_best:
                counts = counts_of(logits.topk(self.taken, dim=-1).indices, self._experts)
            busy = counts.to(scores.dtype)
            if self._split:
                busy = reduce_from_tp(busy, self._tp)
            busy = reduce_from_tp(busy, self._cp)
            balance = balance_loss(logits, self._busy.of(busy), length, self.taken)
            loss = loss + self._balance * balance
        if self._z > 0:
            loss = loss + self._z * z_loss(scores, length)
        return loss, balance.detach()

    def _affinity(self, logits: Tensor) -> Tensor:
        """Return what experts are chosen by; what is added up are sigmoids, not their logs."""
        if self.expert_bias is not None:
            return logits.detach().exp() + self.expert_bias
        return logits.exp() if self._sigmoid and self._groups.number > 1 else logits

    def extra_repr(self) -> str:
        """Return the whole sizes, for `print(model)`."""
        return f"{self._width}, {self._experts}, taken={self.taken}"


class _Capacity(NamedTuple):
    """The capacity that the flags give an expert, by the length of a sequence."""

    taken: int
    experts: int
    factor: float
    eval_factor: float
    least: int
    policy: TokenDropPolicy

    @classmethod
    def of(cls, config: ModelConfig) -> "_Capacity | None":
        factor, in_evaluation = config.moe_expert_capacity_factor, config.moe_eval_capacity_factor
        if factor is None:
            return None
        return cls(
            config.moe_router_topk,
            config.num_experts or 1,
            factor,
            factor if in_evaluation is None else in_evaluation,
            config.moe_min_capacity,
            config.moe_token_drop_policy,
        )

    def tokens(self, length: int, *, training: bool) -> int:
        factor = self.factor if training else self.eval_factor
        return capacity_of(length, self.taken, self.experts, factor, self.least)


class Groups(NamedTuple):
    """The groups that experts are in, and how many of them a token takes experts of."""

    number: int = 1
    chosen: int = 1


def best_experts(affinity: Tensor, taken: int, groups: Groups) -> Tensor:
    """Return the experts of every token, [.., k] int64, best first.

    Those of the best groups alone, where the score of a group is the sum of the `k / chosen` best
    of its experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2: nodes are the groups).

    Args:
        affinity: [.., experts], of which neighbours are a group.
        taken: k.
    """
    if groups.number > 1:
        by_group = affinity.detach().view(*affinity.shape[:-1], groups.number, -1)
        of_groups = by_group.topk(taken // groups.chosen, dim=-1).values.sum(-1)
        best = torch.zeros_like(of_groups, dtype=torch.bool)
        best.scatter_(-1, of_groups.topk(groups.chosen, dim=-1).indices, True)
        affinity = by_group.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(-2)
    return affinity.topk(taken, dim=-1).indices


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Count the tokens of each sequence per expert, [b, experts], from indices [s, b, k].

    Choices that were dropped, of index `experts`, do not count.
    """
    return F.one_hot(chosen, experts + 1).sum(dim=(0, 2))[:, :experts]


class _RouterContext(FunctionContext):
    router: Router
    balance: Tensor | None
    load: Tensor


class _WithLoss(torch.autograd.Function):
    """Passes `shares` on; backward gives `loss`, if there is one, the gradient that is set.

    It notes `balance` and `load` there, since a recomputed layer too has only one backward pass.
    """

    @staticmethod
    def forward(
        ctx: _RouterContext,
        shares: Tensor,
        loss: Tensor | None,
        balance: Tensor | None,
        load: Tensor,
        router: Router,
    ) -> Tensor:
        del loss
        ctx.router, ctx.balance, ctx.load = router, balance, load
        return shares.view_as(shares)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(
        ctx: _RouterContext, grad: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        router, balance = ctx.router, ctx.balance
        router.note(balance, ctx.load)
        if balance is None:
            return grad, None, None, None, None
        value = router.router_loss.value
        if value is None:
            raise MegatronError(
                "internal error: the weight of a router's loss was not set for this step",
                found="a backward pass with --moe-aux-loss-coeff or --moe-z-loss-coeff",
                fix="set ModelBuild.router_loss.value before it, as the engines do",
            )
        # `value` may be a float64 scalar on the device.
        return grad, (torch.ones_like(balance) * value).to(balance.dtype), None, None, None


_WITH_LOSS: Callable[[Tensor, Tensor | None, Tensor | None, Tensor, Router], Tensor] = (
    _WithLoss.apply
)
