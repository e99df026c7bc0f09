"""Which experts a token takes, with what shares, and the losses that keep a router in order.

A loss of the router is of one sequence at a time and enters the step by its gradient alone, so that
nothing of it travels through the pipeline and no split of a batch changes it.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.experts import RouterScoreFunction
from megatron.config.model import ModelConfig
from megatron.errors import MegatronError
from megatron.model.init import weight_init
from megatron.model.specs import ModelBuild, RouterLoss
from megatron.mpu.autograd import FunctionContext
from megatron.mpu.mappings import reduce_from_tp
from megatron.mpu.partition import set_parameter_metadata


class Router(nn.Module):
    """Scores of every expert for every token; the best `moe_router_topk` are taken.

    Shares are the softmax over the scores of those taken, which is the softmax over all, scaled to
    a sum of 1 (Mixtral, arXiv 2401.04088, section 2.1); or before the choice, unscaled (Switch,
    arXiv 2101.03961, eq. 2). With the sigmoid, shares are the sigmoids of the scores of those
    taken, scaled to a sum of 1 if there are several (DeepSeek-V3, arXiv 2412.19437, eq. 13 to 15).
    All are multiplied by `moe_router_topk_scaling_factor`. In fp32 or wider.
    """

    def __init__(self, config: ModelConfig, build: ModelBuild) -> None:
        super().__init__()
        self._experts, self._width = config.num_experts or 1, config.hidden_size
        self.taken, self._pre_softmax = config.moe_router_topk, config.moe_router_pre_softmax
        self._sigmoid = config.moe_router_score_function is RouterScoreFunction.SIGMOID
        self._scaling = config.moe_router_topk_scaling_factor
        self._balance, self._z = config.balance_weight, config.moe_z_loss_coeff
        self._has_loss, self._router_loss = config.has_router_loss, build.router_loss
        self._tp, self._split = build.ctx.tp, build.sequence_parallel
        self._cp = build.ctx.cp
        # Whole on every tp rank: [experts, h].
        self.weight = nn.Parameter(torch.empty(self._experts, self._width, dtype=build.dtype))
        set_parameter_metadata(self.weight, init=weight_init(config), sequence_parallel=self._split)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return shares and experts of every token, [s, b, k] each, best first, for [s, b, h].

        Under sequence parallelism all of them are of this rank's part of the sequence.
        """
        scores = F.linear(hidden, self.weight)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # The softmax over logs of sigmoids is the sigmoids over their sum, which may underflow.
        logits = F.logsigmoid(scores) if self._sigmoid else scores
        if self._pre_softmax:
            shares, chosen = torch.softmax(scores, dim=-1).topk(self.taken, dim=-1)
        else:
            best, chosen = logits.topk(self.taken, dim=-1)
            shares = torch.softmax(best, dim=-1)
            if self.taken == 1:  # with the sigmoid alone, see `expert_problems`
                shares = best.exp()
        if self._scaling != 1.0:
            shares = shares * self._scaling
        if self._has_loss and self.training and torch.is_grad_enabled():
            shares = _WITH_LOSS(shares, *self._losses(scores, logits, chosen), self._router_loss)
        return shares, chosen

    def _losses(self, scores: Tensor, logits: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return each loss summed over the sequences, or this rank's summand of it.

        Ranks that share sequences, over tp or cp, have a summand each.

        The second result is the balance alone, without its weight.
        """
        length = scores.shape[0] * self._cp.size * (self._tp.size if self._split else 1)
        loss = balance = scores.new_zeros(())
        if self._balance > 0:
            busy = counts_of(chosen, scores.shape[-1]).to(scores.dtype)
            if self._split:
                busy = reduce_from_tp(busy, self._tp)
            busy = reduce_from_tp(busy, self._cp)
            balance = balance_loss(logits, busy, length, self.taken)
            loss = loss + self._balance * balance
        if self._z > 0:
            loss = loss + self._z * z_loss(scores, length)
        return loss, balance.detach()

    def extra_repr(self) -> str:
        """Return the whole sizes, for `print(model)`."""
        return f"{self._width}, {self._experts}, taken={self.taken}"


def counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Count the tokens of each sequence per expert, [b, experts], from indices [s, b, k]."""
    return F.one_hot(chosen, experts).sum(dim=(0, 2))


def balance_loss(scores: Tensor, busy: Tensor, length: int, taken: int) -> Tensor:
    """Return the sum over sequences of sum_i f_i P_i; each is 1 if balanced.

    Its maximum is the number of experts over the number taken.

    DeepSeek-V3 (arXiv 2412.19437, eq. 17 to 20): f_i is how often expert i was taken over how often
    it would be if all were alike, P_i its mean probability, the softmax over `scores`.

    Args:
        scores: [s, b, experts], or logs of their sigmoids; a part of the sequences gives a summand.
        busy: [b, experts], of whole sequences.
        length: tokens of a whole sequence.
    """
    often = busy * (scores.shape[-1] / (taken * length))
    likely = torch.softmax(scores, dim=-1).sum(dim=0) / length
    return (often * likely).sum()


def z_loss(scores: Tensor, length: int) -> Tensor:
    """Return the sum over sequences of the mean square of log sum exp of a token's scores.

    ST-MoE (Zoph et al. 2022, arXiv 2202.08906, eq. 5).
    """
    return torch.logsumexp(scores, dim=-1).square().sum() / length


class _RouterContext(FunctionContext):
    router_loss: RouterLoss
    balance: Tensor


class _WithLoss(torch.autograd.Function):
    """Passes `shares` on; backward gives `loss` the gradient that the engine has set.

    It notes `balance` there, since a recomputed layer too has only one backward pass.
    """

    @staticmethod
    def forward(
        ctx: _RouterContext, shares: Tensor, loss: Tensor, balance: Tensor, router_loss: RouterLoss
    ) -> Tensor:
        ctx.router_loss, ctx.balance = router_loss, balance
        return shares.view_as(shares)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]  # torch leaves it untyped
    def backward(ctx: _RouterContext, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        value, balance = ctx.router_loss.value, ctx.balance
        if value is None:
            raise MegatronError(
                "internal error: the weight of a router's loss was not set for this step",
                found="a backward pass with --moe-aux-loss-coeff or --moe-z-loss-coeff",
                fix="set ModelBuild.router_loss.value before it, as the engines do",
            )
        ctx.router_loss.note(balance)
        # `value` may be a float64 scalar on the device.
        return grad, (torch.ones_like(balance) * value).to(balance.dtype), None, None


_WITH_LOSS: Callable[[Tensor, Tensor, Tensor, RouterLoss], Tensor] = _WithLoss.apply
