"""Reads DeepSpeed's JSON file strictly, and completes it so that no default of its own is used.

`deepspeed_plan` returns what an engine needs: the stage, the complete JSON, and the settings that
concern the program rather than DeepSpeed. `config.deepspeed.agreement` compares file and flags.
"""

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from megatron.config.deepspeed.agreement import (
    ImpliedValue,
    agreement_problems,
    stage_of,
    values_from_flags,
)
from megatron.config.deepspeed.keys import (
    KEPT_BACK,
    KEYS,
    RENAMED,
    DroppedKey,
    FixedKey,
    FreeKey,
    Rule,
    Tree,
    UnsupportedKey,
    as_kind,
    value_at,
)
from megatron.config.engine import RemoteDevice
from megatron.config.fields import raise_all
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from megatron.json_values import JsonObject, JsonValue, object_at, parse_json

# "auto" for these follows the model's width, as Hugging Face's integration has it.
_BY_WIDTH: Mapping[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: 9 * width * width // 10,
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}
_OFFLOADS = ("offload_param", "offload_optimizer")


@dataclass(frozen=True, slots=True)
class DeepSpeedPlan:
    """The settings of a run through DeepSpeed, equal on every rank and recorded in checkpoints.

    Attributes:
        stage: of ZeRO, 0 to 3.
        json: the argument of `deepspeed.initialize`: complete, without optimizer and scheduler. At
            stage 0 without precision and clipping, which our own optimizer handles there.
        offload_optimizer: the device of the optimizer's state.
        offload_param: the same of parameters, which only stage 3 can move.
        cpu_adam: offloaded weights may be updated by DeepSpeed's CPUAdam, where it builds.
        partition_method: how the model is cut into pipeline stages; None: as natively.
        curriculum: the block `curriculum_learning`, which the loop follows; None: no such block.
        remarks: what of the file is not passed on to DeepSpeed, and why; for the log.
    """

    stage: int
    json: JsonObject
    offload_optimizer: RemoteDevice
    offload_param: RemoteDevice
    cpu_adam: bool
    partition_method: str | None
    curriculum: JsonObject | None
    remarks: tuple[str, ...]


def deepspeed_plan(config: RunConfig, *, data_parallel_size: int) -> DeepSpeedPlan:
    """Return the plan of `--deepspeed`, the flags and the file of `--deepspeed_config`.

    Raises:
        ConfigError: the file cannot be read, or contradicts the flags; lists all problems.
    """
    user = user_json(config)
    raise_all(agreement_problems(config, user, data_parallel_size=data_parallel_size))
    complete = complete_json(config, user, data_parallel_size=data_parallel_size)
    stage = _stage(complete)
    partition = value_at(user, "pipeline.partition")
    assert partition is None or isinstance(partition, str)  # noqa: S101  # invariant: `agreement_problems`
    torch_adam = value_at(user, "optimizer.params.torch_adam")
    curriculum = value_at(user, "curriculum_learning")
    return DeepSpeedPlan(
        stage=stage,
        json=_json_for_deepspeed(complete),
        offload_optimizer=_device(complete, "offload_optimizer"),
        offload_param=_device(complete, "offload_param"),
        cpu_adam=not (config.engine.cpu_torch_adam or torch_adam),
        partition_method=config.engine.pp_partition_method or partition,
        curriculum=curriculum if isinstance(curriculum, Mapping) else None,
        remarks=(*remarks(user), *_stage_remarks(stage)),
    )


def user_json(config: RunConfig) -> dict[str, JsonValue]:
    """Return the content of the file of `--deepspeed_config`; empty without the flag."""
    path = config.engine.deepspeed_config
    return {} if path is None else read_json(path)


