"""The mean of checkpoints: exact, in wide sums, of one model only."""

import pytest
import torch

from megatron.checkpoint.average import AveragedSource
from megatron.checkpoint.bert_tensors import BertHeads
from megatron.checkpoint.boxes import Box, whole
from megatron.errors import CheckpointError
from tests.support.checkpoints.sources import MemorySource

NAME = "model/layers.1.mlp.fc1.weight"


def test_it_is_the_arithmetic_mean_of_every_weight() -> None:
    sources = [MemorySource.of_gpt(seed=seed, optimizer=True) for seed in range(3)]
    sources[1].progress["iteration"] = 30
    mean = AveragedSource(sources)
    assert all(name.startswith("model/") for name in mean.tensors)
    for name, known in mean.tensors.items():
        expected = sum(source.values[name] for source in sources) / 3
        assert torch.equal(mean.read(name, whole(known.global_shape)), expected)
    box = Box((3, 2), (4, 5))
    assert torch.equal(
        mean.read(NAME, box), mean.read(NAME, whole(mean.tensors[NAME].global_shape))[box.slices]
    )
    assert (mean.progress["iteration"], mean.scalars) == (30, {})
    assert mean.config == sources[1].config
    mean.verify()


def test_half_precision_is_summed_in_fp32_and_rounded_once() -> None:
    sources = [MemorySource.of_gpt(seed=seed) for seed in range(5)]
    for source in sources:
        source.values = {name: value.bfloat16() for name, value in source.values.items()}
    found = AveragedSource(sources).read(NAME, Box((0, 0), (2, 2)))
    expected = sum(source.values[NAME][:2, :2].float() for source in sources) / 5
    assert torch.equal(found, expected.bfloat16())


def test_one_checkpoint_and_other_models_are_refused() -> None:
    one = MemorySource.of_gpt()
    with pytest.raises(CheckpointError, match="there is nothing to average"):
        AveragedSource([one])
    for other, why in (
        (MemorySource.of_gpt(hidden_size=16), "shape: model/embedding.word.weight"),
        (MemorySource.of_gpt(num_layers=3), "unexpected: model/layers.2.input_norm.weight"),
        (MemorySource.of_gpt(squared_relu=True), "--activation: squared_relu, but gelu_tanh"),
    ):
        with pytest.raises(CheckpointError, match="different models cannot be averaged") as error:
            AveragedSource([one, other])
        assert why in str(error.value.found)
    with pytest.raises(CheckpointError, match="another kind of model than an average") as error:
        AveragedSource([one, MemorySource.of_bert(BertHeads())])
    assert "holds a BERT (kind bert)" in str(error.value)
    dropping = MemorySource.of_gpt(hidden_dropout=0.0)  # only matters while it is trained
    AveragedSource([one, dropping])
    unsaid = MemorySource.of_gpt()
    unsaid.config.clear()
    AveragedSource([unsaid, MemorySource(unsaid.values, {})])
