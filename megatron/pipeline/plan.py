"""From flags to a pipeline: its schedule, its chunks and the layers of each, or why there is none.

The builder of a model and the checks of flags before anything is built both use this, so that they
cannot disagree.
"""

from collections.abc import Iterator
from typing import NamedTuple

from megatron.config.parallel import ParallelConfig, PipelineBalance
from megatron.config.run import RunConfig
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


class EncoderStages(NamedTuple):
    """The first stages, which hold the encoder and nothing of the decoder."""

    layers: int  # of the encoder
    stages: int


def plan_of_run(config: RunConfig) -> PipelinePlan:
    """Return the pipeline plan of a run's flags.

    Raises:
        ConfigError: it cannot be.
    """
    return pipeline_plan(config.parallel, config.num_blocks, encoder=encoder_stages(config))


def encoder_stages(config: RunConfig) -> EncoderStages | None:
    """Return the stages of the encoder; None where no flag says where the decoder begins."""
    first = config.encoder_decoder.pipeline_model_parallel_split_rank
    return None if first is None else EncoderStages(config.model.num_layers, first)


def pipeline_plan(
    parallel: ParallelConfig, num_layers: int, *, encoder: EncoderStages | None = None
) -> PipelinePlan:
    """Return the pipeline plan of the flags for a model of `num_layers` transformer layers.

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
        _counts(parallel, num_layers, chunks, encoder),
        by_parameters=parallel.pipeline_balance is PipelineBalance.PARAMETERS,
        costs=parallel.pipeline_layer_costs,
    )


def plan_problems(
    parallel: ParallelConfig,
    *,
    num_layers: int,
    fewest_microbatches: int | None,
    encoder: EncoderStages | None = None,
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
            _counts(parallel, num_layers, chunks, encoder)
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


def _counts(
    parallel: ParallelConfig, num_layers: int, num_chunks: int, encoder: EncoderStages | None
) -> tuple[int, ...]:
    stages = parallel.pipeline_model_parallel_size
    first = parallel.decoder_first_pipeline_num_layers
    last = parallel.decoder_last_pipeline_num_layers
    if encoder is not None:
        _check_encoder_stages(parallel, num_layers, num_chunks, encoder)
        return (
            *even_counts(encoder.layers, encoder.stages, first=first),
            *even_counts(num_layers - encoder.layers, stages - encoder.stages, last=last),
        )
    if parallel.pipeline_layer_counts is not None:
        return listed_counts(
            parallel.pipeline_layer_counts, num_layers, stages, num_chunks=num_chunks
        )
    return even_counts(num_layers, stages, num_chunks=num_chunks, first=first, last=last)


def _check_encoder_stages(
    parallel: ParallelConfig, num_layers: int, num_chunks: int, encoder: EncoderStages
) -> None:
    """Raise ConfigError unless encoder and decoder can each have stages of their own."""
    stages, given = parallel.pipeline_model_parallel_size, f"{_SPLIT} {encoder.stages}"
    others = (
        (num_chunks > 1, f"{num_chunks} virtual stages on each rank"),
        (parallel.pipeline_layer_counts is not None, "--pipeline-layer-counts"),
        (parallel.pipeline_layer_costs is not None, "--pipeline-layer-costs"),
        (
            parallel.pipeline_balance is PipelineBalance.PARAMETERS,
            f"--pipeline-balance {PipelineBalance.PARAMETERS}",
        ),
    )
    for is_given, other in others:
        if is_given:
            raise ConfigError(
                "the stage where the decoder begins was given beside another cut of the model",
                found=f"{given}, {other}",
                fix="keep one of the two; a model is cut anywhere without either",
            )
    if not 0 < encoder.stages < stages:
        raise ConfigError(
            "the stage where the decoder begins leaves the encoder or the decoder without a stage",
            found=f"{given}, --pipeline-model-parallel-size {stages}",
            fix=f"use a stage from 1 to {stages - 1}"
            if stages > 1
            else f"leave {_SPLIT} out, or use more stages",
        )
    for stack, layers, of_stack in (
        ("encoder", encoder.layers, encoder.stages),
        ("decoder", num_layers - encoder.layers, stages - encoder.stages),
    ):
        if layers < of_stack:
            raise ConfigError(
                f"there are fewer layers in the {stack} than stages to hold them",
                found=f"{layers} layers, {of_stack} of {stages} stages by {given}",
                fix="use fewer stages, or another first stage of the decoder",
            )


_SPLIT = "--pipeline-model-parallel-split-rank"