def recorded_json(config: RunConfig, *, data_parallel_size: int) -> dict[str, JsonValue]:
    """Return the complete JSON that ranks compare and checkpoints record.

    Includes the keys that are not passed on to DeepSpeed: a run that gets it as its file returns
    the same. Empty without --deepspeed.
    """
    if not config.engine.deepspeed:
        return {}
    user = user_json(config)
    kept = {name: user[name] for name in KEPT_BACK if user.get(name)}
    return complete_json(config, user, data_parallel_size=data_parallel_size) | kept


def read_json(path: str) -> dict[str, JsonValue]:
    """Return the JSON file as nested dicts, each key by the name that `KEYS` has for it.

    Raises:
        ConfigError: it is missing, not JSON, or has unknown keys (which DeepSpeed itself would
            ignore silently).
    """
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "DeepSpeed's JSON file cannot be read",
            found=f"--deepspeed_config {path}: {error}",
            fix="give the path of a JSON file, or leave the flag out: the flags are enough",
        ) from error
    user = _parsed(text, path)
    raise_all(_unknown_keys(user, KEYS, path))
    return user


def complete_json(
    config: RunConfig, user: JsonObject, *, data_parallel_size: int
) -> dict[str, JsonValue]:
    """Return the complete JSON: every key that affects numbers, set by the user or not.

    Args:
        user: what `read_json` returned, without contradiction to the flags (`agreement_problems`).
    """
    implied = values_from_flags(config, user, data_parallel_size=data_parallel_size)
    complete = _completed(KEYS, user, implied, "")
    zero, pipeline = (object_at(complete, block) for block in ("zero_optimization", "pipeline"))
    if value_at(user, "zero_optimization.overlap_comm") is None:
        zero["overlap_comm"] = stage_of(config, user) == 3  # the default of DeepSpeed
    for name, size in _BY_WIDTH.items():
        if object_at(user, "zero_optimization").get(name) == "auto":
            zero[name] = size(config.model.hidden_size)
    # Layers are recomputed by this program, which replays its generators.
    pipeline["activation_checkpoint_interval"] = 0
    return complete | {"zero_optimization": zero, "pipeline": pipeline}


def remarks(user: JsonObject) -> Iterator[str]:
    """Yield what of a user's JSON is not passed on to DeepSpeed, and why, one sentence each."""
    for name in ("optimizer", "scheduler"):
        if user.get(name):
            yield f"{name}: agrees with the flags, which alone decide; not handed to DeepSpeed"
    for path, rule in _rules(KEYS, ""):
        if isinstance(rule, DroppedKey) and value_at(user, path) not in (None, rule.instead):
            yield f"{path}: has no effect here because {rule.because}"


def _stage_remarks(stage: int) -> tuple[str, ...]:
    if stage > 0:
        return ()
    return (
        "ZeRO stage 0: the native optimizer updates, clips and scales inside DeepSpeed's engine, "
        "which gets neither precision nor clipping",
    )


