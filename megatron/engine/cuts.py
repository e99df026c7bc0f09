"""Where a model's list is cut into pipeline stages, the same for every engine."""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.model.specs import LayerSpec
from megatron.model.stage import blocks_of, ends_of_blocks, parameters_of_layers
from megatron.mpu.stage_plan import LayerRange, even_counts, plan_stages, ranges_of_counts
from megatron.pipeline.plan import PipelinePlan


class StageCut(NamedTuple):
    """Where DeepSpeed cuts a list: at `ranges` (of all stages), or by its own `method`."""

    ranges: tuple[LayerRange, ...] | None
    method: str | None = None


def stage_ranges(
    specs: Sequence[LayerSpec], pipeline: PipelinePlan, num_stages: int
) -> tuple[LayerRange, ...]:
    """Return the layers of every virtual stage, in the order of the model.

    Raises:
        ConfigError: the plan is for another number of ranks, or for another list.
    """
    if pipeline.num_stages != num_stages:
        raise ConfigError(
            "the pipeline is for another number of ranks",
            found=f"--pipeline-model-parallel-size {pipeline.num_stages}, "
            f"{num_stages} ranks in the pipeline group",
            fix="build the parallel context with the sizes of the run's flags",
        )
    ends = ends_of_blocks(specs)
    costs = parameters_of_layers(specs) if pipeline.by_parameters else pipeline.costs
    if costs is not None:
        if len(costs) != len(specs):
            raise ConfigError(
                "the costs are not of the layers of this model",
                found=f"{len(costs)} in --pipeline-layer-costs, {len(specs)} layers: "
                + ", ".join(spec.name for spec in specs),
                fix=f"give {len(specs)} numbers, one for each of them",
            )
        blocks = blocks_of(specs)
        return plan_stages(costs, num_stages, num_chunks=pipeline.num_chunks, blocks=blocks)
    if len(ends) == sum(pipeline.counts):
        return ranges_of_counts(pipeline.counts, ends=ends, num_layers=len(specs))
    # A list whose blocks are not marked, or differ in number from the flag: all layers count.
    if pipeline.counts != even_counts(
        sum(pipeline.counts), num_stages, num_chunks=pipeline.num_chunks
    ):
        raise ConfigError(
            "layers are counted for each pipeline stage, but not marked in the model's list",
            found=f"{len(ends)} layers that count, --num-layers {sum(pipeline.counts)}",
            fix="give the layers that are meant block=True, or leave out the flags that "
            "count layers per stage",
        )
    return plan_stages([1.0] * len(specs), num_stages, num_chunks=pipeline.num_chunks)
