"""From flags to a pipeline: its schedule, its chunks and the layers of each, or why there is none.

The builder of a model and the checks of flags before anything is built both use this, so that they
cannot disagree.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.parallel import ParallelConfig, PipelineBalance
from megatron.errors import ConfigError
from megatron.mpu.stage_plan import even_counts, listed_counts
from megatron.pipeline.schedule import ScheduleName, pipeline_problems


class PipelinePlan(NamedTuple):
    """The stages, schedule and layers of the pipeline that trains a model."""

    schedule: ScheduleName
    num_stages: int
    num_chunks: int  # of each stage
    counts: tuple[int, ...]  # transformer layers of each virtual stage, in the order of the model
    # Instead of those counts: stages of as equal costs as can be.
    by_parameters: bool = False
    costs: tuple[float, ...] | None = None  # of each layer of the model's list


def pipeline_plan(parallel: ParallelConfig, num_layers: int) -> PipelinePlan:
    """Return the pipeline plan of the flags.

    Raises:
        ConfigError: it cannot be.
    """
    stages = parallel.pipeline_model_parallel_size
    chunks = _num_chunks(parallel, num_layers)
    name = _schedule_name(parallel, chunks)
    # As many micro-batches as stages: how many there are is no part of the plan.
    for problem in pipeline_problems(
        name,
        num_stages=stages,
        num_microbatches=stages,
        num_chunks=chunks,
        num_layers=num_layers,
    ):
        raise problem
    return PipelinePlan(
        name,
        stages,
        chunks,
        _counts(parallel, num_layers, chunks),
        by_parameters=parallel.pipeline_balance is PipelineBalance.PARAMETERS,
        costs=parallel.pipeline_layer_costs,
    )


def plan_problems(
    parallel: ParallelConfig, *, num_layers: int, fewest_microbatches: int | None
) -> Iterator[ConfigError]:
    """Yield all errors of the pipeline that the flags ask for.

    Args:
        num_layers: transformer layers of the model.
        fewest_microbatches: of any step of the run; None where that is not known.
    """
    stages = parallel.pipeline_model_parallel_size
    try:
        chunks = _num_chunks(parallel, num_layers)
    except ConfigError as error:
        yield error
        return
    found = list(
        pipeline_problems(
            _schedule_name(parallel, chunks),
            num_stages=stages,
            num_microbatches=stages if fewest_microbatches is None else fewest_microbatches,
            num_chunks=chunks,
            num_layers=num_layers,
        )
    )
    yield from found
    if stages * chunks <= num_layers:
        try:
            _counts(parallel, num_layers, chunks)
        except ConfigError as error:
            yield error


def _schedule_name(parallel: ParallelConfig, num_chunks: int) -> ScheduleName:
    if parallel.pipeline_schedule is not None:
        return ScheduleName(parallel.pipeline_schedule.value)
    if num_chunks > 1:
        return ScheduleName.INTERLEAVED
    is_split = parallel.pipeline_model_parallel_size > 1
    return ScheduleName.ONE_F_ONE_B if is_split else ScheduleName.NONE


def _num_chunks(parallel: ParallelConfig, num_layers: int) -> int:
    size = parallel.num_layers_per_virtual_pipeline_stage
    if size is None:
        return parallel.num_virtual_stages_per_pipeline_rank or 1
    stages = parallel.pipeline_model_parallel_size
    if num_layers % (stages * size):
        raise ConfigError(
            "the layers do not divide into virtual pipeline stages of that size",
            found=f"--num-layers {num_layers}, --pipeline-model-parallel-size {stages}, "
            f"--num-layers-per-virtual-pipeline-stage {size}",
            fix=f"use --num-layers {max(1, num_layers // (stages * size)) * stages * size}, or "
            "--num-virtual-stages-per-pipeline-rank, which makes stages as equal as they can be",
        )
    return num_layers // (stages * size)


def _counts(parallel: ParallelConfig, num_layers: int, num_chunks: int) -> tuple[int, ...]:
    stages = parallel.pipeline_model_parallel_size
    if parallel.pipeline_layer_counts is not None:
        return listed_counts(
            parallel.pipeline_layer_counts, num_layers, stages, num_chunks=num_chunks
        )
    return even_counts(
        num_layers,
        stages,
        num_chunks=num_chunks,
        first=parallel.decoder_first_pipeline_num_layers,
        last=parallel.decoder_last_pipeline_num_layers,
    )
