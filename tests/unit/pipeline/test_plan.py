"""Flags to a pipeline: schedule, chunks and layers of each, and errors."""

from typing import Any

import pytest

from megatron.config.parallel import ParallelConfig, PipelineBalance, PipelineSchedule
from megatron.errors import ConfigError
from megatron.pipeline.plan import (
    EncoderStages,
    PipelinePlan,
    pipeline_plan,
    plan_of_run,
    plan_problems,
)
from megatron.pipeline.schedule import ScheduleName
from tests.support.tiny import tiny_run


def config(stages: int = 1, **flags: Any) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=stages, **flags)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (config(), PipelinePlan("none", 1, 1, (8,))),
        (config(4), PipelinePlan("1f1b", 4, 1, (2, 2, 2, 2))),
        (
            config(2, num_virtual_stages_per_pipeline_rank=2),
            PipelinePlan("interleaved", 2, 2, (2, 2, 2, 2)),
        ),
        (
            config(2, num_layers_per_virtual_pipeline_stage=1),
            PipelinePlan("interleaved", 2, 4, (1,) * 8),
        ),
        (config(2, num_layers_per_virtual_pipeline_stage=4), PipelinePlan("1f1b", 2, 1, (4, 4))),
        (
            config(2, pipeline_schedule=PipelineSchedule.ZERO_BUBBLE),
            PipelinePlan("zero-bubble", 2, 1, (4, 4)),
        ),
        (
            config(2, pipeline_balance=PipelineBalance.PARAMETERS),
            PipelinePlan("1f1b", 2, 1, (4, 4), by_parameters=True),
        ),
        (
            config(2, pipeline_layer_costs=(1.0, 2.0)),
            PipelinePlan("1f1b", 2, 1, (4, 4), costs=(1.0, 2.0)),
        ),
        (config(3), PipelinePlan("1f1b", 3, 1, (2, 4, 2))),
        (
            config(3, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=2),
            PipelinePlan("1f1b", 3, 1, (1, 5, 2)),
        ),
        (config(2, pipeline_layer_counts=(5, 3)), PipelinePlan("1f1b", 2, 1, (5, 3))),
        (
            config(2, pipeline_layer_counts=(1, 3, 2, 2), num_virtual_stages_per_pipeline_rank=2),
            PipelinePlan("interleaved", 2, 2, (1, 3, 2, 2)),
        ),
    ],
)
def test_flags_become_a_plan(asked: ParallelConfig, expected: PipelinePlan) -> None:
    found = pipeline_plan(asked, 8)
    if expected.counts == (2, 4, 2):  # what does not divide goes to the middle first
        assert sum(found.counts) == 8
        assert found.counts[1] == max(found.counts)
        found = found._replace(counts=expected.counts)
    assert found == expected
    assert not list(plan_problems(asked, num_layers=8, fewest_microbatches=8))


@pytest.mark.parametrize(
    ("asked", "encoder", "counts"),
    [
        (config(2), EncoderStages(3, 1), (3, 5)),
        (config(4), EncoderStages(6, 3), (2, 2, 2, 2)),
        (config(3), EncoderStages(2, 1), (2, 3, 3)),
        (
            config(4, decoder_first_pipeline_num_layers=1, decoder_last_pipeline_num_layers=3),
            EncoderStages(4, 2),
            (1, 3, 1, 3),
        ),
    ],
)
def test_a_decoder_may_begin_with_a_stage(
    asked: ParallelConfig, encoder: EncoderStages, counts: tuple[int, ...]
) -> None:
    assert pipeline_plan(asked, 8, encoder=encoder).counts == counts
    assert not list(plan_problems(asked, num_layers=8, fewest_microbatches=8, encoder=encoder))


@pytest.mark.parametrize(
    ("asked", "encoder", "words"),
    [
        (config(2), EncoderStages(4, 2), "leaves the encoder or the decoder without a stage"),
        (config(2), EncoderStages(4, 0), "use a stage from 1 to 1"),
        (config(1), EncoderStages(4, 1), "or use more stages"),
        (config(4), EncoderStages(2, 3), "fewer layers in the encoder than stages to hold them"),
        (config(4), EncoderStages(7, 2), "fewer layers in the decoder than stages to hold them"),
        (
            config(2, num_virtual_stages_per_pipeline_rank=2),
            EncoderStages(4, 1),
            "2 virtual stages on each rank",
        ),
        (config(2, pipeline_layer_counts=(4, 4)), EncoderStages(4, 1), "--pipeline-layer-counts"),
        (config(2, pipeline_layer_costs=(1.0,)), EncoderStages(4, 1), "--pipeline-layer-costs"),
        (
            config(2, pipeline_balance=PipelineBalance.PARAMETERS),
            EncoderStages(4, 1),
            "--pipeline-balance parameters",
        ),
    ],
)
def test_a_decoder_that_cannot_begin_there_is_refused(
    asked: ParallelConfig, encoder: EncoderStages, words: str
) -> None:
    (problem,) = plan_problems(asked, num_layers=8, fewest_microbatches=8, encoder=encoder)
    assert words in str(problem)
    with pytest.raises(ConfigError, match="stage"):
        pipeline_plan(asked, 8, encoder=encoder)


def test_the_plan_of_a_run_is_of_both_stacks() -> None:
    flags = {"num_layers": 2, "decoder_num_layers": 4, "pipeline_model_parallel_size": 2}
    assert plan_of_run(tiny_run("c", **flags)).counts == (3, 3)
    split = tiny_run("c", pipeline_model_parallel_split_rank=1, **flags)
    assert plan_of_run(split).counts == (2, 4)


def test_every_schedule_but_none_has_a_flag() -> None:
    assert {kind.value for kind in PipelineSchedule} == set(ScheduleName) - {ScheduleName.NONE}


@pytest.mark.parametrize(
    ("asked", "microbatches", "words"),
    [
        (config(16), 16, "fewer layers than pipeline stages"),
        (
            config(2, num_virtual_stages_per_pipeline_rank=8),
            8,
            "fewer layers than pipeline stages",
        ),
        (
            config(4, num_virtual_stages_per_pipeline_rank=2),
            3,
            "the interleaved schedule needs a micro-batch for every stage",
        ),
        (
            config(2, num_layers_per_virtual_pipeline_stage=3),
            8,
            "the layers do not divide into virtual pipeline stages of that size",
        ),
        (config(num_virtual_stages_per_pipeline_rank=2), 8, "more than one pipeline stage"),
        (config(2, pipeline_schedule=PipelineSchedule.INTERLEAVED), 8, "more than one virtual"),
        (config(2, pipeline_layer_counts=(5, 4)), 8, "do not add up to the layers"),
        (config(3, decoder_first_pipeline_num_layers=7), 8, "do not fill the pipeline stages"),
    ],
)
def test_what_cannot_be_is_said(asked: ParallelConfig, microbatches: int, words: str) -> None:
    problems = list(plan_problems(asked, num_layers=8, fewest_microbatches=microbatches))
    assert words in "\n".join(map(str, problems))
    if "micro-batch" not in words:
        assert list(plan_problems(asked, num_layers=8, fewest_microbatches=None))
        with pytest.raises(ConfigError, match=words):
            pipeline_plan(asked, 8)


def test_a_size_that_does_not_divide_names_a_number_of_layers_that_does() -> None:
    (problem,) = plan_problems(
        config(2, num_layers_per_virtual_pipeline_stage=3), num_layers=8, fewest_microbatches=8
    )
    assert problem.fix.startswith("use --num-layers 6, or --num-virtual-stages-per-pipeline-rank")
