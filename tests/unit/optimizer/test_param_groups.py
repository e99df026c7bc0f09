"""Tests of megatron.optimizer.param_groups."""

import torch
from torch import nn

from megatron.optimizer.param_groups import UpdateRates, param_groups


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
    words, others, spared = param_groups(pairs, decoupled=True)
    assert [name for name, _ in words.parameters] == ["embedding.word.weight", "output.weight"]
    assert [name for name, _ in others.parameters] == names[1:3]
    assert [name for name, _ in spared.parameters] == ["output.bias"]
    assert [group.decoupled for group in param_groups(pairs)] == [False, False]

    rates = UpdateRates(0.5, 0.2, decoupled_learning_rate=0.0)
    assert [rates.of(group) for group in (words, others, spared)] == [
        (0.0, 0.2), (0.5, 0.2), (0.5, 0.0)
    ]  # fmt: skip
    assert UpdateRates(0.5, 0.2).of(words) == (0.5, 0.2)
