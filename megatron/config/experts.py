"""Checks the flags about experts: how tokens choose them, and how the load is balanced.

The flags themselves are fields of `ModelConfig`; they have no meaning in a dense model.
"""

import math
from collections.abc import Iterator, Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from megatron.config.fields import check_field, check_loss_weight
from megatron.config.layer_pattern import EVERY_LAYER, example
from megatron.errors import ConfigError


class RouterScoreFunction(StrEnum):
    """How a router turns its scores into shares."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class TokenDropPolicy(StrEnum):
    """Which tokens an expert takes of those that are more than its capacity."""

    PROBS = "probs"  # those with the largest shares
    POSITION = "position"  # the first in the sequence


class MlpType(StrEnum):
    """What stands beside the experts of a layer, in the words of DeepSpeed-MoE."""

    STANDARD = "standard"
    RESIDUAL = "residual"  # an MLP of the dense width


class LoadBalancing(StrEnum):
    """What keeps experts equally busy, beside biases; the names are Megatron-LM's."""

    NONE = "none"
    SEQ_AUX_LOSS = "seq_aux_loss"  # a loss of each sequence by itself
    AUX_LOSS = "aux_loss"  # of the sequences of a micro-batch together
    GLOBAL_AUX_LOSS = "global_aux_loss"  # of those of all replicas, so far in a step
    SINKHORN = "sinkhorn"  # a choice for the tokens of a rank's micro-batch together

    @property
    def is_loss(self) -> bool:
        """Whether it is a loss, which has a weight."""
        return self not in (LoadBalancing.NONE, LoadBalancing.SINKHORN)

    @property
    def depends_on(self) -> str | None:
        """On what results depend that should not matter; None: on nothing of the kind."""
        return _DEPENDS_ON.get(self)


_DEPENDS_ON: Mapping[LoadBalancing, str] = MappingProxyType(
    {
        LoadBalancing.AUX_LOSS: "the sequences of each micro-batch: their number and replica",
        LoadBalancing.GLOBAL_AUX_LOSS: "the order in which micro-batches are computed",
        LoadBalancing.SINKHORN: "the tokens of each micro-batch that a rank holds",
    }
)


