"""The arithmetic of benchmarks/deepspeed_memory.py; what it measures is for a calm machine."""

import json
from pathlib import Path

import pytest

from benchmarks import deepspeed_memory as memory
from megatron.arguments import parse_args
from megatron.config.deepspeed.plan import deepspeed_plan


@pytest.mark.parametrize(
    ("stage", "one", "two", "four"),
    [
        ("native", 16.0, 16.0, 16.0),
        ("native, distributed optimizer", 16.0, 11.0, 8.5),
        ("0", 16.0, 16.0, 16.0),
        ("1", 18.0, 12.0, 9.0),
        ("2", 18.0, 10.0, 6.0),
        ("3", 18.0, 9.0, 4.5),
    ],
)
def test_the_formula_of_each_stage(stage: str, one: float, two: float, four: float) -> None:
    assert memory.bytes_per_parameter(stage, 2) == two
    assert memory.bytes_per_parameter(stage, 4) == four
    assert memory.bytes_per_parameter(stage, 1) == one


@pytest.mark.parametrize(
    ("stage", "one", "two", "four"),
    [
        ("native", 16.0, 16.0, 16.0),
        ("native, distributed optimizer", 16.0, 15.0, 12.5),
        ("1", 18.0, 14.0, 11.0),
        ("2", 18.0, 10.0, 7.0),
        ("3", 18.0, 9.0, 4.5),
    ],
)
def test_the_moment_of_most_memory(stage: str, one: float, two: float, four: float) -> None:
    found = [memory.peak_per_parameter(stage, replicas) for replicas in (1, 2, 4)]
    assert found == [one, two, four]


def test_what_does_not_grow_with_depth_cancels() -> None:
    shallow, deep = memory.Measured(100, 7000 + 12 * 100), memory.Measured(300, 7000 + 12 * 300)
    assert memory.slope(shallow, deep) == 12.0
    with pytest.raises(ValueError, match="no more parameters"):
        memory.slope(deep, shallow)


@pytest.mark.parametrize("stage", memory.STAGES)
def test_the_flags_are_those_of_a_run_at_that_stage(tmp_path: Path, stage: str) -> None:
    file = tmp_path / "ds.json"
    config = parse_args(memory.flags_of(stage, layers=2, hidden=64, json_file=file))
    assert config.parallel.use_distributed_optimizer == ("distributed" in stage)
    assert config.engine.deepspeed == (stage in "0123")
    if config.engine.deepspeed:
        plan = deepspeed_plan(config, data_parallel_size=2)
        assert plan.stage == int(stage)
        small = json.loads(file.read_text())["zero_optimization"]["reduce_bucket_size"]
        assert plan.json["zero_optimization"]["reduce_bucket_size"] == small


def test_the_table_says_how_far_off_it_is() -> None:
    row = {"stage": "1", "replicas": 2, "held": 12.0, "peak": 14.0, "measured": 14.7}
    words = memory.table([row]).splitlines()[1].split()
    assert words == ["1", "2", "12.00", "14.00", "14.70", "5.0%"]
