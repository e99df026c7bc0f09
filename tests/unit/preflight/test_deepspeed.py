"""What is wrong with a run through DeepSpeed is known before DeepSpeed is imported."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from megatron.preflight import deepspeed
from megatron.preflight.checks import CHECKS
from megatron.preflight.run import collect_findings
from tests.unit.preflight.plans import found, only, plan


def through_deepspeed(**flags: Any) -> Any:
    """A plan of a tiny run through DeepSpeed."""
    return plan(**{"deepspeed": True, "fp64": False} | flags)


def written(folder: Path, values: dict[str, Any] | str) -> str:
    """A JSON file of DeepSpeed; its path."""
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


def test_a_good_run_passes(tmp_path: Path) -> None:
    values = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    good = through_deepspeed(world_size=2, deepspeed_config=written(tmp_path, values))
    assert collect_findings(good, deepspeed.CHECKS) == []
    assert set(deepspeed.CHECKS) < set(CHECKS)


def test_a_native_run_needs_no_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", _missing)
    assert collect_findings(plan(), deepspeed.CHECKS) == []


def _missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize(
    ("version", "words"), [(None, "not installed"), ("0.18.9", "too old"), ("0.20.0", "too new")]
)
def test_a_package_that_cannot_be_used_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, version: str | None, words: str
) -> None:
    monkeypatch.setattr(
        importlib.metadata, "version", _missing if version is None else lambda name: version
    )
    only(
        found(deepspeed.deepspeed_is_installed, through_deepspeed()), words, "leave out --deepspeed"
    )


def test_flags_of_deepspeed_need_deepspeed() -> None:
    errors = found(
        deepspeed.deepspeed_flags_have_an_engine, plan(zero_stage="2", deepspeed_config="ds.json")
    )
    only(
        errors,
        "flags of DeepSpeed were given, and the native engine trains",
        "--deepspeed-config, --zero-stage without --deepspeed",
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"use_distributed_optimizer": True}, ["--use-distributed-optimizer", "--zero-stage 1"]),
        ({"overlap_grad_reduce": True}, ["--overlap-grad-reduce", "overlap_comm"]),
        ({"ddp_bucket_size": 5}, ["--ddp-bucket-size", "--zero-reduce-bucket-size"]),
        ({"pipeline_schedule": "zero-bubble"}, ["--pipeline-schedule zero-bubble", "1f1b"]),
        ({"check_collectives": True}, ["--check-collectives", "comms_logger"]),
        ({"optimizer_cpu_offload": True}, ["--optimizer-cpu-offload", "use --cpu-optimizer"]),
        ({"use_mup": True}, ["--use-mup", "learning rates of this width"]),
        ({"optimizer": "lion"}, ["--optimizer lion", "use --optimizer adam"]),
        ({"exp_avg_dtype": "bf16"}, ["--exp-avg-dtype bf16", "--exp-avg-dtype fp32"]),
        (
            {"num_virtual_stages_per_pipeline_rank": 2},
            ["--num-virtual-stages-per-pipeline-rank", "one stage per rank"],
        ),
    ],
)
def test_flags_of_the_native_engine_are_refused_with_what_takes_their_place(
    flags: dict[str, Any], words: list[str]
) -> None:
    errors = found(deepspeed.deepspeed_flags_have_an_engine, through_deepspeed(**flags))
    only(errors, "a flag of the native engine was given, and DeepSpeed trains", *words)
    assert found(deepspeed.deepspeed_flags_have_an_engine, plan(**flags)) == []


def test_no_step_is_computed_twice_through_deepspeed() -> None:
    check = deepspeed.deepspeed_flags_have_an_engine
    errors = found(check, through_deepspeed(rerun_check_interval=5))
    only(errors, "DeepSpeed computes no step twice", "--rerun-check-interval 5 with --deepspeed")
    assert found(check, plan(rerun_check_interval=5)) == []


def test_stages_are_cut_as_natively_or_by_deepspeed_and_not_by_both() -> None:
    check = deepspeed.deepspeed_flags_have_an_engine
    cut: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_balance": "parameters"}
    assert found(check, through_deepspeed(**cut)) == []
    assert found(check, through_deepspeed(pp_partition_method="uniform")) == []
    errors = found(check, through_deepspeed(pp_partition_method="uniform", **cut))
    words = "--pp-partition-method uniform, --pipeline-balance"
    only(errors, "the boundaries of pipeline stages are given twice", words)


def test_the_schedule_that_deepspeed_has_may_be_named() -> None:
    run_plan = through_deepspeed(pipeline_schedule="1f1b")
    assert found(deepspeed.deepspeed_flags_have_an_engine, run_plan) == []


def test_every_contradiction_is_a_finding_of_its_own(tmp_path: Path) -> None:
    values = {"gradient_clipping": 1.0, "train_batch_size": 16}
    run_plan = through_deepspeed(deepspeed_config=written(tmp_path, values))
    errors = found(deepspeed.deepspeed_json_agrees_with_the_flags, run_plan)
    assert len(errors) == 2
    assert all("contradict each other" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["is not JSON", "line 1, column 2"]),
        ('{"gradient_cliping": 1}', ["no such key", "did you mean gradient_clipping?"]),
    ],
)
def test_a_file_that_cannot_be_used_is_said_once(
    tmp_path: Path, text: str, words: list[str]
) -> None:
    run_plan = through_deepspeed(deepspeed_config=written(tmp_path, text))
    errors = [finding.error for finding in collect_findings(run_plan, deepspeed.CHECKS)]
    only(errors, *words)


def test_two_unknown_keys_are_two_findings(tmp_path: Path) -> None:
    run_plan = through_deepspeed(deepspeed_config=written(tmp_path, {"a": 1, "b": 2}))
    assert len(found(deepspeed.deepspeed_json_agrees_with_the_flags, run_plan)) == 2


def test_a_missing_file_is_said_once(tmp_path: Path) -> None:
    run_plan = through_deepspeed(deepspeed_config=str(tmp_path / "none.json"))
    errors = [finding.error for finding in collect_findings(run_plan, deepspeed.CHECKS)]
    only(errors, "cannot be read", "none.json")


def test_ranks_that_do_not_divide_are_left_to_their_own_check(tmp_path: Path) -> None:
    run_plan = through_deepspeed(
        world_size=3,
        tensor_model_parallel_size=2,
        deepspeed_config=written(tmp_path, {"train_batch_size": 16}),
    )
    assert found(deepspeed.deepspeed_json_agrees_with_the_flags, run_plan) == []


@pytest.mark.parametrize("stage", ["2", "3"])
def test_zero_2_and_3_are_refused_with_pipelines(stage: str) -> None:
    run_plan = through_deepspeed(world_size=2, pipeline_model_parallel_size=2, zero_stage=stage)
    errors = found(deepspeed.zero_stage_fits_the_pipeline, run_plan)
    only(
        errors,
        "ZeRO 2 and 3 do not go with pipelines",
        f"ZeRO stage {stage}, --pipeline-model-parallel-size 2",
        "use --zero-stage 1",
    )


def test_the_stage_of_the_file_counts_for_pipelines_too(tmp_path: Path) -> None:
    path = written(tmp_path, {"zero_optimization": {"stage": 2}})
    run_plan = through_deepspeed(
        world_size=2, pipeline_model_parallel_size=2, deepspeed_config=path
    )
    assert len(found(deepspeed.zero_stage_fits_the_pipeline, run_plan)) == 1


@pytest.mark.parametrize("stage", ["0", "1"])
def test_zero_0_and_1_go_with_pipelines(stage: str) -> None:
    run_plan = through_deepspeed(world_size=2, pipeline_model_parallel_size=2, zero_stage=stage)
    assert found(deepspeed.zero_stage_fits_the_pipeline, run_plan) == []


def test_ranks_of_a_pipeline_are_numbered_as_deepspeed_does() -> None:
    flags = {"world_size": 4, "use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2}
    bad = through_deepspeed(**flags)
    only(found(deepspeed.zero_stage_fits_the_pipeline, bad), "--use-tp-pp-dp-mapping")


def test_several_stages_need_the_pipeline_engine() -> None:
    flags = {"world_size": 2, "use_pipeline_engine": False}
    errors = found(
        deepspeed.zero_stage_fits_the_pipeline,
        through_deepspeed(pipeline_model_parallel_size=2, **flags),
    )
    only(errors, "several pipeline stages need DeepSpeed's pipeline engine")
    assert found(deepspeed.zero_stage_fits_the_pipeline, through_deepspeed(**flags)) == []


@pytest.mark.parametrize(
    "values", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}]
)
def test_timers_that_would_end_a_pipeline_are_refused(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    path = written(tmp_path, values)
    flags = {"world_size": 2, "deepspeed_config": path}
    run_plan = through_deepspeed(pipeline_model_parallel_size=2, **flags)
    errors = found(deepspeed.deepspeed_can_time_the_run, run_plan)
    only(errors, "cannot time its own pipeline", next(iter(values)))
    assert found(deepspeed.deepspeed_can_time_the_run, through_deepspeed(**flags)) == []


def test_float16_on_a_cpu_is_refused_where_zero_would_refuse_it() -> None:
    errors = found(
        deepspeed.deepspeed_has_the_precision, through_deepspeed(fp16=True, zero_stage="1")
    )
    only(errors, "does not train in float16 on a CPU", "--fp16, ZeRO stage 1", "use --bf16")
    assert found(deepspeed.deepspeed_has_the_precision, through_deepspeed(fp16=True)) == []
    run_plan = through_deepspeed(bf16=True, zero_stage="1")
    assert found(deepspeed.deepspeed_has_the_precision, run_plan) == []
