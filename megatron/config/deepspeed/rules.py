"""Compares `optimizer` and `scheduler` of DeepSpeed's JSON with the equivalent flags.

Neither block is passed on to DeepSpeed: the optimizer is built by the flags, and learning rates
come from the loop. So this module only compares, in DeepSpeed's names and units (iterations).
"""

import difflib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megatron.config.deepspeed.keys import value_at
from megatron.config.optimizer import DecayStyle, OptimizerKind, WeightDecayStyle
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue


class _Rule(NamedTuple):
    """The required value of a parameter of a block, and the flags that imply it."""

    value: JsonValue
    flags: str


_OPTIMIZERS = {
    "adam": OptimizerKind.ADAM,  # which DeepSpeed runs as AdamW, too
    "adamw": OptimizerKind.ADAM,
    "sgd": OptimizerKind.SGD,
}
_SCHEDULERS = {
    "WarmupLR": DecayStyle.CONSTANT,
    "WarmupDecayLR": DecayStyle.LINEAR,
    "WarmupCosineLR": DecayStyle.COSINE,
}
_UPDATE_RULE = "the update rule that --optimizer names"
_IGNORED_PARAMETERS = frozenset({"torch_adam", "last_batch_iteration"})  # without effect on numbers


def optimizer_problems(config: RunConfig, user: JsonObject, where: str) -> Iterator[ConfigError]:
    """Yield the contradictions between the block `optimizer` and the flags."""
    kind = value_at(user, "optimizer.type")
    flags = config.optimizer
    if isinstance(kind, str):
        asked = _OPTIMIZERS.get(kind.lower())
        if asked is None:
            yield ConfigError(
                "DeepSpeed's JSON names an optimizer that is not here",
                found=f"optimizer.type {kind} in {where}",
                fix="use AdamW or SGD, or leave the block out: the flags describe the optimizer",
            )
            return
        if asked is not flags.optimizer:
            yield _contradiction(f"--optimizer {flags.optimizer}", f"optimizer.type {kind}", where)
            return
    rules = {
        "lr": _Rule(config.schedule.lr, f"--lr {config.schedule.lr}"),
        "weight_decay": _Rule(flags.weight_decay, f"--weight-decay {flags.weight_decay}"),
        "betas": _Rule(
            [flags.adam_beta1, flags.adam_beta2],
            f"--adam-beta1 {flags.adam_beta1} --adam-beta2 {flags.adam_beta2}",
        ),
        "eps": _Rule(flags.adam_eps, f"--adam-eps {flags.adam_eps}"),
        "momentum": _Rule(flags.sgd_momentum, f"--sgd-momentum {flags.sgd_momentum}"),
        "adam_w_mode": _Rule(True, _UPDATE_RULE),
        "bias_correction": _Rule(True, _UPDATE_RULE),
        "amsgrad": _Rule(False, _UPDATE_RULE),
        "nesterov": _Rule(False, _UPDATE_RULE),
        "dampening": _Rule(0, _UPDATE_RULE),
    }
    if config.schedule.weight_decay_incr_style is not WeightDecayStyle.CONSTANT:
        style = config.schedule.weight_decay_incr_style
        rules["weight_decay"] = _Rule("moving", f"--weight-decay-incr-style {style}")
    yield from _compared(user, "optimizer", rules, where)


