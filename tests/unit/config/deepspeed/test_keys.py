"""The tables of keys are complete: they have every key that the installed DeepSpeed reads."""

import importlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from megatron.config.deepspeed.keys import (
    KEPT_BACK,
    KEYS,
    RENAMED,
    DroppedKey,
    FixedKey,
    FreeKey,
    UnsupportedKey,
    as_kind,
    value_at,
)
from megatron.config.deepspeed.plan import deepspeed_plan
from tests.support.tiny import tiny_run

# Keys that DeepSpeed reads and does not get, each with the reason why no number depends on it.
HARMLESS = {
    "optimizer": "the optimizer is handed over as an object",
    "scheduler": "learning rates are set before every step",
    "vocabulary_size": "only warned about",
    "dataloader_drop_last": "DeepSpeed's loader is not used",
    "datastates_ckpt": "DeepSpeed's checkpoints are not used",
    "weight_quantization": "for inference",
    "sequence_parallel_size": "only without a grid, which there always is",
    "torch_autocast.dtype": "autocast is off",
    "torch_autocast.lower_precision_safe_modules": "autocast is off",
    "bfloat16": "the older name of bf16",
    "activation_checkpointing.contiguous_memory_optimization": "DeepSpeed recomputes nothing",
    "activation_checkpointing.number_checkpoints": "DeepSpeed recomputes nothing",
    "activation_checkpointing.synchronize_checkpoint_boundary": "DeepSpeed recomputes nothing",
    "activation_checkpointing.profile": "DeepSpeed recomputes nothing",
    "zero_optimization.elastic_checkpoint": "DeepSpeed's checkpoints are not used",
    "zero_optimization.zenflow": "off where it is not there",
    "tensorboard.output_path": "off",
    "tensorboard.job_name": "off",
    "comet.api_key": "from the environment",
}
# Blocks of features that are turned off: their other keys are then not read.
OFF_AS_A_WHOLE = (
    "autotuning",
    "compile",
    "data_efficiency.data_routing",
    "data_efficiency.data_sampling",
    "expert_parallel",
    "hybrid_engine",
    "tensor_parallel",
)
# Not read as keys of the JSON, but by other names for what `KEYS` has.
DEPRECATED = {"cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"}


