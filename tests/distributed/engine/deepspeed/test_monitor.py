"""The outputs that a JSON turns on are written, and its communication changes no number."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny import FP32, tiny_run, train, write_tiny_corpus

WATCHED = {
    "csv_monitor": {"enabled": True, "job_name": "watched"},
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "comms_logger": {"enabled": True},
    "wall_clock_breakdown": True,
    "steps_per_print": 1,
}
# Buckets that are smaller than a layer, and every other way to communicate.
COMMUNICATION: dict[str, dict[str, Any]] = {
    "stage 1": {
        "stage": 1,
        "reduce_scatter": False,
        "reduce_bucket_size": 500,
        "allgather_bucket_size": 300,
        "allgather_partitions": False,
        "round_robin_gradients": True,
    },
    "stage 2": {
        "stage": 2,
        "overlap_comm": True,
        "contiguous_gradients": False,
        "reduce_bucket_size": 500,
        "use_multi_rank_bucket_allreduce": False,
    },
    "stage 3": {
        "stage": 3,
        "overlap_comm": False,
        "reduce_bucket_size": 500,
        "sub_group_size": 1000,
        "stage3_prefetch_bucket_size": 100,
        "stage3_param_persistence_threshold": 10,
        "stage3_max_live_parameters": 1000,
        "stage3_max_reuse_distance": 1000,
        "stage3_use_all_reduce_for_fetch_params": True,
    },
}


def numbers(corpus: str, flags: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of two steps of eight samples."""
    record = train(tiny_run(corpus, fp64=False, train_iters=2, **flags))
    return record.losses, record.grad_norms


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, tuple[list[float], list[float]]]:
    """A corpus, and the numbers of the native engine on it."""
    corpus = write_tiny_corpus(tmp_path_factory.mktemp("corpus"))
    return corpus, run_on_ranks(2, numbers, corpus, {})[0]


def through_deepspeed(
    corpus: str, folder: Path, values: dict[str, Any], **flags: Any
) -> tuple[list[float], list[float]]:
    """The same numbers through DeepSpeed with this JSON, which are equal on both ranks."""
    path = folder / "ds.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    all_flags = {"deepspeed": True, "deepspeed_config": str(path), **flags}
    one, other = run_on_ranks(2, numbers, corpus, all_flags, deepspeed=True)
    assert one == other
    return one


@pytest.mark.parametrize("zero", COMMUNICATION.values(), ids=list(COMMUNICATION))
def test_how_zero_communicates_changes_no_number(
    native: Any, tmp_path: Path, zero: dict[str, Any]
) -> None:
    corpus, expected = native
    for actual, reference in zip(
        through_deepspeed(corpus, tmp_path, {"zero_optimization": zero}), expected
    ):
        assert actual == pytest.approx(reference, rel=FP32)


@pytest.mark.parametrize("stages", [1, 2])
def test_monitors_and_profilers_of_the_file_work_and_hear_the_true_loss(
    native: Any, tmp_path: Path, stages: int
) -> None:
    corpus, (losses, norms) = native
    values: dict[str, Any] = json.loads(json.dumps(WATCHED))
    values["csv_monitor"]["output_path"] = str(tmp_path)
    values["flops_profiler"]["output_file"] = str(tmp_path / "flops.txt")
    flags = {"zero_stage": "1", "pipeline_model_parallel_size": stages}
    if stages > 1:
        del values["flops_profiler"], values["wall_clock_breakdown"]  # refused there
    own = through_deepspeed(corpus, tmp_path, values, **flags)
    assert own[0] == pytest.approx(losses, rel=FP32)
    assert _points(tmp_path, "train_loss") == list(zip([8, 16], own[0]))
    assert _points(tmp_path, "grad_norm") == list(zip([8, 16], own[1]))
    assert own[1] == pytest.approx(norms, rel=FP32)
    if stages == 1:
        profile = (tmp_path / "flops.txt").read_text(encoding="utf-8")
        assert "DeepSpeed Flops Profiler" in profile


def _points(folder: Path, name: str) -> list[tuple[int, float]]:
    """What DeepSpeed's CSV monitor has written of one number."""
    path = folder / "watched" / f"Train_Samples_{name}.csv"
    with path.open(encoding="utf-8") as file:
        _, *rows = csv.reader(file)
    return [(int(at), float(value)) for at, value in rows]
