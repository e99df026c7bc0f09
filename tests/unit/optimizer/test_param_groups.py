"""Tests of megatron.optimizer.param_groups."""

from typing import Any

import pytest
import torch
from torch import nn

from megatron.config.models.vision import VisionConfig
from megatron.config.optimizer import OptimizerKind
from megatron.optimizer.param_groups import (
    GroupingRules,
    LayerRates,
    UpdateRates,
    in_groups,
    param_groups,
)
from tests.unit.config.groups import a_run


def test_matrices_are_decayed_and_biases_and_norms_are_not() -> None:
    module = nn.ModuleDict({"dense": nn.Linear(3, 4), "norm": nn.LayerNorm(4)})
    decayed, spared = param_groups(module.named_parameters())
    assert [name for name, _ in decayed.parameters] == ["dense.weight"]
    assert [name for name, _ in spared.parameters] == ["dense.bias", "norm.weight", "norm.bias"]
    assert (decayed.weight_decay_multiplier, spared.weight_decay_multiplier) == (1.0, 0.0)
    assert (decayed.decoupled, spared.decoupled) == (False, False)
    assert (decayed.name, spared.name) == ("decayed", "not_decayed")


def test_a_matrix_called_bias_is_not_decayed_and_a_scalar_neither() -> None:
    pairs = [
        (name, nn.Parameter(torch.zeros(shape)))
        for name, shape in [("a.bias", (2, 2)), ("bias", (2, 2)), ("gain", ()), ("unbias", (2, 2))]
    ]
    decayed, spared = param_groups(pairs)
    assert [name for name, _ in decayed.parameters] == ["unbias"]
    assert [name for name, _ in spared.parameters] == ["a.bias", "bias", "gain"]


def test_frozen_parameters_and_empty_groups_are_left_out() -> None:
    module = nn.Linear(3, 4)
    module.weight.requires_grad_(False)
    (group,) = param_groups(module.named_parameters())
    assert [name for name, _ in group.parameters] == ["bias"]


def test_the_tables_of_words_alone_are_decoupled_and_only_where_asked() -> None:
    names = [
        "embedding.word.weight",
        "embedding.position.weight",
        "layers.0.output.weight",
        "output.weight",
        "output.bias",
    ]
    pairs = [(name, nn.Parameter(torch.zeros(2, 2))) for name in names]
    words, others, spared = param_groups(pairs, rules=GroupingRules(decoupled=True))
    assert [name for name, _ in words.parameters] == ["embedding.word.weight", "output.weight"]
    assert [name for name, _ in others.parameters] == names[1:3]
    assert [name for name, _ in spared.parameters] == ["output.bias"]
    assert [group.decoupled for group in param_groups(pairs)] == [False, False]

    rates = UpdateRates(0.5, 0.2, decoupled_learning_rate=0.0)
    assert [rates.of(group) for group in (words, others, spared)] == [
        (0.0, 0.2), (0.5, 0.2), (0.5, 0.0)
    ]  # fmt: skip
    assert UpdateRates(0.5, 0.2).of(words) == (0.5, 0.2)


NAMES = {
    "embedding.word.weight": (8, 4),
    "layers.0.mlp.fc1.weight": (6, 4),
    "layers.0.mlp.fc1.bias": (6,),
    "output.weight": (8, 4),
}


def factors(**rules: Any) -> dict[str, tuple[float, float]]:
    """The factors on the learning rate and on epsilon, by the part of a name that tells it."""
    pairs = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in NAMES.items()]
    return {
        name: (group.rate_multiplier, group.epsilon_multiplier)
        for group in param_groups(pairs, rules=GroupingRules(width=4.0, **rules))
        for name, _ in group.parameters
    }


def test_mup_divides_what_has_rows_as_long_as_the_model_is_wide() -> None:
    word, matrix, bias, output = NAMES
    assert factors() == {word: (1, 1), matrix: (0.25, 0.25), bias: (1, 1), output: (0.25, 0.25)}
    given = factors(decoupled=True)
    assert given == {word: (1, 1), matrix: (0.25, 0.25), bias: (1, 1), output: (1, 0.25)}
    by_sgd = factors(rule=OptimizerKind.SGD)
    assert by_sgd == {word: (4, 1), matrix: (1, 1), bias: (4, 1), output: (1, 1)}
    by_muon = factors(rule=OptimizerKind.MUON, is_by_muon=lambda name, _: name == matrix)
    assert by_muon == {word: (1, 1), matrix: (1, 1), bias: (1, 1), output: (0.25, 0.25)}


def test_groups_of_mup_keep_their_order_and_decay() -> None:
    pairs = [(name, nn.Parameter(torch.zeros(shape))) for name, shape in NAMES.items()]
    groups = param_groups(pairs, rules=GroupingRules(width=4.0))
    named = [(group.name, group.rate_multiplier) for group in groups]
    assert named == [("decayed", 0.25), ("decayed", 1.0), ("not_decayed", 1.0)]
    assert UpdateRates(0.5, 0.2).of(groups[0]) == (0.125, 0.2)
    assert UpdateRates(0.5, 0.2).of(groups[2]) == (0.5, 0.0)


def test_each_layer_has_the_rate_of_its_depth_and_the_head_one_of_its_own() -> None:
    names = [
        *("embedding.patch.weight", "layers.0.mlp.weight", "layers.1.mlp.weight"),
        *("final_norm.weight", "classification_head.dense.weight"),
    ]
    pairs = [(name, nn.Parameter(torch.zeros(2, 2))) for name in names]
    rules = GroupingRules(layer_rates=LayerRates(num_layers=2, decay=0.5, head=3.0))
    rates = UpdateRates(0.8, 0.2)
    groups = param_groups(pairs, rules=rules)
    found = {name: rates.of(group)[0] for group in groups for name, _ in group.parameters}
    assert found == dict(zip(names, [0.1, 0.2, 0.4, 0.8, 2.4000000000000004]))
    assert len(param_groups(pairs)) == 1


def test_groups_become_more_by_halves_of_the_largest_and_keep_their_parameters() -> None:
    pairs = [(f"layers.{n}.weight", nn.Parameter(torch.zeros(2, 2))) for n in range(5)]
    groups = param_groups([*pairs, ("final_norm.weight", nn.Parameter(torch.zeros(2)))])
    assert in_groups(groups, 2) == groups
    four = in_groups(groups, 4)
    assert [len(group.parameters) for group in four] == [2, 1, 2, 1]
    assert [name for group in four for name, _ in group.parameters] == [
        *(name for name, _ in pairs),
        "final_norm.weight",
    ]
    rates = UpdateRates(0.5, 0.2)
    assert [rates.of(group) for group in four] == [(0.5, 0.2)] * 3 + [(0.5, 0.0)]
    for count in (1, 7):
        with pytest.raises(ValueError, match=f"2 groups cannot be made {count}"):
            in_groups(groups, count)


def test_the_rates_of_layers_are_those_of_the_flags() -> None:
    assert LayerRates.of_run(a_run()).factor("embedding.patch.weight") == 1.0
    vision = VisionConfig(layer_lr_decay=0.5, head_lr_mult=2.0)
    assert LayerRates.of_run(a_run(vision=vision)) == LayerRates(2, 0.5, 2.0)