def scheduler_problems(config: RunConfig, user: JsonObject, where: str) -> Iterator[ConfigError]:
    """Yield the contradictions between the block `scheduler` and the flags of the schedule."""
    kind = value_at(user, "scheduler.type")
    if kind is None:
        return
    flags = config.schedule
    style = _SCHEDULERS.get(kind) if isinstance(kind, str) else None
    if style is None:
        yield ConfigError(
            "DeepSpeed's JSON names a schedule that is not here",
            found=f"scheduler.type {kind} in {where}",
            fix=f"use one of {', '.join(_SCHEDULERS)}, or leave the block out: --lr-decay-style "
            "and its flags describe the schedule",
        )
        return
    if style is not flags.lr_decay_style:
        yield _contradiction(
            f"--lr-decay-style {flags.lr_decay_style}", f"scheduler.type {kind}", where
        )
    rules = {
        "warmup_min_lr": _Rule(flags.lr_warmup_init, f"--lr-warmup-init {flags.lr_warmup_init}"),
        "warmup_max_lr": _Rule(flags.lr, f"--lr {flags.lr}"),
        "warmup_type": _Rule("linear", "warm-up is linear here"),
        "warmup_num_steps": _warmup_steps(config),
        "total_num_steps": _Rule(*_decay_steps(config)),
        "warmup_min_ratio": _Rule(
            flags.lr_warmup_init / flags.lr, f"--lr-warmup-init {flags.lr_warmup_init}"
        ),
        "cos_min_ratio": _Rule(flags.min_lr / flags.lr, f"--min-lr {flags.min_lr}"),
    }
    yield from _compared(user, "scheduler", rules, where)


def _warmup_steps(config: RunConfig) -> _Rule:
    flags = config.schedule
    if flags.lr_warmup_fraction is not None:
        steps = flags.lr_warmup_fraction * _decay_steps(config)[0]
        return _Rule(steps, f"--lr-warmup-fraction {flags.lr_warmup_fraction}")
    if flags.lr_warmup_samples:
        steps = flags.lr_warmup_samples / _batch(config)
        return _Rule(steps, f"--lr-warmup-samples {flags.lr_warmup_samples}")
    return _Rule(flags.lr_warmup_iters, f"--lr-warmup-iters {flags.lr_warmup_iters}")


def _decay_steps(config: RunConfig) -> tuple[float, str]:
    flags, training = config.schedule, config.training
    for name, iterations, samples in (
        ("--lr-decay", flags.lr_decay_iters, flags.lr_decay_samples),
        ("--train", training.train_iters, training.train_samples),
    ):
        if iterations is not None:
            return iterations, f"{name}-iters {iterations}"
        if samples is not None:
            return samples / _batch(config), f"{name}-samples {samples}"
    raise AssertionError  # invariant: TrainingConfig has iterations or samples


def _batch(config: RunConfig) -> int:
    return config.training.global_batch_size or config.training.micro_batch_size


def _compared(
    user: JsonObject, block: str, rules: Mapping[str, _Rule], where: str
) -> Iterator[ConfigError]:
    given = value_at(user, f"{block}.params")
    if not isinstance(given, Mapping):
        return
    for key, value in given.items():
        path = f"{block}.params.{key}"
        if value in (None, "auto") or key in _IGNORED_PARAMETERS:
            continue
        if key == "max_grad_norm":
            yield ConfigError(
                "gradients are clipped by one number, which is not the optimizer's",
                found=f"{path} {value} in {where}",
                fix="use gradient_clipping, or --clip-grad",
            )
        elif key not in rules:
            near = difflib.get_close_matches(key, rules, n=1, cutoff=0.5)
            yield ConfigError(
                f"DeepSpeed's JSON has a parameter in its block {block} that is not known here",
                found=f"{path} in {where}",
                fix=f"did you mean {near[0]}?" if near else "leave it out",
            )
        elif not _equal(value, rules[key].value):
            yield _contradiction(rules[key].flags, f"{path} {value}", where)


def _equal(given: JsonValue, value: JsonValue) -> bool:
    """Return whether values are equal, for fractions of iterations and ratios up to rounding."""
    if isinstance(given, float) and isinstance(value, float):
        return abs(given - value) <= 1e-12 * max(abs(given), abs(value))
    return bool(given == value)


def _contradiction(flags: str, given: str, where: str) -> ConfigError:
    return ConfigError(
        "the flags and DeepSpeed's JSON contradict each other",
        found=f"{flags}; {given} in {where}",
        fix="make them the same, or leave it out of the JSON: the flags alone are enough",
    )
