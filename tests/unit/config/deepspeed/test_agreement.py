"""Flags and JSON: two values for one setting are an error that shows both."""

from typing import Any

import pytest

from megatron.config.deepspeed.agreement import agreement_problems, flags_from_json, stage_of
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from tests.support.tiny import tiny_run


def asked(**flags: Any) -> RunConfig:
    """Eight samples in micro-batches of one, in float32, through DeepSpeed by `ds.json`."""
    return tiny_run(
        "nowhere", **{"deepspeed": True, "deepspeed_config": "ds.json", "fp64": False} | flags
    )


def found(user: dict[str, Any], *, replicas: int = 2, **flags: Any) -> list[ConfigError]:
    """What is wrong between this JSON and these flags."""
    return list(agreement_problems(asked(**flags), user, data_parallel_size=replicas))


def nested(path: str, value: Any) -> dict[str, Any]:
    """The JSON that has one key."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


# (path in the JSON, its value, flags that disagree, how those are spelled)
CONTRADICTIONS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("train_batch_size", 16, {}, "--global-batch-size 8"),
    ("train_micro_batch_size_per_gpu", 2, {}, "--micro-batch-size 1"),
    ("gradient_accumulation_steps", 8, {}, "--micro-batch-size 1 on 2 data-parallel ranks"),
    ("gradient_clipping", 1.0, {"clip_grad": 0.5}, "--clip-grad 0.5"),
    ("gradient_clipping", 1.0, {"clip_grad": 0.0}, "--clip-grad 0.0"),
    ("fp16.enabled", True, {"bf16": True}, "--bf16"),
    ("fp16.enabled", False, {"fp16": True}, "--fp16"),
    ("bf16.enabled", True, {}, "no --fp16 or --bf16"),
    ("bf16.enabled", False, {"bf16": True}, "--bf16"),
    ("fp16.loss_scale", 4096, {"fp16": True}, "no --loss-scale"),
    ("fp16.loss_scale", 0, {"fp16": True, "loss_scale": 8.0}, "--loss-scale 8.0"),
    ("fp16.initial_scale_power", 12, {"fp16": True}, "--initial-loss-scale 4.29497e+09"),
    ("fp16.loss_scale_window", 500, {"fp16": True}, "--loss-scale-window 1000"),
    ("fp16.hysteresis", 4, {"fp16": True}, "--hysteresis 2"),
    ("fp16.min_loss_scale", 4, {"fp16": True}, "--min-loss-scale 1"),
    (
        "communication_data_type",
        "bf16",
        {"bf16": True},
        "--bf16, --accumulate-allreduce-grads-in-fp32",
    ),
    (
        "data_types.grad_accum_dtype",
        "fp32",
        {"bf16": True, "accumulate_allreduce_grads_in_fp32": False},
        "--no-accumulate-allreduce-grads-in-fp32",
    ),
    ("data_types.param_dtype", "fp16", {"bf16": True}, "--bf16"),
    ("zero_optimization.stage", 1, {"zero_stage": "2"}, "--zero-stage 2"),
    (
        "zero_optimization.reduce_scatter",
        False,
        {"zero_reduce_scatter": True},
        "--zero-reduce-scatter",
    ),
    (
        "zero_optimization.contiguous_gradients",
        False,
        {"zero_contigious_gradients": True},
        "--zero-contigious-gradients",
    ),
    (
        "zero_optimization.reduce_bucket_size",
        7,
        {"zero_reduce_bucket_size": 9},
        "--zero-reduce-bucket-size 9",
    ),
    (
        "zero_optimization.allgather_bucket_size",
        7,
        {"zero_allgather_bucket_size": 9},
        "--zero-allgather-bucket-size 9",
    ),
    (
        "zero_optimization.offload_param.device",
        "none",
        {"zero_stage": "3", "remote_device": "cpu"},
        "--remote-device cpu",
    ),
    (
        "zero_optimization.offload_optimizer.device",
        "none",
        {"zero_stage": "1", "cpu_optimizer": True},
        "--cpu-optimizer",
    ),
    (
        "zero_optimization.offload_optimizer.pin_memory",
        False,
        {"zero_stage": "1", "use_pin_memory": True},
        "--use-pin-memory",
    ),
    (
        "activation_checkpointing.partition_activations",
        True,
        {},
        "--no-distribute-saved-activations",
    ),
    ("activation_checkpointing.cpu_checkpointing", True, {}, "--no-checkpoint-in-cpu"),
    (
        "pipeline.activation_checkpoint_interval",
        1,
        {},
        "--recompute-granularity not set",
    ),
    ("pipeline.stages", 2, {}, "--pipeline-model-parallel-size 1"),
    (
        "pipeline.partition",
        "uniform",
        {"pp_partition_method": "parameters"},
        "--pp-partition-method parameters",
    ),
]


@pytest.mark.parametrize(("path", "value", "flags", "spelled"), CONTRADICTIONS)
def test_two_words_about_one_number_are_an_error_that_shows_both(
    path: str, value: Any, flags: dict[str, Any], spelled: str
) -> None:
    (error,) = found(nested(path, value), **flags)
    assert error.problem == "the flags and DeepSpeed's JSON contradict each other"
    shown = {True: "true", False: "false"}[value] if isinstance(value, bool) else value
    assert spelled in str(error.found)
    assert f"{path} {shown} in ds.json" in str(error.found)


@pytest.mark.parametrize(("path", "value", "flags", "spelled"), CONTRADICTIONS)
def test_auto_contradicts_nothing(
    path: str, value: Any, flags: dict[str, Any], spelled: str
) -> None:
    assert found(nested(path, "auto"), **flags) == []


def test_agreement_is_no_error() -> None:
    user = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 1.0,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "communication_data_type": "FP32",
        "zero_optimization": {"stage": 1},
        "pipeline": {"stages": "auto"},
        "checkpoint": {"tag_validation": "Warn"},
    }
    assert found(user, bf16=True, zero_stage="1") == []


def test_without_a_global_batch_it_is_one_micro_batch_of_each_replica() -> None:
    (error,) = found({"train_batch_size": 4}, global_batch_size=None)
    assert "--micro-batch-size 1 on 2 data-parallel ranks" in str(error.found)


def test_a_batch_that_does_not_divide_is_left_to_its_own_check() -> None:
    assert found({"gradient_accumulation_steps": 3}, global_batch_size=7) == []


def test_a_fixed_loss_scale_leaves_the_dynamic_one_alone() -> None:
    assert found({}, fp16=True, loss_scale=128.0, initial_loss_scale=3.0) == []


@pytest.mark.parametrize(
    ("path", "value", "fix"),
    [
        ("gradient_clipping", "1.0", "give a number"),
        ("train_batch_size", 1.5, "give a whole number"),
        ("zero_optimization.contiguous_gradients", 1, "give true or false"),
        ("zero_optimization", 2, "give an object in braces"),
        ("communication_data_type", "fp8", "give one of fp32, fp16, bf16"),
        ("comms_logger.prof_ops", "all_reduce", "give a list"),
        ("csv_monitor.output_path", 3, "give a text"),
        ("optimizer.params", 3, "give an object in braces"),
        ("zero_optimization.stage", True, "give a whole number"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(path: str, value: Any, fix: str) -> None:
    (error,) = found(nested(path, value))
    assert error.problem == "a key of DeepSpeed's JSON has a value of the wrong kind"
    assert str(error.found).startswith(f"{path} ")
    assert error.fix == fix


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("zero_optimization.zero_quantized_gradients", True),
        ("gradient_allreduce_op", "sum"),
        ("bf16.check_grad_overflow", False),
        ("fp16.fp16_master_weights_and_grads", True),
        ("pipeline.seed_layers", True),
        ("torch_autocast.enabled", True),
        ("zero_optimization.parameter_alignment", True),
    ],
)
def test_what_a_run_here_cannot_be_is_refused_with_the_reason(path: str, value: Any) -> None:
    (error,) = found(nested(path, value))
    assert error.problem == "DeepSpeed's JSON has a value that is not possible here"
    assert str(error.found).startswith(path)
    assert ": " in error.fix


@pytest.mark.parametrize(
    ("key", "on", "off"),
    [
        ("amp", {"enabled": True, "opt_level": "O1"}, {"enabled": False, "opt_level": "O1"}),
        ("sparse_gradients", True, False),
        ("compile", {"deepcompile": True}, {"deepcompile": False}),
        ("tensor_parallel", {"autotp_size": 2}, {"autotp_size": 0}),
        ("sequence_parallel_size", 2, 1),
        ("elasticity", {"max_train_batch_size": 2000}, {"enabled": False, "min_gpus": 1}),
        ("datastates_ckpt", {"host_cache_size": 16}, {}),
        ("progressive_layer_drop", {"enabled": True, "theta": 0.5}, {"enabled": False}),
    ],
)
def test_a_missing_feature_is_refused_unless_it_is_off(key: str, on: Any, off: Any) -> None:
    (error,) = found({key: on})
    assert error.problem == "DeepSpeed's JSON turns on a feature that is not here"
    assert str(error.found).startswith(f"{key} in ds.json: ")
    assert found({key: off}) == []


def test_a_secret_is_not_copied_into_logs_and_checkpoints() -> None:
    (error,) = found({"comet": {"enabled": True, "api_key": "s3cret"}})
    assert "s3cret" not in str(error)
    assert "COMET_API_KEY" in error.fix


def test_an_unknown_key_is_found_in_a_json_that_was_not_read_from_a_file() -> None:
    (error,) = found({"gradient_cliping": 1.0})
    assert error.problem == "DeepSpeed has no such key"
    assert error.fix == "did you mean gradient_clipping?"


def test_float64_is_refused() -> None:
    (error,) = found({}, fp64=True)
    assert error.problem == "DeepSpeed does not train in float64"


def test_loss_scales_that_deepspeed_cannot_have_are_refused() -> None:
    errors = found({}, fp16=True, initial_loss_scale=3000.0, min_loss_scale=0.5)
    assert [error.problem for error in errors] == [
        "DeepSpeed's first loss scale is a power of two",
        "DeepSpeed's smallest loss scale is a whole number",
    ]


@pytest.mark.parametrize(
    ("name", "stage", "least"), [("offload_param", 2, 3), ("offload_optimizer", 0, 1)]
)
def test_offloading_needs_its_stage(name: str, stage: int, least: int) -> None:
    user = {"zero_optimization": {"stage": stage, name: {"device": "cpu"}}}
    (error,) = found(user)
    assert error.problem == f"only ZeRO stage {least} and above can offload this"
    assert f"ZeRO stage {stage}" in str(error.found)


def test_offloading_by_flag_needs_its_stage_too() -> None:
    (error,) = found({}, zero_stage="2", remote_device="cpu")
    assert str(error.found) == "--remote-device cpu; ZeRO stage 2"


def test_nvme_is_refused_by_flag_and_by_key() -> None:
    offload = {"device": "nvme", "nvme_path": "/fast"}
    (error,) = found({"zero_optimization": {"stage": 1, "offload_optimizer": offload}})
    assert error.problem.startswith("offloading to NVMe is not supported")
    assert "zero_optimization.offload_optimizer.device nvme" in str(error.found)
    assert "offload to the CPU" in str(error.fix)
    (error,) = found({}, zero_stage="3", remote_device="nvme")
    assert str(error.found) == "--remote-device nvme"


def test_the_stage_is_the_flags_or_else_the_files_or_else_0() -> None:
    user = {"zero_optimization": {"stage": 2}}
    assert stage_of(asked(zero_stage="1"), user) == 1
    assert stage_of(asked(), user) == 2
    assert stage_of(asked(), {}) == 0
    assert stage_of(asked(), {"zero_optimization": {"stage": "two"}}) == 0


def test_flags_that_are_not_given_take_what_the_file_says() -> None:
    user = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.3,
        "fp16": {
            "enabled": True,
            "loss_scale": 0,
            "initial_scale_power": 12,
            "loss_scale_window": 500,
            "hysteresis": 3,
            "min_loss_scale": 2,
        },
        "optimizer": {"params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-6}},
    }
    assert flags_from_json(user, {}) == {
        "fp16": True,
        "global_batch_size": 64,
        "micro_batch_size": 4,
        "clip_grad": 0.3,
        "initial_loss_scale": 4096.0,
        "loss_scale_window": 500,
        "hysteresis": 3,
        "min_loss_scale": 2.0,
        "lr": 1e-3,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "adam_eps": 1e-6,
    }


def test_flags_that_are_given_stay_as_they_are() -> None:
    user = {"gradient_clipping": 0.3, "fp16": {"enabled": True}}
    assert flags_from_json(user, {"clip_grad": 1.0, "bf16": True}) == {}


def test_what_is_open_or_of_the_wrong_kind_gives_no_flag() -> None:
    user = {
        "train_batch_size": "auto",
        "gradient_clipping": "much",
        "fp16": {"enabled": "auto", "loss_scale_window": True},
        "optimizer": {"params": {"betas": [0.9]}},
        "curriculum_learning": "auto",
    }
    assert flags_from_json(user, {}) == {}


@pytest.mark.parametrize(
    ("block", "folder"),
    [
        ({"enabled": True, "output_path": "logs", "job_name": "mine"}, "logs/mine"),
        ({"enabled": True}, "DeepSpeedJobName"),
        ({"enabled": False, "output_path": "logs"}, None),
    ],
)
def test_deepspeeds_tensorboard_becomes_ours(block: dict[str, Any], folder: str | None) -> None:
    assert flags_from_json({"tensorboard": block}, {}).get("tensorboard_dir") == folder


def test_a_curriculum_in_the_file_becomes_flags() -> None:
    block = {
        "enabled": True,
        "curriculum_type": "seqlen",
        "min_difficulty": 8,
        "max_difficulty": 16,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
    }
    given = flags_from_json({"curriculum_learning": block}, {})
    assert given["curriculum_seqlen_min"] == 8
    assert given["curriculum_iters"] == 10
    typed = {"curriculum_seqlen_min": 4}
    assert flags_from_json({"curriculum_learning": block}, typed) == {}
