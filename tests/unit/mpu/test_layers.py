"""Tests of the parallel layers in one process: values, attributes, refusals."""

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.errors import ConfigError, DataError
from megatron.mpu import layers
from megatron.mpu.context import ParallelContext
from megatron.mpu.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.mpu.partition import (
    Init,
    Partition,
    init_of,
    is_sequence_parallel,
    partition_of,
)
from megatron.mpu.recompute import forgetting
from tests.support.models import second_of_two

ALONE = ParallelContext.single()
NORMAL = Init("normal", std=0.02)


def test_alone_the_linear_layers_are_linear() -> None:
    hidden = torch.randn(3, 2, 4)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(4, 6, ctx=ALONE, init=NORMAL)
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
        assert torch.equal(layer(hidden), F.linear(hidden, layer.weight, layer.bias))


def test_an_input_that_was_recomputed_is_gone_when_its_gradient_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = torch.randn(6, 4, requires_grad=True)
    hidden = torch.randn(3, 2, 4, requires_grad=True) * 1
    recomputed, gone = [], []

    def again() -> torch.Tensor:
        output = hidden.detach().clone()
        recomputed.append(StorageWeakRef(output.untyped_storage()))
        return output

    def of_input(rows: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        gone.append(recomputed[0].expired())
        return rows @ matrix

    monkeypatch.setattr(layers, "matrix_product", of_input)
    with forgetting(hidden, again):
        total = layers._LINEAR(hidden, weight, None).sum()
    found = torch.autograd.grad(total, (hidden, weight))
    assert gone == [True]
    torch.testing.assert_close(found[0], weight.detach().sum(0).expand(3, 2, 4))
    torch.testing.assert_close(found[1], hidden.detach().sum((0, 1)).expand(6, 4))


def test_parameters_say_how_they_are_split() -> None:
    ctx = second_of_two()
    column = ColumnParallelLinear(4, 8, ctx=ctx, init=NORMAL, blocks=2)
    row = RowParallelLinear(4, 8, ctx=ctx, init=NORMAL)
    table = VocabParallelEmbedding(8, 4, ctx=ctx, true_size=7, init=NORMAL)
    assert column.weight.shape == (4, 4)
    assert partition_of(column.weight) == Partition("tp", dim=0, blocks=2)
    assert partition_of(column.bias) == Partition("tp", dim=0, blocks=2)
    assert row.weight.shape == (8, 2)
    assert partition_of(row.weight) == Partition("tp", dim=1)
    assert partition_of(row.bias) is None
    assert table.weight.shape == (4, 4)
    assert partition_of(table.weight) == Partition("tp", dim=0)
    assert init_of(column.weight) == init_of(row.weight) == NORMAL
    assert init_of(column.bias) == init_of(row.bias) == Init("zeros")
    assert init_of(table.weight) == Init("normal", std=0.02, true_rows=7)


def test_only_what_a_part_of_the_sequence_is_given_says_that_its_gradient_is_a_summand() -> None:
    ctx = second_of_two()
    for split in (False, True):
        column = ColumnParallelLinear(4, 8, ctx=ctx, init=NORMAL, sequence_parallel=split)
        row = RowParallelLinear(4, 8, ctx=ctx, init=NORMAL, sequence_parallel=split)
        table = VocabParallelEmbedding(
            8, 4, ctx=ctx, true_size=7, init=NORMAL, sequence_parallel=split
        )
        assert is_sequence_parallel(row.bias) == split
        for whole in (column.weight, column.bias, row.weight, table.weight):
            assert not is_sequence_parallel(whole)


def test_alone_a_split_sequence_is_the_whole_one() -> None:
    hidden = torch.randn(3, 2, 4, requires_grad=True)
    for kind in (ColumnParallelLinear, RowParallelLinear):
        layer = kind(4, 6, ctx=ALONE, init=NORMAL, sequence_parallel=True)
        torch.nn.init.normal_(layer.weight)
        torch.nn.init.normal_(layer.bias)
        assert torch.equal(layer(hidden), F.linear(hidden, layer.weight, layer.bias))
    table = VocabParallelEmbedding(
        8, 4, ctx=ALONE, true_size=7, init=NORMAL, sequence_parallel=True
    )
    torch.nn.init.normal_(table.weight)
    ids = torch.tensor([[0, 6]])
    assert torch.equal(table(ids), table.weight[ids])


def test_bias_can_be_left_out() -> None:
    assert ColumnParallelLinear(4, 8, ctx=ALONE, init=NORMAL, bias=False).bias is None
    assert RowParallelLinear(4, 8, ctx=ALONE, init=NORMAL, bias=False).bias is None


def test_parameters_follow_torchs_default_device_and_the_given_dtype() -> None:
    with torch.device("meta"):
        layer = ColumnParallelLinear(4, 8, ctx=ALONE, init=NORMAL, dtype=torch.bfloat16)
    assert layer.weight.is_meta
    assert layer.weight.dtype == layer.bias.dtype == torch.bfloat16


def test_printing_a_layer_gives_its_whole_sizes() -> None:
    ctx = second_of_two()
    assert "4, 8 / tp=2" in repr(ColumnParallelLinear(4, 8, ctx=ctx, init=NORMAL))
    assert "4 / tp=2, 8" in repr(RowParallelLinear(4, 8, ctx=ctx, init=NORMAL))
    table = VocabParallelEmbedding(8, 4, ctx=ctx, true_size=8, init=NORMAL)
    assert "8 / tp=2, 4" in repr(table)


def test_uneven_sizes_are_refused() -> None:
    ctx = second_of_two()
    with pytest.raises(ConfigError, match="does not divide evenly"):
        ColumnParallelLinear(4, 6, ctx=ctx, init=NORMAL, blocks=2)
    with pytest.raises(ConfigError, match="does not divide evenly"):
        RowParallelLinear(5, 8, ctx=ctx, init=NORMAL)
    with pytest.raises(ConfigError, match="does not divide evenly"):
        VocabParallelEmbedding(7, 4, ctx=ctx, true_size=7, init=NORMAL)


def test_padding_below_the_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="padded vocabulary is smaller than the vocabulary"):
        VocabParallelEmbedding(8, 4, ctx=ALONE, true_size=9, init=NORMAL)


@pytest.mark.parametrize("ids", [[0, 7], [8, 0], [2**40, 0]])
def test_ids_beyond_the_true_vocabulary_are_refused(ids: list[int]) -> None:
    table = VocabParallelEmbedding(8, 4, ctx=ALONE, true_size=7, init=NORMAL)
    with pytest.raises(DataError, match="a token id is outside the vocabulary") as caught:
        table(torch.tensor(ids))
    assert "highest id 6" in str(caught.value.found)


def test_negative_ids_are_refused() -> None:
    table = VocabParallelEmbedding(8, 4, ctx=ALONE, true_size=7, init=NORMAL)
    with pytest.raises(DataError, match="a token id is negative"):
        table(torch.tensor([0, -1]))


def test_alone_the_embedding_is_a_lookup() -> None:
    table = VocabParallelEmbedding(8, 4, ctx=ALONE, true_size=7, init=NORMAL)
    torch.nn.init.normal_(table.weight)
    ids = torch.tensor([[0, 6], [3, 3]])
    assert torch.equal(table(ids), table.weight[ids])
    assert table(ids[:0]).shape == (0, 2, 4)
