"""The order of work of one pipeline stage, as data: `build_schedule` and its evaluation twin.

Pure and deterministic: every rank computes its own stage's list and they fit together, because each
computes all of them. An executor does the actions and needs no rule of its own.
"""

from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache

from megatron.errors import ConfigError
from megatron.pipeline import orders
from megatron.pipeline.action import Action, ActionKind, Schedule
from megatron.pipeline.exchange import Timed, matched_batches, with_ticks

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleName",
    "build_batches",
    "build_evaluation_batches",
    "build_evaluation_schedule",
    "build_schedule",
    "pipeline_problems",
    "schedule_problems",
]

_CACHED = 64  # a batch ramp changes the number of micro-batches; evaluation has its own


class ScheduleName(StrEnum):
    """The names of schedules: those of `PipelineSchedule`, and that of a single stage."""

    NONE = "none"
    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"


def build_schedule(
    name: str, *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Return the actions of `stage` in one training step, in order.

    Args:
        name: a `ScheduleName`.
        stage: from 0; the one that takes the batch is 0.
        num_stages: pipeline-parallel ranks.
        num_microbatches: per step; any number from 1. Fewer than `num_stages` is correct, but slow.
        num_chunks: parts of the model that each stage holds; more than 1 only interleaved.

    Raises:
        ConfigError: the schedule cannot run on that many stages or chunks.
    """
    return _actions(_timed(name, stage, num_stages, num_microbatches, num_chunks))


def build_batches(
    name: str, *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return `build_schedule` as steps for an executor: see `exchange.matched_batches`."""
    return tuple(matched_batches(_timed(name, stage, num_stages, num_microbatches, num_chunks)))


def build_evaluation_schedule(
    *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> Schedule:
    """Return the actions of `stage` in evaluation: forwards only, with the cut of training.

    Raises:
        ConfigError: a lone stage has several chunks.
    """
    return _actions(_timed_forward(stage, num_stages, num_microbatches, num_chunks))


def build_evaluation_batches(
    *, stage: int, num_stages: int, num_microbatches: int, num_chunks: int = 1
) -> tuple[tuple[Action, ...], ...]:
    """Return `build_evaluation_schedule` as steps for an executor, as `build_batches`."""
    return tuple(matched_batches(_timed_forward(stage, num_stages, num_microbatches, num_chunks)))


def schedule_problems(name: str, *, num_stages: int, num_chunks: int = 1) -> Iterator[ConfigError]:
    """Yield why a schedule cannot run on these stages and chunks, whatever the model."""
    if name not in tuple(ScheduleName):
        yield ConfigError(
            "there is no such pipeline schedule",
            found=f"--pipeline-schedule {name}",
            fix=f"use one of {', '.join(ScheduleName)}",
        )
        return
    if num_stages < 1 or num_chunks < 1:
        yield ConfigError(
            "a pipeline has at least one stage, and a stage at least one chunk",
            found=f"--pipeline-model-parallel-size {num_stages}, "
            f"--num-virtual-stages-per-pipeline-rank {num_chunks}",
            fix="use 1 to switch either off",
        )
        return
    if name == ScheduleName.NONE and num_stages > 1:
        yield ConfigError(
            "several stages need a schedule",
            found=f"--pipeline-schedule {name}, --pipeline-model-parallel-size {num_stages}",
            fix=f"use --pipeline-schedule {ScheduleName.ONE_F_ONE_B}",
        )
    if name != ScheduleName.INTERLEAVED and num_chunks > 1:
        yield ConfigError(
            "only the interleaved schedule gives a stage several parts of the model",
            found=f"--pipeline-schedule {name}, "
            f"--num-virtual-stages-per-pipeline-rank {num_chunks}",
            fix=f"use --pipeline-schedule {ScheduleName.INTERLEAVED}, or drop the virtual stages",
        )
    if name == ScheduleName.INTERLEAVED and num_stages == 1:
        yield ConfigError(
            "interleaving needs more than one pipeline stage",
            found=f"--pipeline-schedule {name}, --pipeline-model-parallel-size 1",
            fix="use --pipeline-model-parallel-size 2 or more, or drop interleaving and its "
            "virtual stages",
        )
    if name == ScheduleName.INTERLEAVED and num_chunks == 1:
        yield ConfigError(
            "interleaving needs more than one virtual stage on each rank",
            found=f"--pipeline-schedule {name}, --num-virtual-stages-per-pipeline-rank 1",
            fix="use --num-virtual-stages-per-pipeline-rank 2 or more, or "
            f"--pipeline-schedule {ScheduleName.ONE_F_ONE_B}",
        )


def pipeline_problems(
    name: str,
    *,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int = 1,
    num_layers: int | None = None,
) -> Iterator[ConfigError]:
    """Yield all errors of a schedule for a model and a batch, before anything is built.

    Args:
        name: a `ScheduleName`.
        num_stages: pipeline-parallel ranks.
        num_microbatches: per step and replica; the fewest there will be, if that changes.
        num_chunks: virtual stages on each rank.
        num_layers: transformer layers; None: not checked.
    """
    found = list(schedule_problems(name, num_stages=num_stages, num_chunks=num_chunks))
    yield from found
    virtual = num_stages * num_chunks
    if num_layers is not None and 0 < num_layers < virtual:
        yield ConfigError(
            "there are fewer layers than pipeline stages to hold them",
            found=f"--num-layers {num_layers}, --pipeline-model-parallel-size {num_stages}"
            + (f" x {num_chunks} virtual stages" if num_chunks > 1 else ""),
            fix=f"use --num-layers {virtual} or more, or fewer stages",
        )
    if num_microbatches < 1:
        yield ConfigError(
            "a step has no micro-batch",
            found=f"{num_microbatches} micro-batches",
            fix="use at least one micro-batch per step",
        )
    elif name == ScheduleName.INTERLEAVED and not found and num_microbatches < num_stages:
        yield ConfigError(
            "the interleaved schedule needs a micro-batch for every stage",
            found=f"{num_microbatches} micro-batches per step, "
            f"--pipeline-model-parallel-size {num_stages}",
            fix=f"have at least {num_stages} micro-batches per step (a larger --global-batch-size "
            f"or a smaller --micro-batch-size), or use --pipeline-schedule "
            f"{ScheduleName.ONE_F_ONE_B}",
        )


def _timed(
    name: str, stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[Timed, ...]:
    _check(name, stage, num_stages, num_microbatches, num_chunks)
    return _all_stages(name, num_stages, num_microbatches, num_chunks)[stage]


def _timed_forward(
    stage: int, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[Timed, ...]:
    cut = ScheduleName.INTERLEAVED if num_chunks > 1 else ScheduleName.GPIPE
    _check(cut, stage, num_stages, num_microbatches, num_chunks)
    return _all_forward(num_stages, num_microbatches, num_chunks)[stage]


def _check(name: str, stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> None:
    for problem in schedule_problems(name, num_stages=num_stages, num_chunks=num_chunks):
        raise problem
    assert 0 <= stage < num_stages, stage  # noqa: S101  # invariant: a coordinate of the grid
    assert num_microbatches > 0, num_microbatches  # noqa: S101  # invariant: a step has a batch


def _actions(timed: tuple[Timed, ...]) -> Schedule:
    return tuple(entry.action for entry in timed)


@lru_cache(maxsize=_CACHED)
def _all_stages(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Timed, ...], ...]:
    def order(stage: int) -> orders.Order:
        if name == ScheduleName.NONE:
            return orders.one_at_a_time(num_microbatches)
        if name == ScheduleName.GPIPE:
            return orders.gpipe(num_microbatches)
        if name == ScheduleName.ONE_F_ONE_B:
            return orders.one_forward_one_backward(stage, num_stages, num_microbatches)
        if name == ScheduleName.ZERO_BUBBLE:
            return orders.zero_bubble(stage, num_stages, num_microbatches)
        return orders.interleaved(stage, num_stages, num_microbatches, num_chunks)

    return with_ticks([order(s) for s in range(num_stages)], num_chunks=num_chunks)


@lru_cache(maxsize=_CACHED)
def _all_forward(
    num_stages: int, num_microbatches: int, num_chunks: int
) -> tuple[tuple[Timed, ...], ...]:
    order = orders.forward_only(num_stages, num_microbatches, num_chunks)
    return with_ticks([order] * num_stages, num_chunks=num_chunks)
