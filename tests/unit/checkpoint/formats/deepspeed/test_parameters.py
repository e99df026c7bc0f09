"""Our record in DeepSpeed's client state, and the input of its converter."""

import re

import pytest
import torch
from torch import nn

from megatron.checkpoint.folder.manifest import GridLayout
from megatron.checkpoint.formats.deepspeed.parameters import (
    KnownParameter,
    RunRecord,
    describe_parameter,
    merged,
    universal_info,
)
from megatron.errors import CheckpointError
from megatron.mpu.partition import Init, Partition, set_parameter_metadata

TABLE = KnownParameter("embedding.word.weight", Partition("tp", 0), (10, 4), tied=True)
GATED = KnownParameter("layers.0.mlp.fc1.weight", Partition("tp", 0, blocks=2), (12, 4))
ROWS = KnownParameter("layers.0.mlp.fc2.weight", Partition("tp", 1), (4, 6))
NORM = KnownParameter("final_norm.weight", None, (4,))
BY_NAME = {"tied_modules.word.weight": TABLE, "1.fc1.weight": GATED, "1.fc2.weight": ROWS,
           "2.weight": NORM}  # fmt: skip


def record() -> RunRecord:
    return RunRecord(
        iteration=3,
        layout=GridLayout(2, 1, 4),
        progress={"iteration": 3},
        config={"model": {"num_layers": 1}},
        scalars={},
        parameters=BY_NAME,
        order=("1.fc1.weight", "2.weight"),
    )


def test_a_record_comes_back_from_plain_values() -> None:
    assert RunRecord.from_plain(record().to_plain()) == record()


@pytest.mark.parametrize("values", [{"version": 99}, {"version": "1"}, "text"])
def test_a_record_of_another_version_is_refused(values: object) -> None:
    with pytest.raises(CheckpointError, match="not one that it reads"):
        RunRecord.from_plain(values)


def test_a_record_that_lacks_something_is_refused() -> None:
    values = record().to_plain()
    del values["parameters"]["2.weight"]["dim"]
    with pytest.raises(CheckpointError, match=r"is damaged\n.*KeyError: 'dim'"):
        RunRecord.from_plain(values)


def test_a_live_parameter_says_how_it_is_split_and_how_many_rows_are_true() -> None:
    table = nn.Parameter(torch.empty(6, 4))
    set_parameter_metadata(
        table, init=Init("normal", 0.1, true_rows=10), partition=Partition("tp", 0)
    )
    found = describe_parameter("embedding.word.weight", table, (6, 4), tp=2, tied=True)
    assert found == TABLE


def test_its_converter_is_told_of_each_parameter_by_exactly_its_name() -> None:
    info = universal_info(BY_NAME)
    assert info["original_vocab_size"] == 10
    kinds = {
        "vocabulary_parameter_patterns": "tied_modules.word.weight",
        "pipeline_replicated_parameter_patterns": "tied_modules.word.weight",
        "parameter_with_2_sub_params_cat_dim_0": "1.fc1.weight",
        "parameter_with_row_parallelism_patterns": "1.fc2.weight",
        "tp_replicated_parameter_patterns": "2.weight",
    }
    for key, name in kinds.items():
        (pattern,) = info[key]
        assert re.match(pattern, name)
        assert not re.match(pattern, f"{name}_more")
        assert not re.match(pattern, name.replace(".", "x"))


def test_ranks_that_disagree_about_a_name_are_an_error() -> None:
    assert merged([BY_NAME, {"2.weight": NORM}]) == BY_NAME
    with pytest.raises(CheckpointError, match="ranks disagree about a parameter"):
        merged([{"2.weight": NORM}, {"2.weight": ROWS}])