class _Flags(Protocol):
    """The fields of `ModelConfig` that are about experts, and what they are combined with."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_experts(self) -> int | None: ...
    @property
    def moe_layer_freq(self) -> str: ...
    @property
    def expert_interval(self) -> int | None: ...
    @property
    def expert_layers(self) -> tuple[bool, ...]: ...
    @property
    def has_experts(self) -> bool: ...
    @property
    def moe_router_topk(self) -> int: ...
    @property
    def moe_router_pre_softmax(self) -> bool: ...
    @property
    def moe_router_score_function(self) -> RouterScoreFunction: ...
    @property
    def moe_router_topk_scaling_factor(self) -> float: ...
    @property
    def moe_router_num_groups(self) -> int | None: ...
    @property
    def moe_router_group_topk(self) -> int | None: ...
    @property
    def moe_router_enable_expert_bias(self) -> bool: ...
    @property
    def moe_router_bias_update_rate(self) -> float: ...
    @property
    def moe_expert_capacity_factor(self) -> float | None: ...
    @property
    def moe_eval_capacity_factor(self) -> float | None: ...
    @property
    def moe_min_capacity(self) -> int: ...
    @property
    def moe_router_load_balancing_type(self) -> LoadBalancing: ...
    @property
    def moe_aux_loss_coeff(self) -> float: ...
    @property
    def moe_z_loss_coeff(self) -> float: ...
    @property
    def moe_shared_expert_intermediate_size(self) -> int | None: ...
    @property
    def moe_shared_expert_gate(self) -> bool: ...
    @property
    def mlp_type(self) -> MlpType: ...


def expert_problems(flags: _Flags) -> Iterator[ConfigError]:
    """Yield the errors in the flags about experts of a model that has experts."""
    if not flags.has_experts:
        return
    experts, taken = flags.num_experts or 0, flags.moe_router_topk
    if not 1 <= taken <= experts:
        yield ConfigError(
            "a token cannot take as many experts as it should",
            found=f"--moe-router-topk {taken}, --num-experts {experts}",
            fix=f"use --moe-router-topk from 1 to {experts}, such as {min(2, experts)}",
        )
    sigmoid = flags.moe_router_score_function is RouterScoreFunction.SIGMOID
    if sigmoid and flags.moe_router_pre_softmax:
        yield ConfigError(
            "shares are either sigmoids of scores or a softmax over all of them",
            found="--moe-router-score-function sigmoid with --moe-router-pre-softmax",
            fix="leave out one of the two flags",
        )
    if taken == 1 and not (flags.moe_router_pre_softmax or sigmoid):
        yield ConfigError(
            "the share of the only expert that a token takes would always be 1, and the router "
            "would learn nothing",
            found="--moe-router-topk 1 without --moe-router-pre-softmax",
            fix="add --moe-router-pre-softmax, or use --moe-router-topk 2",
        )
    scaling = flags.moe_router_topk_scaling_factor
    yield from check_field(
        0 < scaling < math.inf,
        "moe_router_topk_scaling_factor",
        scaling,
        problem="it is not a positive number",
        fix="use a number above 0, such as the default 1.0",
    )
    yield from _group_problems(flags)
    if flags.moe_router_enable_expert_bias and not sigmoid:
        yield ConfigError(
            "a bias is added to sigmoids of scores alone, which are between 0 and 1 as it is",
            found="--moe-router-enable-expert-bias without --moe-router-score-function sigmoid",
            fix="add --moe-router-score-function sigmoid",
        )
    rate = flags.moe_router_bias_update_rate
    yield from check_field(
        0 < rate < math.inf,
        "moe_router_bias_update_rate",
        rate,
        problem="it is not a positive number",
        fix="use a number above 0, such as the default 0.001",
    )
    if flags.moe_shared_expert_gate and flags.moe_shared_expert_intermediate_size is None:
        yield ConfigError(
            "there is no shared expert whose output a gate could multiply",
            found="--moe-shared-expert-gate without --moe-shared-expert-intermediate-size",
            fix="give the width of the shared expert, or leave the gate out",
        )
    for name in ("moe_shared_expert_intermediate_size", "moe_shared_expert_gate"):
        if flags.mlp_type is MlpType.RESIDUAL and getattr(flags, name):
            yield ConfigError(
                "a layer has one MLP beside its experts, and one way of adding up",
                found=f"--mlp-type residual, --{name.replace('_', '-')}",
                fix="leave one of the two out",
            )
    yield from _capacity_problems(flags)
    yield from _layer_problems(flags)
    yield from _balance_problems(flags)


def _group_problems(flags: _Flags) -> Iterator[ConfigError]:
    groups, chosen = flags.moe_router_num_groups, flags.moe_router_group_topk
    if groups is None and chosen is None:
        return
    experts, taken = flags.num_experts or 0, flags.moe_router_topk
    given = (
        f"--moe-router-num-groups {groups}, --moe-router-group-topk {chosen}, --num-experts "
        f"{experts}, --moe-router-topk {taken}"
    )
    if groups is None or chosen is None:
        yield ConfigError(
            "groups of experts were asked for by half",
            found=given,
            fix="give --moe-router-num-groups and --moe-router-group-topk, or neither",
        )
    elif groups < 1 or experts % groups:
        yield ConfigError(
            "experts do not divide into equal groups",
            found=given,
            fix=f"use a --moe-router-num-groups that divides {experts}",
        )
    elif not 1 <= chosen <= groups:
        yield ConfigError(
            "a token cannot choose as many groups of experts as it should",
            found=given,
            fix=f"use --moe-router-group-topk from 1 to {groups}",
        )
    elif taken % chosen or taken // chosen > experts // groups:
        yield ConfigError(
            "a token cannot take equally many experts of each group that it chooses",
            found=given,
            fix=f"use a --moe-router-topk that {chosen} divides, at most "
            f"{chosen * (experts // groups)}",
        )


def _capacity_problems(flags: _Flags) -> Iterator[ConfigError]:
    for name in ("moe_expert_capacity_factor", "moe_eval_capacity_factor"):
        factor: float | None = getattr(flags, name)
        yield from check_field(
            factor is None or 0 < factor < math.inf,
            name,
            factor,
            problem="it is not a positive number",
            fix="use a number such as 1.25, or leave it out, and no token is dropped",
        )
    if flags.moe_expert_capacity_factor is None and flags.moe_eval_capacity_factor is not None:
        yield ConfigError(
            "tokens would be dropped in evaluations alone",
            found=f"--moe-eval-capacity-factor {flags.moe_eval_capacity_factor} without "
            "--moe-expert-capacity-factor",
            fix="give both, or neither",
        )
    yield from check_field(
        flags.moe_min_capacity >= 1,
        "moe_min_capacity",
        flags.moe_min_capacity,
        problem="an expert takes at least one token of a sequence",
        fix="use a whole number above 0, such as the default 1",
    )


def _layer_problems(flags: _Flags) -> Iterator[ConfigError]:
    layers, interval = flags.num_layers, flags.expert_interval
    given = f"--moe-layer-freq {flags.moe_layer_freq}"
    if interval is not None:
        if flags.moe_layer_freq != EVERY_LAYER:
            yield ConfigError(
                "layers with experts were named twice",
                found=f"{given}, --expert-interval {interval}",
                fix="leave one of the two out",
            )
        given = f"--expert-interval {interval}"
    if layers < 1 or (interval is not None and interval < 1):
        return  # an error of its own
    try:
        if not any(flags.expert_layers):
            yield ConfigError(
                "there are experts, and no layer has them",
                found=f"--num-experts {flags.num_experts}, {given}, --num-layers {layers}",
                fix=f"leave --num-experts out, or use --moe-layer-freq {example(layers)}",
            )
    except ConfigError as problem:
        yield problem


def _balance_problems(flags: _Flags) -> Iterator[ConfigError]:
    for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"):
        yield from check_loss_weight(name, getattr(flags, name))
    kind, weight = flags.moe_router_load_balancing_type, flags.moe_aux_loss_coeff
    given = f"--moe-router-load-balancing-type {kind}"
    if kind is LoadBalancing.SINKHORN and weight > 0:
        yield ConfigError(
            "tokens are assigned evenly, and no loss balances experts beside that",
            found=f"{given}, --moe-aux-loss-coeff {weight}",
            fix="leave --moe-aux-loss-coeff out, or name the type of loss",
        )
    elif kind.is_loss != (weight > 0):
        yield ConfigError(
            "a loss that balances experts was asked for by half",
            found=f"{given}, --moe-aux-loss-coeff {weight}",
            fix=f"give --moe-router-load-balancing-type {LoadBalancing.SEQ_AUX_LOSS} and a "
            "--moe-aux-loss-coeff such as 0.001, or neither",
        )
    if kind is not LoadBalancing.SINKHORN:
        return
    for name, is_given in (
        ("--moe-router-num-groups", flags.moe_router_num_groups is not None),
        ("--moe-router-enable-expert-bias", flags.moe_router_enable_expert_bias),
        ("--moe-expert-capacity-factor", flags.moe_expert_capacity_factor is not None),
    ):
        if is_given:
            yield ConfigError(
                "tokens are assigned together, so that nothing else may choose or drop",
                found=f"{given}, {name}",
                fix=f"leave {name} out, or use another type",
            )
