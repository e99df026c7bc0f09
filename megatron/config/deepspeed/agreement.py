"""Compares the flags and DeepSpeed's JSON key by key, and reports all contradictions at once.

A key that the JSON leaves out, or leaves open with "auto", follows the flags. In the other
direction `flags_from_json` returns values of the JSON for flags that a command line does not give.
Two different values for one setting are an error.
"""

import difflib
import math
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import NamedTuple

from megatron.config.activations import RecomputeGranularity
from megatron.config.curriculum import flags_of_block
from megatron.config.deepspeed.keys import (
    KEYS,
    DroppedKey,
    FixedKey,
    FreeKey,
    Tree,
    UnsupportedKey,
    as_kind,
    value_at,
)
from megatron.config.deepspeed.rules import optimizer_problems, scheduler_problems
from megatron.config.engine import RemoteDevice
from megatron.config.fields import flag_name
from megatron.config.precision import Precision
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue

_SWITCHES = ("enabled", "deepcompile", "autotp_size")  # of a block that turns a feature on
_WORDS = {Precision.FP32: "fp32", Precision.BF16: "bf16", Precision.FP16: "fp16"}


class ImpliedValue(NamedTuple):
    """A value that the flags give to a key of the JSON, and the flags that do so."""

    value: JsonValue
    flags: str


def agreement_problems(
    config: RunConfig, user: JsonObject, *, data_parallel_size: int
) -> Iterator[ConfigError]:
    """Yield every contradiction between the flags and the JSON, with both values.

    Args:
        user: what `read_json` returned.
    """
    where = config.engine.deepspeed_config or "the JSON"
    wrong = list(_wrong_values(user, KEYS, where))
    yield from wrong
    implied = values_from_flags(config, user, data_parallel_size=data_parallel_size)
    for path, (value, flags) in implied.items():
        given = value_at(user, path)
        if given is None or any(path in str(error.found) for error in wrong):
            continue
        if not _same(given, value):
            yield ConfigError(
                "the flags and DeepSpeed's JSON contradict each other",
                found=f"{flags}; {path} {_json(given)} in {where}",
                fix=f'make {path} {_json(value)} or "auto" or leave it out, or change the flags',
            )
    yield from _precision_problems(config)
    yield from _offload_problems(config, user, where)
    yield from optimizer_problems(config, user, where)
    yield from scheduler_problems(config, user, where)


def stage_of(config: RunConfig, user: JsonObject) -> int:
    """Return the stage of ZeRO: that of the flag, else the JSON's, else 0."""
    flag = config.engine.zero_stage
    given = value_at(user, "zero_optimization.stage")
    if flag is not None:
        return int(flag.value)
    return given if type(given) is int else 0


def values_from_flags(
    config: RunConfig, user: JsonObject, *, data_parallel_size: int
) -> dict[str, ImpliedValue]:
    """Return the values that flags imply, by the path of the equivalent key of the JSON."""
    implied = _batch_values(config, data_parallel_size) | _precision_values(config)
    implied["gradient_clipping"] = ImpliedValue(
        float(config.optimizer.clip_grad), f"--clip-grad {config.optimizer.clip_grad}"
    )
    return implied | _memory_values(config) | _engine_values(config, user)


