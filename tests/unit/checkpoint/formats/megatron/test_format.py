"""Megatron's files hold runs whose ranks have what Megatron's ranks would have."""

from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.formats.format import PlannedRun
from megatron.checkpoint.formats.megatron.format import FORMAT
from tests.support.tiny import tiny_run

T5 = {"decoder_num_layers": 2}


def refusal(*, equal_stages: bool = True, **flags: Any) -> str:
    run = tiny_run("nowhere", checkpoint_format="megatron", **flags)
    return str(FORMAT.refuse_run(PlannedRun(run, lambda: equal_stages)) or "")


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer"),
        ({"deepspeed": True}, "--deepspeed"),
        ({"save": "memory://bucket/run"}, "--save memory://bucket/run"),
        ({"num_experts": 4, "add_bias_linear": False}, "--num-experts 4"),
        ({"relu": True, "logit_divisor": 2.0}, "--logit-divisor, --relu"),
        ({"optimizer": "muon"}, "--optimizer muon"),
        (
            {"megatron_names": "core", "embed_layernorm": True},
            "--embed-layernorm and --megatron-names core",
        ),
        ({**T5, "pipeline_model_parallel_size": 2}, "--pipeline-model-parallel-size 2 of a T5"),
        ({**T5, "megatron_names": "core-local"}, "--megatron-names core-local of a T5"),
        ({**T5, "add_bias_linear": False}, "--disable-bias-linear of a T5"),
        ({**T5, "position_embedding_type": "relative"}, "--position-embedding-type relative"),
        ({"equal_stages": False}, "pipeline stages of unequal length"),
    ],
)
def test_what_its_files_cannot_hold_is_refused_by_its_flag(
    tmp_path: Path, flags: dict[str, Any], why: str
) -> None:
    error = refusal(**{"save": str(tmp_path), **flags})
    assert "Megatron's files cannot hold this run" in error
    assert f"--checkpoint-format megatron with {why}" in error


def test_any_other_run_is_held(tmp_path: Path) -> None:
    assert refusal(save=str(tmp_path)) == ""
    assert refusal(save=str(tmp_path), **T5) == ""
    assert refusal(save=str(tmp_path), save_optim=False, tensor_model_parallel_size=2) == ""
