"""The untied head, and those of a BERT; their scores are compared in test_bert_model.py."""

import torch

from megatron.model.heads import Dense, MaskedLMHead, OutputLayer, Pooler, VocabularyBias
from megatron.model.init import initialize_parameters
from megatron.mpu.context import ParallelContext
from megatron.mpu.partition import is_sequence_parallel, partition_of
from tests.support.models import roughen, second_of_two, tiny_build, tiny_config


def test_the_head_scores_the_padded_vocabulary_without_a_bias() -> None:
    head = OutputLayer(tiny_config(), tiny_build())
    initialize_parameters(head, seed=1, ctx=ParallelContext.single())
    hidden = torch.randn(3, 2, 16, dtype=torch.float64)
    (logits,) = head.logits((hidden,))
    assert head.bias is None
    torch.testing.assert_close(logits, hidden @ head.weight.T, rtol=1e-12, atol=1e-12)
    assert logits.shape == (3, 2, 56)


def test_padding_rows_start_as_zeros() -> None:
    head = OutputLayer(tiny_config(), tiny_build())
    initialize_parameters(head, seed=1, ctx=ParallelContext.single())
    assert not head.weight[50:].any()
    assert head.weight[:50].any(dim=1).all()


def test_the_output_layer_hands_on_what_it_does_not_know() -> None:
    head = OutputLayer(tiny_config(), tiny_build())
    roughen(head, ParallelContext.single())
    other = torch.ones(2)
    assert head.logits((torch.randn(3, 2, 16, dtype=torch.float64), other))[1] is other


def test_the_weight_for_a_fused_loss_passes_the_hooks_of_the_head() -> None:
    # A gather of updated weights that overlaps with the forward pass is waited for in a hook.
    head, called = OutputLayer(tiny_config(), tiny_build()), []
    head.register_forward_pre_hook(lambda *_: called.append("before"))
    given, other = torch.randn(3, 2, 16, dtype=torch.float64), torch.ones(2)
    hidden, weight, rest = head.projection((given, other))
    assert called == ["before"]
    assert (hidden is given, rest is other) == (True, True)
    # An alias, so that hooks that engines put on outputs do not stay on the parameter.
    assert weight.data_ptr() == head.weight.data_ptr()
    assert not weight.is_leaf


def test_a_row_is_pooled_from_its_first_token_alone() -> None:
    pooler = Pooler(tiny_config(), tiny_build())
    roughen(pooler, ParallelContext.single())
    hidden = torch.randn(5, 2, 16, dtype=torch.float64)
    kept, pooled = pooler((hidden,))
    assert kept is hidden
    assert pooled.shape == (2, 16)
    changed = torch.cat([hidden[:1], torch.randn_like(hidden[1:])])
    assert torch.equal(pooler((changed,))[1], pooled)
    assert not torch.equal(pooler((hidden.flip(0),))[1], pooled)


def test_the_bias_of_the_vocabulary_is_split_like_its_scores() -> None:
    bias = VocabularyBias(tiny_build(second_of_two()))
    assert bias.bias.shape == (28,)
    partition = partition_of(bias.bias)
    assert partition is not None
    assert (partition.axis, partition.dim) == ("tp", 0)


def test_under_sequence_parallelism_only_what_sees_a_part_has_partial_gradients() -> None:
    build = tiny_build(second_of_two(), sequence_parallel=True)
    partial = MaskedLMHead(tiny_config(), build).parameters()
    assert all(is_sequence_parallel(parameter) for parameter in partial)
    whole = Pooler(tiny_config(), build).parameters()
    assert not any(is_sequence_parallel(parameter) for parameter in whole)


def test_a_dense_layer_is_a_matrix_and_a_bias() -> None:
    dense = Dense(16, 3, tiny_config(), tiny_build())
    roughen(dense, ParallelContext.single())
    x = torch.randn(4, 16, dtype=torch.float64)
    torch.testing.assert_close(dense(x), x @ dense.weight.T + dense.bias, rtol=1e-12, atol=1e-12)