def flags_from_json(user: JsonObject, typed: Mapping[str, object]) -> dict[str, object]:
    """Return values of the JSON for the flags that are not in `typed`, by field name.

    `agreement_problems` reports values of the wrong kind.
    """
    found: dict[str, object] = {}
    if not any(name.startswith("curriculum_") for name in typed):
        found |= _curriculum_from(user)
    if not {"fp16", "bf16", "fp64"} & set(typed):
        for name in ("fp16", "bf16"):
            if value_at(user, f"{name}.enabled") is True:
                found[name] = True
    if value_at(user, "tensorboard.enabled") is True:
        found["tensorboard_dir"] = _tensorboard_folder(user)
    scale = _number(user, "fp16.loss_scale")
    power = _number(user, "fp16.initial_scale_power")
    found |= {
        "micro_batch_size": _whole(user, "train_micro_batch_size_per_gpu"),
        "global_batch_size": _whole(user, "train_batch_size"),
        "clip_grad": _number(user, "gradient_clipping"),
        "loss_scale": scale or None,
        "initial_loss_scale": None if power is None else 2.0**power,
        "loss_scale_window": _whole(user, "fp16.loss_scale_window"),
        "hysteresis": _whole(user, "fp16.hysteresis"),
        "min_loss_scale": _number(user, "fp16.min_loss_scale"),
        "lr": _number(user, "optimizer.params.lr"),
        "weight_decay": _number(user, "optimizer.params.weight_decay"),
        "adam_eps": _number(user, "optimizer.params.eps"),
        "sgd_momentum": _number(user, "optimizer.params.momentum"),
    }
    betas = value_at(user, "optimizer.params.betas")
    if isinstance(betas, list) and len(betas) == 2:
        found |= dict(zip(("adam_beta1", "adam_beta2"), betas))
    return {name: value for name, value in found.items() if value is not None and name not in typed}


def _curriculum_from(user: JsonObject) -> dict[str, object]:
    block = value_at(user, "curriculum_learning")
    return flags_of_block(block) if isinstance(block, Mapping) else {}


def _tensorboard_folder(user: JsonObject) -> str:
    """Return where DeepSpeed would write its own events."""
    job = value_at(user, "tensorboard.job_name") or "DeepSpeedJobName"
    folder = value_at(user, "tensorboard.output_path") or ""
    return str(PurePath(str(folder), str(job)))


def _batch_values(config: RunConfig, replicas: int) -> dict[str, ImpliedValue]:
    training = config.training
    micro, global_size = training.micro_batch_size, training.global_batch_size
    size = global_size or micro * replicas
    spelled = f"--micro-batch-size {micro} on {replicas} data-parallel ranks"
    if global_size is not None:
        spelled = f"--global-batch-size {global_size}, {spelled}"
    steps, left = divmod(size, micro * replicas)
    implied = {
        "train_batch_size": ImpliedValue(size, spelled),
        "train_micro_batch_size_per_gpu": ImpliedValue(micro, f"--micro-batch-size {micro}"),
    }
    if not left:  # else the batch does not divide, which another check reports
        implied["gradient_accumulation_steps"] = ImpliedValue(steps, spelled)
    return implied


def _precision_values(config: RunConfig) -> dict[str, ImpliedValue]:
    flags = config.precision
    chosen = flags.precision
    flag = f"--{chosen.name.lower()}" if chosen is not Precision.FP32 else "no --fp16 or --bf16"
    implied = {
        "fp16.enabled": ImpliedValue(chosen is Precision.FP16, flag),
        "bf16.enabled": ImpliedValue(chosen is Precision.BF16, flag),
    }
    if chosen is Precision.FP16:
        implied |= _scale_values(config)
    if chosen in _WORDS:
        implied["data_types.param_dtype"] = ImpliedValue(_WORDS[chosen], flag)
        wide = "" if flags.accumulate_allreduce_grads_in_fp32 else "no-"
        spelled = f"{flag}, --{wide}accumulate-allreduce-grads-in-fp32"
        for path in ("communication_data_type", "data_types.grad_accum_dtype"):
            implied[path] = ImpliedValue(_WORDS[flags.gradient_precision], spelled)
    return implied


def _scale_values(config: RunConfig) -> dict[str, ImpliedValue]:
    flags = config.precision
    fixed = flags.loss_scale
    implied = {
        "fp16.loss_scale": ImpliedValue(
            0.0 if fixed is None else fixed,
            "no --loss-scale" if fixed is None else f"--loss-scale {fixed}",
        ),
        "fp16.loss_scale_window": ImpliedValue(
            flags.loss_scale_window, f"--loss-scale-window {flags.loss_scale_window}"
        ),
        "fp16.hysteresis": ImpliedValue(flags.hysteresis, f"--hysteresis {flags.hysteresis}"),
    }
    power = math.log2(flags.initial_loss_scale)
    if power.is_integer():
        spelled = f"--initial-loss-scale {flags.initial_loss_scale:g}"
        implied["fp16.initial_scale_power"] = ImpliedValue(int(power), spelled)
    if flags.min_loss_scale.is_integer():
        spelled = f"--min-loss-scale {flags.min_loss_scale:g}"
        implied["fp16.min_loss_scale"] = ImpliedValue(int(flags.min_loss_scale), spelled)
    return implied


