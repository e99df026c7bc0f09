"""Entries beside the model in files that Megatron-LM loads, equal in all of its layouts.

The flags in `args`, groups of parameters, the loss scale and the schedule, from a source under our
names; `facts.py` reads them.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint.formats.megatron import names
from megatron.checkpoint.formats.megatron.args import args_of_config
from megatron.checkpoint.source import CheckpointSource
from megatron.tokenizer.tokenizer import padded_vocab_size


def run_args(
    source: CheckpointSource, *, padded_rows: int, tp: int, pp: int, experts: bool = False
) -> dict[str, Any]:
    """Return Megatron's `args` of the run that saved `source`, as one of tp x pp ranks.

    Args:
        padded_rows: rows of the vocabulary, padding included.
        experts: whether the layout of the files holds models with experts.

    Raises:
        CheckpointError: Megatron has no flags for this model.
    """
    progress = source.progress
    return {
        **args_of_config(source.config, experts=experts),
        "padded_vocab_size": padded_rows,
        "make_vocab_size_divisible_by": _divisor(source, padded_rows, tp),
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "consumed_train_samples": int(progress.get("consumed_samples", 0)),
        "consumed_train_tokens": int(progress.get("consumed_tokens", 0)),
        "consumed_valid_samples": int(progress.get("consumed_valid_samples", 0)),
    }


def _divisor(source: CheckpointSource, padded_rows: int, tp: int) -> int:
    """Return a --make-vocab-size-divisible-by from which Megatron computes the same padded size."""
    rows = source.tensors[f"model/{names.WORD}"].global_shape[0]
    flags: Mapping[str, Any] = source.config.get("tokenizer", {})
    divisor = flags.get("make_vocab_size_divisible_by") or 128
    if padded_vocab_size(rows, divisible_by=divisor, tp=tp) == padded_rows:
        return int(divisor)
    return padded_rows // tp


def group_entry(args: Mapping[str, Any], steps: int, *, decayed: bool) -> dict[str, Any]:
    """Return the entry of a group of parameters, without their numbers."""
    return {
        "lr": args.get("lr", 0.0),
        "weight_decay": args.get("weight_decay", 0.01) if decayed else 0.0,
        "betas": (args.get("adam_beta1", 0.9), args.get("adam_beta2", 0.999)),
        "eps": args.get("adam_eps", 1e-8),
        "bias_correction": True,
        "wd_mult": float(decayed),
        "lr_mult": 1.0,
        "is_expert_parallel": False,
        "is_decoupled_lr": False,
        "step": steps,
    }


def grad_scaler_entry(kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry with the loss scale, from our scalars; empty for a constant scale."""
    scaler = kept.get("loss_scaler") or {}
    if "scale" not in scaler:
        return {}
    return {
        "grad_scaler": {
            "scale": torch.tensor([float(scaler["scale"])]),
            "growth_tracker": int(scaler["good_iterations"]),
            "hysteresis_tracker": int(scaler["overflows_left"]),
        }
    }


def scheduler_entry(source: CheckpointSource) -> dict[str, Any]:
    """Return the state of Megatron's schedule, a function of samples, which its loader requires."""
    schedule: Mapping[str, Any] = source.config.get("schedule", {})
    training: Mapping[str, Any] = source.config.get("training", {})
    batch = int(training.get("global_batch_size") or 1)
    whole_run = training.get("train_samples") or int(training.get("train_iters") or 1) * batch
    decay = schedule.get("lr_decay_samples") or int(schedule.get("lr_decay_iters") or 0) * batch
    decay = int(decay or whole_run)
    warmup = schedule.get("lr_warmup_samples") or int(schedule.get("lr_warmup_iters") or 0) * batch
    warmup = int(warmup or float(schedule.get("lr_warmup_fraction") or 0.0) * decay)
    return {
        "max_lr": schedule.get("lr", 0.0),
        "min_lr": schedule.get("min_lr", 0.0),
        "warmup_steps": warmup,
        "lr_warmup_steps": warmup,
        "decay_steps": decay,
        "lr_decay_steps": decay,
        "decay_style": schedule.get("lr_decay_style", "linear"),
        "lr_decay_style": schedule.get("lr_decay_style", "linear"),
        "num_steps": int(source.progress.get("consumed_samples", 0)),
    }