class Asked(dict[str, Any]):
    """A JSON that records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any], prefix: str, log: set[str]) -> None:
        super().__init__(
            {
                key: Asked(value, f"{prefix}{key}.", log) if isinstance(value, Mapping) else value
                for key, value in values.items()
            }
        )
        self.prefix, self.log = prefix, log

    def __getitem__(self, key: str) -> Any:
        self.log.add(self.prefix + key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.log.add(f"{self.prefix}{key}")
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.log.add(self.prefix + key)
        return super().get(key, default)

    def keys(self) -> Any:
        return _Keys(self)


class _Keys:
    """`in block.keys()` reads a key too."""

    def __init__(self, block: Asked) -> None:
        self.block = block

    def __contains__(self, key: object) -> bool:
        return key in self.block

    def __iter__(self) -> Iterator[str]:
        return iter(self.block)


def given_by(**flags: Any) -> dict[str, Any]:
    """The complete JSON of a run on one rank."""
    config = tiny_run("nowhere", **{"deepspeed": True, "fp64": False} | flags)
    return dict(deepspeed_plan(config, data_parallel_size=1).json)


def missing_paths(paths: Iterable[str], given: Mapping[str, Any]) -> list[str]:
    """Paths that DeepSpeed reads, does not get, and that no list here excuses."""
    return sorted(
        path
        for path in paths
        if path not in HARMLESS
        and not path.startswith(tuple(f"{block}." for block in OFF_AS_A_WHOLE))
        and not _is_there(given, path)
    )


def _is_there(given: Any, path: str) -> bool:
    for key in path.split("."):
        if not isinstance(given, Mapping) or key not in given:
            return False
        given = given[key]
    return True


def test_deepspeed_is_told_every_key_that_it_asks_for() -> None:
    config = importlib.import_module("deepspeed.runtime.config")
    given, log = given_by(zero_stage="3", bf16=True), set[str]()
    config.DeepSpeedConfig(Asked(given, "", log))
    removed = set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) | {
        f"zero_optimization.{key}" for key in config._REMOVED_ZERO_CONFIG_KEYS
    }
    assert len(log) > 60, "the recorder does not see what is read"
    assert missing_paths(log - removed, given) == []
    known = {path.partition(".")[0] for path in KEYS}
    assert {key.partition(".")[0] for key in removed} <= known


# (module, class, block of the JSON)
MODELS = [
    ("runtime.zero.config", "DeepSpeedZeroConfig", "zero_optimization"),
    (
        "runtime.zero.leaf_module_config",
        "DeepSpeedZeroLeafModuleConfig",
        "zero_optimization.leaf_module",
    ),
    (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadParamConfig",
        "zero_optimization.offload_param",
    ),
    (
        "runtime.zero.offload_config",
        "DeepSpeedZeroOffloadOptimizerConfig",
        "zero_optimization.offload_optimizer",
    ),
    ("runtime.precision_config", "DeepSpeedFP16Config", "fp16"),
    ("runtime.precision_config", "DeepSpeedBF16Config", "bf16"),
    ("monitor.config", "TensorBoardConfig", "tensorboard"),
    ("monitor.config", "CSVConfig", "csv_monitor"),
    ("monitor.config", "WandbConfig", "wandb"),
    ("monitor.config", "CometConfig", "comet"),
    ("comm.config", "CommsLoggerConfig", "comms_logger"),
    ("utils.config", "DeepSpeedThroughputTimerConfig", "timers.throughput"),
]


@pytest.mark.parametrize(("module", "name", "block"), MODELS)
def test_no_field_of_deepspeeds_models_is_left_to_its_default(
    module: str, name: str, block: str
) -> None:
    model = getattr(importlib.import_module(f"deepspeed.{module}"), name)
    names = {field.alias or key for key, field in model.model_fields.items()} - DEPRECATED
    older = {path.removeprefix(f"{block}.") for path in RENAMED if path.startswith(f"{block}.")}
    given = given_by(zero_stage="3", bf16=True, remote_device="cpu", cpu_optimizer=True)
    assert missing_paths({f"{block}.{key}" for key in names - older}, given) == []
    assert set(value_at(given, block)) <= names, "a key that DeepSpeed does not know any more"


def test_deepspeed_takes_what_it_is_told() -> None:
    config = importlib.import_module("deepspeed.runtime.config")
    given = given_by(zero_stage="2", bf16=True, clip_grad=0.25)
    parsed = config.DeepSpeedConfig(given)
    assert parsed.gradient_clipping == 0.25  # 1.0 without a word
    assert parsed.train_batch_size == 8
    assert parsed.gradient_accumulation_steps == 8
    assert parsed.zero_config.stage == 2
    assert parsed.zero_allow_untested_optimizer is True
    assert parsed.bfloat16_config.enabled is True
    assert parsed.grad_accum_dtype == "fp32"
    assert parsed.pipeline["activation_checkpoint_interval"] == 0
    assert parsed.data_efficiency_enabled is False


@pytest.mark.parametrize("flags", [{"fp16": True, "zero_stage": "1"}, {}, {"zero_stage": "3"}])
def test_deepspeed_takes_every_precision_and_stage(flags: dict[str, Any]) -> None:
    config = importlib.import_module("deepspeed.runtime.config")
    parsed = config.DeepSpeedConfig(given_by(**flags))
    assert parsed.float16_config.enabled is flags.get("fp16", False)
    assert parsed.zero_config.stage == int(flags.get("zero_stage", "0"))


def test_the_default_of_clipping_that_makes_all_this_necessary_is_still_there() -> None:
    constants = importlib.import_module("deepspeed.runtime.constants")
    assert constants.GRADIENT_CLIPPING_DEFAULT == 1.0


def test_a_key_that_nobody_thought_of_is_found() -> None:
    log = set[str]()
    block = Asked({"a": {"b": 1}}, "", log)
    assert ("a" in block.keys(), block["a"].get("c", 5)) == (True, 5)  # noqa: SIM118
    assert missing_paths(log, {"a": {"b": 1}}) == ["a.c"]


def test_every_rule_says_why() -> None:
    def reasons(tree: Mapping[str, Any]) -> Iterator[str]:
        for rule in tree.values():
            if isinstance(rule, Mapping):
                yield from reasons(rule)
            elif isinstance(rule, FixedKey | DroppedKey):
                yield rule.because
            elif isinstance(rule, UnsupportedKey):
                yield rule.feature
                yield rule.instead

    assert all(len(reason) > 8 or reason for reason in reasons(KEYS))
    assert set(KEYS) >= KEPT_BACK
    names = {new.partition(".")[0] for new in RENAMED.values()}
    assert names <= set(KEYS)


def test_a_default_is_of_the_kind_that_its_key_has() -> None:
    def check(tree: Mapping[str, Any]) -> None:
        for rule in tree.values():
            if isinstance(rule, Mapping):
                check(rule)
            elif isinstance(rule, FreeKey) and rule.default not in (None, "auto", ()):
                assert as_kind(rule.default, rule) == rule.default

    check(KEYS)


@pytest.mark.parametrize("path", ["a", "a.b.c", "x"])
def test_what_is_open_is_none(path: str) -> None:
    assert value_at({"a": "auto", "x": None}, path) is None


def test_every_choice_of_the_pipeline_engine_is_told() -> None:
    config = importlib.import_module("deepspeed.runtime.config")
    assert set(config.get_pipeline_config({})) <= set(given_by()["pipeline"])