def _memory_values(config: RunConfig) -> dict[str, ImpliedValue]:
    training = config.training
    full = training.recompute_granularity is RecomputeGranularity.FULL
    shown = f"--recompute-granularity {training.recompute_granularity or 'not set'}"
    interval = (training.recompute_num_layers or 1) if full else 0
    word = "" if training.distribute_saved_activations else "no-"
    kept = "" if training.checkpoint_in_cpu else "no-"
    return {
        "activation_checkpointing.partition_activations": ImpliedValue(
            training.distribute_saved_activations, f"--{word}distribute-saved-activations"
        ),
        "activation_checkpointing.cpu_checkpointing": ImpliedValue(
            training.checkpoint_in_cpu, f"--{kept}checkpoint-in-cpu"
        ),
        "pipeline.activation_checkpoint_interval": ImpliedValue(
            interval, f"{shown}, --recompute-num-layers {training.recompute_num_layers or 1}"
        ),
    }


def _engine_values(config: RunConfig, user: JsonObject) -> dict[str, ImpliedValue]:
    engine, stages = config.engine, config.parallel.pipeline_model_parallel_size
    implied = {"pipeline.stages": ImpliedValue(stages, f"--pipeline-model-parallel-size {stages}")}
    zero = "zero_optimization"
    if engine.zero_stage is not None:
        stage = engine.zero_stage.value
        implied[f"{zero}.stage"] = ImpliedValue(int(stage), f"--zero-stage {stage}")
    if engine.zero_reduce_scatter:
        implied[f"{zero}.reduce_scatter"] = ImpliedValue(True, "--zero-reduce-scatter")
    if engine.zero_contigious_gradients:
        implied[f"{zero}.contiguous_gradients"] = ImpliedValue(True, "--zero-contigious-gradients")
    for name in ("zero_reduce_bucket_size", "zero_allgather_bucket_size"):
        size = getattr(engine, name)
        if size is not None:
            key = name.removeprefix("zero_")
            implied[f"{zero}.{key}"] = ImpliedValue(size, f"{flag_name(name)} {size}")
    if engine.remote_device is not None:
        device = engine.remote_device.value
        implied[f"{zero}.offload_param.device"] = ImpliedValue(device, f"--remote-device {device}")
    if engine.cpu_optimizer:
        implied[f"{zero}.offload_optimizer.device"] = ImpliedValue(
            RemoteDevice.CPU.value, "--cpu-optimizer"
        )
    if engine.use_pin_memory:
        for name in ("offload_param", "offload_optimizer"):
            implied[f"{zero}.{name}.pin_memory"] = ImpliedValue(True, "--use-pin-memory")
    if engine.pp_partition_method is not None:
        method = engine.pp_partition_method
        implied["pipeline.partition"] = ImpliedValue(method, f"--pp-partition-method {method}")
    return implied


def _wrong_values(
    user: JsonObject, tree: Tree, where: str, prefix: str = ""
) -> Iterator[ConfigError]:
    """Yield errors for values of the wrong kind, fixed values that differ, and missing features."""
    for key, value in user.items():
        rule, path = tree.get(key), prefix + key
        if value is None or value == "auto" or isinstance(rule, DroppedKey):
            continue
        if rule is None:
            near = difflib.get_close_matches(key, tree, n=1, cutoff=0.5)
            yield ConfigError(
                "DeepSpeed has no such key",
                found=f"{path} in {where}",
                fix=f"did you mean {prefix}{near[0]}?" if near else "leave it out",
            )
        elif isinstance(rule, Mapping):
            if isinstance(value, Mapping):
                yield from _wrong_values(value, rule, where, f"{path}.")
            else:
                yield _wrong_kind(path, value, where, "an object in braces")
        elif isinstance(rule, FreeKey):
            try:
                as_kind(value, rule)
            except ValueError as wanted:
                yield _wrong_kind(path, value, where, str(wanted))
        elif isinstance(rule, FixedKey) and value != rule.value:
            yield ConfigError(
                "DeepSpeed's JSON has a value that is not possible here",
                found=f"{path} {_json(value)} in {where}",
                fix=f"leave it out, or make it {_json(rule.value)}: {rule.because}",
            )
        elif isinstance(rule, UnsupportedKey) and not _is_off(value):
            yield ConfigError(
                "DeepSpeed's JSON turns on a feature that is not here",
                found=f"{path} in {where}: {rule.feature}",
                fix=rule.instead,
            )


