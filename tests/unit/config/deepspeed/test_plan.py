"""DeepSpeed's JSON: read strictly, and completed until no default of DeepSpeed's is left."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.config.deepspeed.plan import (
    DeepSpeedPlan,
    complete_json,
    deepspeed_plan,
    read_json,
    recorded_json,
    remarks,
    user_json,
)
from megatron.config.fields import FieldsError
from megatron.config.run import RunConfig
from megatron.errors import ConfigError
from tests.support.tiny import tiny_run


def asked(**flags: Any) -> RunConfig:
    """A run of 8 samples in micro-batches of 1 in float32 through DeepSpeed."""
    return tiny_run("nowhere", **{"deepspeed": True, "fp64": False} | flags)


def written(folder: Path, values: dict[str, Any] | str) -> str:
    """A file of this JSON (or of this text); its path."""
    path = folder / "ds.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


def plan_of(
    folder: Path, values: dict[str, Any], *, replicas: int = 1, **flags: Any
) -> DeepSpeedPlan:
    """The plan of a run with this JSON and these flags."""
    config = asked(deepspeed_config=written(folder, values), **flags)
    return deepspeed_plan(config, data_parallel_size=replicas)


def test_without_a_file_the_flags_are_enough() -> None:
    config = asked(zero_stage="2", clip_grad=0.25, bf16=True)
    plan = deepspeed_plan(config, data_parallel_size=2)
    assert (plan.stage, plan.json["zero_optimization"]["stage"]) == (2, 2)
    assert plan.json["gradient_clipping"] == 0.25
    assert plan.json["bf16"]["enabled"] is True
    assert plan.json["data_types"]["grad_accum_dtype"] == "fp32"
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [plan.json[name] for name in batch] == [8, 1, 4]


def test_what_a_user_chooses_freely_reaches_deepspeed(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e6, "overlap_comm": False},
        "comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]},
        "wall_clock_breakdown": True,
    }
    given = plan_of(tmp_path, values).json
    assert given["zero_optimization"]["reduce_bucket_size"] == 5_000_000
    assert type(given["zero_optimization"]["reduce_bucket_size"]) is int
    assert given["zero_optimization"]["overlap_comm"] is False
    assert given["comms_logger"]["prof_ops"] == ["all_reduce"]
    assert given["wall_clock_breakdown"] is True


@pytest.mark.parametrize(("stage", "overlaps"), [(1, False), (2, False), (3, True)])
def test_overlap_is_decided_as_deepspeed_decides_it(
    tmp_path: Path, stage: int, overlaps: bool
) -> None:
    plan = plan_of(tmp_path, {"zero_optimization": {"stage": stage}})
    assert plan.json["zero_optimization"]["overlap_comm"] is overlaps


def test_auto_and_null_leave_a_choice_to_the_flags(tmp_path: Path) -> None:
    values = {
        "train_batch_size": "auto",
        "gradient_clipping": None,
        "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    }
    plan = plan_of(tmp_path, values, zero_stage="1", bf16=True)
    assert plan.json["train_batch_size"] == 8
    assert plan.json["gradient_clipping"] == 0.5
    assert plan.json["bf16"]["enabled"] is True
    assert plan.stage == 1


def test_buckets_left_open_follow_the_width_of_the_model(tmp_path: Path) -> None:
    names = (
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
    )
    values = {"zero_optimization": {"stage": 3} | dict.fromkeys(names, "auto")}
    zero = plan_of(tmp_path, values, hidden_size=40).json["zero_optimization"]
    assert [zero[name] for name in names] == [1600, 1440, 400]


def test_older_names_of_a_key_are_understood(tmp_path: Path) -> None:
    values = {
        "bfloat16": {"enabled": True},
        "zero_optimization": {"stage": 3, "cpu_offload": True, "prefetch_bucket_size": 7},
    }
    plan = plan_of(tmp_path, values, bf16=True)
    assert plan.offload_optimizer == "cpu"
    assert plan.json["zero_optimization"]["stage3_prefetch_bucket_size"] == 7
    assert "bfloat16" not in plan.json


def test_the_first_form_of_zero_is_stage_1(tmp_path: Path) -> None:
    assert plan_of(tmp_path, {"zero_optimization": True}).stage == 1


def test_a_key_under_two_names_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, {"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})
    with pytest.raises(ConfigError, match="a key under two names") as caught:
        read_json(path)
    assert caught.value.found == f"{path}: bfloat16 and bf16"


def test_offloading_is_a_part_of_the_plan(tmp_path: Path) -> None:
    param = {"device": "cpu", "pin_memory": False}
    values = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": param,
            "offload_optimizer": {"device": "cpu"},
        }
    }
    plan = plan_of(tmp_path, values, cpu_torch_adam=True)
    assert (plan.offload_param, plan.offload_optimizer) == ("cpu", "cpu")
    assert not plan.cpu_adam
    param = plan.json["zero_optimization"]["offload_param"]
    assert (param["pin_memory"], param["buffer_count"], param["max_in_cpu"]) == (False, 5, 10**9)


def test_flags_offload_without_a_file() -> None:
    config = asked(zero_stage="3", remote_device="cpu", cpu_optimizer=True, use_pin_memory=True)
    plan = deepspeed_plan(config, data_parallel_size=1)
    assert (plan.offload_param, plan.offload_optimizer, plan.cpu_adam) == ("cpu", "cpu", True)
    assert plan.json["zero_optimization"]["offload_param"]["pin_memory"] is True


def test_nothing_offloaded_is_said_by_null(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}}
    zero = plan_of(tmp_path, values).json["zero_optimization"]
    assert zero["offload_param"] is None
    assert zero["offload_optimizer"] is None


def test_at_stage_0_deepspeed_is_told_of_neither_precision_nor_clipping() -> None:
    config = asked(bf16=True, clip_grad=0.5)
    plan = deepspeed_plan(config, data_parallel_size=1)
    assert plan.json["bf16"]["enabled"] is False
    assert plan.json["gradient_clipping"] == 0.0
    assert any("ZeRO stage 0" in remark for remark in plan.remarks)
    recorded = recorded_json(config, data_parallel_size=1)  # whichever engine runs
    assert recorded["bf16"]["enabled"] is True
    assert recorded["gradient_clipping"] == 0.5


def test_blocks_that_the_program_reads_are_not_handed_on_but_recorded(tmp_path: Path) -> None:
    curriculum = {"enabled": False}
    values = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01}},
        "curriculum_learning": curriculum,
        "pipeline": {"partition": "type:transformer"},
    }
    plan = plan_of(tmp_path, values)
    assert not {"optimizer", "scheduler", "curriculum_learning"} & set(plan.json)
    assert plan.curriculum == curriculum
    assert plan.partition_method == "type:transformer"
    assert not plan.cpu_adam  # torch_adam
    assert sum("which alone decide" in remark for remark in plan.remarks) == 2
    recorded = recorded_json(
        asked(deepspeed_config=str(tmp_path / "ds.json")), data_parallel_size=1
    )
    assert recorded["optimizer"] == values["optimizer"]


def test_nothing_is_recorded_of_a_native_run() -> None:
    assert recorded_json(asked(deepspeed=False), data_parallel_size=1) == {}


def test_what_was_recorded_is_a_file_for_the_same_run(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 77}}
    config = asked(deepspeed_config=written(tmp_path, values))
    recorded = recorded_json(config, data_parallel_size=2)
    again = tmp_path / "again"
    again.mkdir()
    plan = plan_of(again, recorded, replicas=2)
    assert plan.json == deepspeed_plan(config, data_parallel_size=2).json


def test_what_is_dropped_is_said(tmp_path: Path) -> None:
    user = read_json(
        written(
            tmp_path,
            {"zero_optimization": {"elastic_checkpoint": True}, "dataloader_drop_last": True},
        )
    )
    texts = list(remarks(user))
    assert len(texts) == 2
    assert texts[0].startswith("dataloader_drop_last: has no effect here because ")


def test_layers_are_recomputed_by_this_program_alone(tmp_path: Path) -> None:
    values = {"pipeline": {"activation_checkpoint_interval": 1}}
    plan = plan_of(tmp_path, values, recompute_granularity="full")
    assert plan.json["pipeline"]["activation_checkpoint_interval"] == 0


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        user_json(asked(deepspeed_config=str(tmp_path / "none.json")))
    assert "--deepspeed_config" in str(caught.value.found)
    assert user_json(asked()) == {}


def test_a_mistake_in_the_file_is_shown_where_it_stands(tmp_path: Path) -> None:
    path = written(tmp_path, '{\n  "train_batch_size": 8,\n  "fp16": {"enabled": True}\n}\n')
    with pytest.raises(ConfigError, match="is not JSON") as caught:
        read_json(path)
    assert "line 3, column 23" in str(caught.value.found)
    assert '"fp16": {"enabled": True}' in str(caught.value.found)


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not JSON"):
        read_json(written(tmp_path, ""))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('{"fp16": {"enabled": true, "enabled": false}}', "enabled: named twice in one object"),
        ('{"gradient_clipping": NaN}', "NaN is no number of JSON"),
    ],
)
def test_a_key_given_twice_and_a_number_that_is_none_are_errors(
    tmp_path: Path, text: str, found: str
) -> None:
    with pytest.raises(ConfigError, match="says something twice, or no number") as caught:
        read_json(written(tmp_path, text))
    assert str(caught.value.found).endswith(found)


def test_a_list_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="something else than keys and values") as caught:
        read_json(written(tmp_path, "[1]"))
    assert str(caught.value.found).endswith("list")


def test_every_unknown_key_is_found_at_once_with_the_nearest(tmp_path: Path) -> None:
    values = {
        "gradient_cliping": 1.0,
        "zero_optimization": {"stag": 1},
        "activation_checkpointing": {"partitioned_activations": True},
        "xyzzy": 1,
    }
    with pytest.raises(FieldsError) as caught:
        read_json(written(tmp_path, values))
    fixes = [error.fix for error in caught.value.errors]
    assert [error.problem for error in caught.value.errors] == ["DeepSpeed has no such key"] * 4
    assert fixes == [
        "did you mean gradient_clipping?",
        "did you mean zero_optimization.stage?",
        "did you mean activation_checkpointing.partition_activations?",
        "leave it out",
    ]


def test_all_contradictions_are_one_error(tmp_path: Path) -> None:
    with pytest.raises(FieldsError) as caught:
        plan_of(tmp_path, {"gradient_clipping": 1.0, "train_batch_size": 7}, clip_grad=0.5)
    assert len(caught.value.errors) == 2


def test_completing_changes_nothing_of_the_users(tmp_path: Path) -> None:
    user = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    before = json.dumps(user)
    complete_json(asked(), user, data_parallel_size=1)
    assert json.dumps(user) == before
