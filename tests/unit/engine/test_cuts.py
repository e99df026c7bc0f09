"""Where lists are cut: by counts of marked layers, by costs, by parameters."""

from functools import partial

import pytest
import torch

from megatron.engine.cuts import stage_ranges
from megatron.errors import ConfigError
from megatron.model.specs import LayerSpec
from megatron.pipeline.plan import PipelinePlan

EVEN = PipelinePlan("1f1b", 2, 1, (2, 2))


def unmarked(count: int, *, blocks: int = 0) -> list[LayerSpec]:
    """Layers of a list, the first few after the very first marked as those that flags count."""
    return [LayerSpec(str(at), torch.nn.Identity, block=0 < at <= blocks) for at in range(count)]


def test_a_list_that_marks_its_layers_is_cut_as_flags_say_and_another_evenly() -> None:
    uneven = EVEN._replace(counts=(1, 3))
    assert stage_ranges(unmarked(7, blocks=4), uneven, 2) == ((0, 2), (2, 7))
    assert stage_ranges(unmarked(7), EVEN, 2) == ((0, 3), (3, 7))
    with pytest.raises(ConfigError, match="but not marked in the model's list"):
        stage_ranges(unmarked(7), uneven, 2)


def test_stages_are_balanced_by_costs_or_parameters_of_all_layers_of_the_list() -> None:
    dear_head = EVEN._replace(costs=(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 4.0))
    assert stage_ranges(unmarked(7, blocks=4), EVEN, 2) == ((0, 3), (3, 7))
    assert stage_ranges(unmarked(7, blocks=4), dear_head, 2) == ((0, 4), (4, 7))
    linear = [
        LayerSpec(str(at), partial(torch.nn.Linear, width, 1, bias=False), block=True)
        for at, width in enumerate((9, 1, 1, 1))
    ]
    assert stage_ranges(linear, EVEN._replace(by_parameters=True), 2) == ((0, 1), (1, 4))
    with pytest.raises(ConfigError, match="the costs are not of the layers of this model"):
        stage_ranges(unmarked(7, blocks=4), EVEN._replace(costs=(1.0, 2.0)), 2)


def test_a_pipeline_of_another_size_than_the_groups_is_refused() -> None:
    with pytest.raises(ConfigError, match="the pipeline is for another number of ranks"):
        stage_ranges(unmarked(7), PipelinePlan("1f1b", 4, 1, (1, 1, 1, 1)), 2)