def _wrong_kind(path: str, value: JsonValue, where: str, wanted: str) -> ConfigError:
    return ConfigError(
        "a key of DeepSpeed's JSON has a value of the wrong kind",
        found=f"{path} {_json(value)} in {where}",
        fix=f"give {wanted}",
    )


def _is_off(value: JsonValue) -> bool:
    """Return whether a block or a switch turns its feature off."""
    if isinstance(value, Mapping):
        switches = [value[key] for key in _SWITCHES if key in value]
        return not value or (bool(switches) and not any(switches))
    return not value or (value in (1, -1) and not _is_bool(value))  # zero sizes


def _precision_problems(config: RunConfig) -> Iterator[ConfigError]:
    flags = config.precision
    if flags.precision is Precision.FP64:
        yield ConfigError(
            "DeepSpeed does not train in float64",
            found="--fp64 with --deepspeed",
            fix="leave --fp64 out, or train natively",
        )
    if flags.precision is not Precision.FP16 or flags.loss_scale is not None:
        return
    if not math.log2(flags.initial_loss_scale).is_integer():
        yield ConfigError(
            "DeepSpeed's first loss scale is a power of two",
            found=f"--initial-loss-scale {flags.initial_loss_scale:g} with --deepspeed",
            fix="use --initial-loss-scale 65536",
        )
    if not flags.min_loss_scale.is_integer():
        yield ConfigError(
            "DeepSpeed's smallest loss scale is a whole number",
            found=f"--min-loss-scale {flags.min_loss_scale:g} with --deepspeed",
            fix="use --min-loss-scale 1",
        )


def _offload_problems(config: RunConfig, user: JsonObject, where: str) -> Iterator[ConfigError]:
    stage = stage_of(config, user)
    implied = _engine_values(config, user)
    for name, least in (("offload_param", 3), ("offload_optimizer", 1)):
        path = f"zero_optimization.{name}"
        given = value_at(user, f"{path}.device")
        flag = implied.get(f"{path}.device")
        device = given if flag is None else flag.value
        if device in (None, RemoteDevice.NONE):
            continue
        origin = f"{path}.device {device} in {where}" if flag is None else flag.flags
        if stage < least:
            yield ConfigError(
                f"only ZeRO stage {least} and above can offload this",
                found=f"{origin}; ZeRO stage {stage}",
                fix=f"use --zero-stage {least}, or leave {name} out",
            )
        if device == RemoteDevice.NVME:
            yield ConfigError(
                "offloading to NVMe is not supported: a checkpoint would not hold what lies there",
                found=origin,
                fix='offload to the CPU: "device": "cpu", or --remote-device cpu',
            )


def _same(given: JsonValue, value: JsonValue) -> bool:
    if isinstance(given, str) and isinstance(value, str):
        return given.lower() == value.lower()
    return bool(given == value) and isinstance(given, bool) == isinstance(value, bool)


def _json(value: JsonValue) -> str:
    return str(value).lower() if _is_bool(value) else str(value)


def _is_bool(value: JsonValue) -> bool:
    return isinstance(value, bool)


def _number(user: JsonObject, path: str) -> float | None:
    value = value_at(user, path)
    return float(value) if isinstance(value, int | float) and not _is_bool(value) else None


def _whole(user: JsonObject, path: str) -> int | None:
    value = _number(user, path)
    return int(value) if value is not None and value.is_integer() else None
