"""build_schedule: determinism, and every refusal."""

import pytest

from megatron.errors import ConfigError
from megatron.pipeline.action import COMMUNICATION, ActionKind
from megatron.pipeline.schedule import (
    ScheduleName,
    build_evaluation_schedule,
    build_schedule,
    pipeline_problems,
    schedule_problems,
)


def problems(name: str, p: int, m: int, v: int = 1, layers: int | None = None) -> list[str]:
    found = pipeline_problems(
        name, num_stages=p, num_microbatches=m, num_chunks=v, num_layers=layers
    )
    return [str(error) for error in found]


def test_every_name_builds_something_that_can_be_compared() -> None:
    for name in ScheduleName:
        p, v = (2, 2) if name == "interleaved" else (1, 1)
        one, other = (
            build_schedule(name, stage=0, num_stages=p, num_microbatches=3, num_chunks=v)
            for _ in range(2)
        )
        assert one == other
        assert sum(action.kind is ActionKind.FORWARD for action in one) == 3 * v


def test_one_stage_runs_1f1b_as_without_a_pipeline() -> None:
    one = build_schedule("1f1b", stage=0, num_stages=1, num_microbatches=3)
    assert one == build_schedule("none", stage=0, num_stages=1, num_microbatches=3)
    assert not any(action.kind in COMMUNICATION for action in one)


def test_evaluation_only_goes_forward() -> None:
    schedule = build_evaluation_schedule(stage=1, num_stages=2, num_microbatches=2, num_chunks=2)
    kinds = {action.kind for action in schedule}
    assert kinds == {ActionKind.RECV_FORWARD, ActionKind.FORWARD, ActionKind.SEND_FORWARD}


def test_evaluation_of_several_chunks_needs_several_stages() -> None:
    with pytest.raises(ConfigError, match="interleaving needs more than one pipeline stage"):
        build_evaluation_schedule(stage=0, num_stages=1, num_microbatches=2, num_chunks=2)


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "problem", "fix"),
    [
        ("1F1B", 2, 1, "there is no such pipeline schedule", "1f1b"),
        ("gpipe", 0, 1, "a pipeline has at least one stage", "use 1"),
        ("interleaved", 2, 0, "a stage at least one chunk", "use 1"),
        ("none", 2, 1, "several stages need a schedule", "--pipeline-schedule 1f1b"),
        ("zero-bubble", 2, 2, "only the interleaved schedule gives", "interleaved"),
        ("interleaved", 1, 2, "interleaving needs more than one pipeline stage", "2 or more"),
        ("interleaved", 2, 1, "more than one virtual stage on each rank", "2 or more"),
    ],
)
def test_a_schedule_that_cannot_run_is_refused(
    name: str, stages: int, chunks: int, problem: str, fix: str
) -> None:
    (found,) = schedule_problems(name, num_stages=stages, num_chunks=chunks)
    assert problem in str(found)
    assert fix in found.fix
    with pytest.raises(ConfigError, match=problem):
        build_schedule(name, stage=0, num_stages=stages, num_microbatches=4, num_chunks=chunks)


def test_a_layout_that_fits_has_no_problems() -> None:
    assert problems("interleaved", 4, 5, 2, layers=8) == []
    assert problems("1f1b", 4, 1, layers=4) == []  # few micro-batches are slow, not wrong


def test_fewer_layers_than_virtual_stages_are_refused() -> None:
    (plain,) = problems("1f1b", 4, 8, layers=3)
    assert "found: --num-layers 3, --pipeline-model-parallel-size 4\n" in plain
    (virtual,) = problems("interleaved", 4, 8, 2, layers=7)
    assert "--num-layers 7, --pipeline-model-parallel-size 4 x 2 virtual stages" in virtual
    assert "use --num-layers 8 or more" in virtual


def test_fewer_microbatches_than_stages_are_refused_for_interleaving() -> None:
    (found,) = problems("interleaved", 4, 3, 2, layers=8)
    assert "the interleaved schedule needs a micro-batch for every stage" in found
    assert "found: 3 micro-batches per step" in found
    assert "--global-batch-size" in found


def test_a_step_without_microbatches_is_refused() -> None:
    (found,) = problems("1f1b", 2, 0)
    assert "a step has no micro-batch" in found


def test_all_problems_are_said_together() -> None:
    assert len(problems("zero-bubble", 4, 8, 2, layers=7)) == 2
