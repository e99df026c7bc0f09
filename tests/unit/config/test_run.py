"""A whole run as one value: stored and read back exactly, compared, and read but not written."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config.data import DataLoaderKind
from megatron.config.model import PositionEmbedding
from megatron.config.optimizer import OptimizerConfig
from megatron.config.run import ADDED_LATER, GROUPS, RECORDED_JSON, RunConfig
from megatron.errors import ConfigError
from tests.unit.config.groups import a_model, a_run, a_schedule, some_data, some_training


def through_json(config: RunConfig) -> RunConfig:
    return RunConfig.from_plain(json.loads(json.dumps(config.to_plain())))


def test_a_run_survives_json() -> None:
    config = a_run(
        model=a_model(position_embedding_type=PositionEmbedding.ROPE, swiglu=True),
        data=some_data(data_path=("0.3", "a", "0.7", "b"), dataloader_type=DataLoaderKind.CYCLIC),
        extra={"my_flag": [1, 2], "other": "x"},
    )
    again = through_json(config)
    assert again == config
    assert isinstance(again.data.data_path, tuple)
    assert again.model.position_embedding_type is PositionEmbedding.ROPE


@given(
    lr=st.floats(1e-12, 1e3), seed=st.integers(0, 2**63), samples=st.integers(1, 2**40),
    dropout=st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_every_number_survives_json(lr: float, seed: int, samples: int, dropout: float) -> None:
    config = a_run(
        model=a_model(hidden_dropout=dropout),
        schedule=a_schedule(lr=lr),
        training=some_training(seed=seed, train_iters=None, train_samples=samples),
    )
    assert through_json(config) == config
    assert through_json(config).fingerprint() == config.fingerprint()


def test_a_number_that_json_has_no_word_for_survives() -> None:
    config = a_run(optimizer=OptimizerConfig(clip_grad=float("inf")))
    text = json.dumps(config.to_plain(), allow_nan=False)
    assert RunConfig.from_plain(json.loads(text)) == config


@pytest.mark.parametrize("name", sorted(set(GROUPS) - ADDED_LATER))
def test_a_missing_group_is_an_error(name: str) -> None:
    plain = a_run().to_plain()
    del plain[name]
    with pytest.raises(ConfigError, match=f"lacks whole groups\n  found: no {name}"):
        RunConfig.from_plain(plain)


@pytest.mark.parametrize("name", ADDED_LATER)
def test_a_group_that_came_later_has_its_defaults_in_older_runs(name: str) -> None:
    plain = a_run().to_plain()
    del plain[name]
    assert RunConfig.from_plain(plain) == a_run()


def test_the_json_that_deepspeed_was_given_is_recorded_beside_the_groups() -> None:
    plain = a_run().to_plain() | {RECORDED_JSON: {"zero_optimization": {"stage": 1}}}
    assert RunConfig.from_plain(plain) == a_run()


def test_a_group_of_another_version_is_an_error() -> None:
    with pytest.raises(ConfigError, match="holds groups that this version does not know") as error:
        RunConfig.from_plain(a_run().to_plain() | {"serving": {}})
    assert error.value.found == "serving"


def test_a_field_of_another_version_is_an_error() -> None:
    plain = a_run().to_plain()
    plain["model"]["number_of_heads"] = 3
    with pytest.raises(ConfigError, match="holds fields that this version does not know") as caught:
        RunConfig.from_plain(plain)
    assert caught.value.found == "number_of_heads"


@pytest.mark.parametrize(
    "other",
    [
        {"model": a_model(num_layers=3)},
        {"training": some_training(seed=1)},
        {"data": some_data(data_path=("other",))},
        {"extra": {"mine": 1}},
    ],
)
def test_another_run_has_another_fingerprint(other: dict[str, Any]) -> None:
    assert a_run(**other).fingerprint() != a_run().fingerprint()
    assert a_run(**other).fingerprint() == a_run(**other).fingerprint()


def test_a_fingerprint_is_sixteen_hex_digits() -> None:
    fingerprint = a_run().fingerprint()
    assert len(fingerprint) == 16
    assert int(fingerprint, 16) >= 0


def test_nothing_of_a_run_can_be_assigned() -> None:
    with pytest.raises(FrozenInstanceError):
        a_run().model.num_layers = 3  # type: ignore[misc]


def test_the_flat_view_reads_every_field_of_every_group() -> None:
    config = a_run(extra={"mine": 7})
    args = config.flat()
    assert args.num_layers == 2
    assert args.lr == config.schedule.lr
    assert args.mine == 7
    values = {name: getattr(args, name) for name in args}
    assert set(values) >= {"num_layers", "seq_length", "lr", "mine"}


def test_the_flat_view_cannot_be_written() -> None:
    args = a_run().flat()
    with pytest.raises(ConfigError, match="the arguments of a run cannot be changed") as caught:
        args.num_layers = 3
    assert caught.value.found == "args.num_layers = 3"


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda a: pickle.loads(pickle.dumps(a))]
)
def test_the_flat_view_can_be_copied_and_sent(again: Any) -> None:
    assert again(a_run().flat()).num_layers == 2


def test_a_name_that_is_no_flag_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no flag --not-a-flag in this run"):
        _ = a_run().flat().not_a_flag
    assert not hasattr(a_run().flat(), "__deepcopy__")
