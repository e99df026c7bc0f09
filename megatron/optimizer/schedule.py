"""Learning rate and weight decay as pure functions of what was consumed before an iteration.

The formulas and their edges are Megatron's: everything is measured in samples (iterations times the
global batch size), and the first iteration runs at the value for 0 samples, which under warm-up is
`lr_warmup_init`. Nothing here has state, so nothing of it is in a checkpoint.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.optimizer import (
    DecayStyle,
    ScheduleConfig,
    WeightDecayStyle,
    WsdDecayStyle,
    warmup_samples,
)
from megatron.errors import ConfigError


def learning_rate(
    config: ScheduleConfig,
    *,
    samples: int,
    tokens: int,
    total_samples: int,
    global_batch_size: int,
    warmup_tokens: int = 0,
) -> float:
    """Return the learning rate of the iteration that starts at `samples` consumed.

    Args:
        tokens: those of these samples, by which a schedule with `lr_decay_tokens` goes instead.
        total_samples: samples of the whole training; the decay length when none is given.
        global_batch_size: turns lengths given in iterations into samples.
        warmup_tokens: tokens of a warm-up in samples or iterations, where the decay is in tokens.
    """
    warmup, decay, anneal = _lengths(config, total_samples, global_batch_size, warmup_tokens)
    at = samples if config.lr_decay_tokens is None else tokens
    in_samples = warmup_samples(config, global_batch_size)
    done, needed = (samples, in_samples) if in_samples else (at, warmup)
    if done <= needed:
        if needed == 0:
            return config.lr
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * done / needed
    if config.lr_decay_style is DecayStyle.CONSTANT:
        return config.lr
    if at > decay:
        return config.min_lr
    if config.lr_decay_style is DecayStyle.INVERSE_SQUARE_ROOT:
        return max(config.min_lr, config.lr * math.sqrt(max(warmup, 1) / at))
    if config.lr_decay_style is DecayStyle.WSD:
        stable_until = decay - anneal
        share = 1.0 if at <= stable_until else _anneal(config, (at - stable_until) / anneal)
    else:
        share = _decay(config.lr_decay_style, (at - warmup) / (decay - warmup))
    return config.min_lr + share * (config.lr - config.min_lr)


def weight_decay(
    config: ScheduleConfig, constant: float, *, samples: int, total_samples: int
) -> float:
    """Return the weight decay of the iteration that starts at `samples` consumed.

    Args:
        constant: the value when it does not move (`--weight-decay`).
        total_samples: samples of the whole training, over which it goes from start to end.
    """
    start, end = config.start_weight_decay, config.end_weight_decay
    if config.weight_decay_incr_style is WeightDecayStyle.CONSTANT:
        return constant
    assert start is not None  # noqa: S101  # invariant: ScheduleConfig checks it
    assert end is not None  # noqa: S101  # invariant: ScheduleConfig checks it
    done = min(samples / total_samples, 1.0)
    if config.weight_decay_incr_style is WeightDecayStyle.COSINE:
        done = 0.5 * (math.cos(math.pi * (1 - done)) + 1)
    return start + done * (end - start)


def learning_rate_problems(
    config: ScheduleConfig,
    *,
    total_samples: int,
    global_batch_size: int,
    samples_based: bool,
    warmup_tokens: int = 0,
) -> Iterator[ConfigError]:
    """Yield the errors of a schedule once the length of the training is known.

    A decay that is shorter than the training is fine: the rest runs at `min_lr`.

    Args:
        samples_based: the training is measured with --train-samples rather than --train-iters.
        warmup_tokens: tokens of a warm-up in samples or iterations, where the decay is in tokens.
    """
    yield from _unit_problems(config, samples_based)
    warmup, decay, anneal = _lengths(config, total_samples, global_batch_size, warmup_tokens)
    unit = 1 if samples_based else global_batch_size
    flags = "samples" if samples_based else "iters"
    if config.lr_decay_tokens is not None:
        unit, flags = 1, "tokens"
    constant = config.lr_decay_style is DecayStyle.CONSTANT and flags != "tokens"
    length = total_samples if constant else decay
    if warmup > length:
        yield ConfigError(
            "warm-up is longer than the training"
            if constant
            else "warm-up is longer than the decay of the learning rate",
            found=f"warm-up of {warmup / unit:g} {flags}, {length / unit:g} {flags} in all",
            fix=f"use --lr-warmup-{flags} {length // unit // 10}",
        )
    is_wsd = config.lr_decay_style is DecayStyle.WSD
    if is_wsd and warmup <= length < warmup + anneal:
        yield ConfigError(
            "the warm-up and the decay of a WSD schedule overlap",
            found=f"warm-up of {warmup / unit:g} {flags}, decay of {anneal / unit:g} {flags}, "
            f"{length / unit:g} {flags} in all",
            fix=f"use --lr-wsd-decay-{flags} {max(int((length - warmup) // unit), 1)} or less, "
            "or train longer",
        )
    if not is_wsd and (config.lr_wsd_decay_iters or config.lr_wsd_decay_samples):
        yield ConfigError(
            "a WSD decay length was given for another schedule",
            found=f"--lr-decay-style {config.lr_decay_style.value}",
            fix="use --lr-decay-style WSD, or drop the WSD decay length",
        )


class _Lengths(NamedTuple):
    """The lengths of a schedule, in samples; in tokens where --lr-decay-tokens is given.

    A warm-up given as a share may be a fraction of one.
    """

    warmup: float
    decay: int
    anneal: int  # the last part of WSD


def _lengths(
    config: ScheduleConfig, total_samples: int, global_batch_size: int, warmup_tokens: int
) -> _Lengths:
    if config.lr_decay_tokens is not None:
        warmup: float = config.lr_warmup_tokens or warmup_tokens
        decay, anneal = config.lr_decay_tokens, 0
    else:
        warmup = warmup_samples(config, global_batch_size)
        decay = config.lr_decay_samples or total_samples
        if config.lr_decay_iters is not None:
            decay = config.lr_decay_iters * global_batch_size
        anneal = config.lr_wsd_decay_samples or (config.lr_wsd_decay_iters or 0) * global_batch_size
    if config.lr_warmup_fraction is not None:
        warmup = config.lr_warmup_fraction * decay
    return _Lengths(warmup, decay, anneal)


def _decay(style: DecayStyle | WsdDecayStyle, done: float) -> float:
    if style.value == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1)
    return 1 - done


def _anneal(config: ScheduleConfig, done: float) -> float:
    if config.lr_wsd_decay_style is WsdDecayStyle.EXPONENTIAL:
        return (
            2 * math.pow(0.5, done) - 1
        )  # from 1 to 0, with half of the way done before the middle
    if config.lr_wsd_decay_style is WsdDecayStyle.MINUS_SQRT:
        return 1 - math.sqrt(done)  # Haegele et al. 2024, arXiv 2405.18392
    return _decay(config.lr_wsd_decay_style, done)


def _unit_problems(config: ScheduleConfig, samples_based: bool) -> Iterator[ConfigError]:
    wrong, right = ("iters", "samples") if samples_based else ("samples", "iters")
    for stem in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = getattr(config, f"{stem}_{wrong}")
        if value:
            flag = f"--{stem.replace('_', '-')}"
            yield ConfigError(
                f"a length of the schedule is in {wrong} but the training is in {right}",
                found=f"{flag}-{wrong} {value} with --train-{right}",
                fix=f"use {flag}-{right}",
            )