def _json_for_deepspeed(complete: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return the part of the complete JSON that DeepSpeed gets."""
    if _stage(complete) > 0:
        return complete
    own = {"grad_accum_dtype": "fp32", "param_dtype": "fp32"}
    return complete | {
        "gradient_clipping": 0.0,
        "fp16": object_at(complete, "fp16") | {"enabled": False},
        "bf16": object_at(complete, "bf16") | {"enabled": False},
        "data_types": object_at(complete, "data_types") | own,
    }


def _stage(whole: JsonObject) -> int:
    stage = value_at(whole, "zero_optimization.stage")
    assert isinstance(stage, int)  # noqa: S101  # invariant: `_completed` has checked it
    return stage


def _device(whole: JsonObject, offload: str) -> RemoteDevice:
    device = value_at(whole, f"zero_optimization.{offload}.device")
    return RemoteDevice.NONE if device is None else RemoteDevice(str(device))


def _completed(
    tree: Tree, user: JsonObject, implied: Mapping[str, ImpliedValue], prefix: str
) -> dict[str, JsonValue]:
    out: dict[str, JsonValue] = {}
    for key, rule in tree.items():
        path = prefix + key
        if path in KEPT_BACK:
            continue
        if isinstance(rule, Mapping):
            block = _completed(rule, user, implied, f"{path}.")
            is_offload_off = key in _OFFLOADS and block["device"] == RemoteDevice.NONE
            out[key] = None if is_offload_off else block
        elif isinstance(rule, FreeKey):
            given = implied[path].value if path in implied else value_at(user, path)
            value = rule.default if given is None else as_kind(given, rule)
            out[key] = list(value) if isinstance(value, tuple) else value
        elif isinstance(rule, FixedKey):
            out[key] = rule.value
        elif isinstance(rule, DroppedKey) and rule.instead is not None:
            out[key] = rule.instead
        elif isinstance(rule, UnsupportedKey) and rule.written is not None:
            out[key] = dict(rule.written)
    return out


def _rules(tree: Tree, prefix: str) -> Iterator[tuple[str, Rule]]:
    for key, rule in tree.items():
        if isinstance(rule, Mapping):
            yield from _rules(rule, f"{prefix}{key}.")
        else:
            yield prefix + key, rule


def _parsed(text: str, path: str) -> dict[str, JsonValue]:
    try:
        user = parse_json(text)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1] if text.strip() else ""
        raise ConfigError(
            "DeepSpeed's JSON file is not JSON",
            found=f"{path}, line {error.lineno}, column {error.colno}: {error.msg}: {line.strip()}",
            fix="mend that line; JSON has neither comments nor commas before a closing bracket",
        ) from error
    except ValueError as error:
        raise ConfigError(
            "DeepSpeed's JSON file says something twice, or no number",
            found=f"{path}: {error}",
            fix="keep one of them",
        ) from error
    if not isinstance(user, dict):
        raise ConfigError(
            "DeepSpeed's JSON file holds something else than keys and values",
            found=f"{path}: {type(user).__name__}",
            fix='write an object: {"zero_optimization": {"stage": 1}}',
        )
    return _renamed(user, path)


def _renamed(user: dict[str, JsonValue], path: str) -> dict[str, JsonValue]:
    """Return the same with each key under one name; older spellings are DeepSpeed's own."""
    zero = user.get("zero_optimization")
    if isinstance(zero, bool):  # the form of the first ZeRO
        user["zero_optimization"] = {"stage": int(zero)}
    for old, new in RENAMED.items():
        holder, _, old_key = old.rpartition(".")
        block = user.get(holder) if holder else user
        if isinstance(block, dict) and old_key in block:
            _move(block, old_key, new.rpartition(".")[2], block.pop(old_key), path)
    zero = user.get("zero_optimization")
    if isinstance(zero, dict):
        pin = zero.pop("cpu_offload_use_pin_memory", None)
        for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", _OFFLOADS[0])):
            if zero.pop(old, None):
                device = {"device": "cpu"} | ({} if pin is None else {"pin_memory": pin})
                _move(zero, old, new, device, path)
    return user


def _move(block: dict[str, JsonValue], old: str, new: str, value: JsonValue, path: str) -> None:
    if new in block:
        raise ConfigError(
            "DeepSpeed's JSON file has a key under two names",
            found=f"{path}: {old} and {new}",
            fix=f"keep {new}",
        )
    block[new] = value


def _unknown_keys(
    user: JsonObject, tree: Tree, path: str, prefix: str = ""
) -> Iterator[ConfigError]:
    for key, value in user.items():
        rule = tree.get(key)
        if rule is None:
            near = difflib.get_close_matches(key, tree, n=1, cutoff=0.5)
            yield ConfigError(
                "DeepSpeed has no such key",
                found=f"{prefix}{key} in {path}",
                fix=f"did you mean {prefix}{near[0]}?" if near else "leave it out",
            )
        elif isinstance(rule, Mapping) and isinstance(value, Mapping):
            yield from _unknown_keys(value, rule, path, f"{prefix}{key}.")
