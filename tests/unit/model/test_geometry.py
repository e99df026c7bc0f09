"""Masks and biases are made once, and again when what they depend on has changed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron.config.model import PositionEmbedding, SoftmaxType
from megatron.config.parallel import ContextExchange
from megatron.config.training import AttentionBackend
from megatron.model.geometry import AttentionGeometry
from megatron.model.positions import alibi_slopes
from megatron.mpu.context import Group, ParallelContext
from megatron.ops import prefix_attention
from tests.support.models import second_of_two, tiny_build, tiny_config

HIDDEN = torch.zeros(5, 2, 16, dtype=torch.float64)
POSITIONS = torch.arange(5).expand(2, 5).contiguous()


def geometry(kind: PositionEmbedding = PositionEmbedding.LEARNED) -> AttentionGeometry:
    return AttentionGeometry(tiny_config(position_embedding_type=kind), tiny_build())


def test_plain_causal_attention_has_no_mask() -> None:
    made = geometry().of(HIDDEN, None, None)
    assert made.mask is None
    assert made.rotation is None
    assert geometry().of(HIDDEN, POSITIONS, None).mask is None


def test_a_document_mask_is_causal_and_block_diagonal() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]])
    mask = geometry().of(HIDDEN, POSITIONS, documents).mask
    assert mask is not None
    for row in range(2):
        for i in range(5):
            for j in range(5):
                expected = j <= i and documents[row, i] == documents[row, j]
                assert mask[row, 0, i, j] == expected


PREFIXES = torch.tensor([[1, 0, 1, 1, 0], [1, 1, 1, 0, 0]])
DOCUMENTS = torch.tensor([[0, 0, 1, 1, 1], [2, 2, 2, 2, 2]])


def test_a_prefix_is_seen_by_all_of_its_document() -> None:
    """A backend that is named has a mask on a CPU too."""
    build = replace(tiny_build(), attention_backend=AttentionBackend.UNFUSED)
    made = AttentionGeometry(tiny_config(), build).of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES)
    assert made.mask is not None
    assert made.spans is None
    assert not made.causal
    for row in range(2):
        for i in range(5):
            for j in range(5):
                same = DOCUMENTS[row, i] == DOCUMENTS[row, j]
                assert made.mask[row, 0, i, j] == (same and bool(j <= i or PREFIXES[row, j]))


@pytest.fixture
def blocks_at_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_attention, "PAIRS_OF_A_SPAN", 0)


@pytest.mark.usefixtures("blocks_at_any_length")
def test_a_cpu_gets_blocks_instead_of_a_mask_where_attention_may_be_split() -> None:
    made = geometry().of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES)
    assert made.mask is None
    assert made.spans == ((0, 0, 1, 2), (0, 2, 4, 5), (1, 0, 3, 5))
    of_rows = geometry().of(HIDDEN, None, None, PREFIXES[1:].repeat(2, 1))
    assert of_rows.spans == ((0, 0, 3, 5), (1, 0, 3, 5))


def test_short_rows_have_a_mask() -> None:
    assert geometry().of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES).mask is not None


@pytest.mark.usefixtures("blocks_at_any_length")
@pytest.mark.parametrize(
    "changes",
    [
        {"position_embedding_type": PositionEmbedding.ALIBI},
        {"sliding_window": 3},
        {"softmax_type": SoftmaxType.OFF_BY_ONE},
        {"attention_soft_cap": 2.0},
        {"attention_dropout": 0.1},
    ],
)
def test_what_needs_all_scores_has_a_mask(changes: dict[str, Any]) -> None:
    made = AttentionGeometry(tiny_config(**changes), tiny_build())
    found = made.of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES)
    assert found.mask is not None
    assert found.spans is None


@pytest.mark.usefixtures("blocks_at_any_length")
def test_marks_that_are_no_prefix_have_a_mask() -> None:
    made = geometry().of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES.flip(1))
    assert made.mask is not None
    assert bool(made.mask[1, 0, 0, 4]), "the last token is marked"
    assert not bool(made.mask[1, 0, 0, 1])


def test_other_prefixes_make_another_geometry() -> None:
    made = geometry()
    first = made.of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES)
    assert made.of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES) is first
    assert made.of(HIDDEN, POSITIONS, DOCUMENTS, PREFIXES.clone()) is not first


def test_the_layers_of_one_pass_share_one_object() -> None:
    made = geometry()
    documents = torch.zeros(2, 5, dtype=torch.int64)
    first = made.of(HIDDEN, POSITIONS, documents)
    assert made.of(HIDDEN, POSITIONS, documents) is first
    assert made.of(HIDDEN, POSITIONS, documents.clone()) is not first
    rope = geometry(PositionEmbedding.ROPE)
    assert rope.of(HIDDEN, None, None) is rope.of(HIDDEN, None, None)


def test_ids_changed_in_place_are_noticed() -> None:
    made = geometry()
    documents = torch.zeros(2, 5, dtype=torch.int64)
    before = made.of(HIDDEN, POSITIONS, documents)
    documents[:, 3:] = 1
    after = made.of(HIDDEN, POSITIONS, documents)
    assert before.mask is not None
    assert after.mask is not None
    assert not torch.equal(before.mask, after.mask)


def test_ids_from_inference_mode_are_accepted() -> None:
    with torch.inference_mode():
        documents = torch.zeros(2, 5, dtype=torch.int64)
        mask = geometry(PositionEmbedding.ALIBI).of(HIDDEN, POSITIONS, documents).mask
    assert mask is not None
    assert not mask.is_inference()


def test_another_length_makes_another_bias() -> None:
    made = geometry(PositionEmbedding.ALIBI)
    for length in (5, 3, 5, 7):
        mask = made.of(torch.zeros(length, 1, 16), None, None).mask
        assert mask is not None
        assert mask.shape == (1, 4, length, length)


def test_a_share_of_a_sequence_has_its_own_rows_and_the_keys_in_the_order_of_ranks() -> None:
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2]]).repeat(2, 1)
    positions = torch.arange(8).expand(2, 8).contiguous()
    config = tiny_config(position_embedding_type=PositionEmbedding.ROPE)
    marks = torch.tensor([[1, 1, 0, 1, 0, 0, 1, 1]]).repeat(2, 1)
    ids = (positions, documents, marks)
    masked = replace(tiny_build(), attention_backend=AttentionBackend.UNFUSED)
    whole = AttentionGeometry(config, masked).of(torch.zeros(8, 2, 16), *ids)
    ctx = replace(ParallelContext.single(), cp=Group((0, 1), 1))
    for exchange, rows, keys in (
        (ContextExchange.P2P, [2, 3, 4, 5], [0, 1, 6, 7, 2, 3, 4, 5]),
        (ContextExchange.A2A, list(range(8)), list(range(8))),  # some heads of all tokens
    ):
        build = replace(masked, ctx=ctx, context_exchange=exchange)
        made = AttentionGeometry(config, build).of(torch.zeros(4, 2, 16), *ids)
        assert made.mask is not None
        assert made.rotation is not None
        assert whole.mask is not None
        assert whole.rotation is not None
        assert torch.equal(made.mask, whole.mask[:, :, rows][..., keys])
        own = build.share.positions(8)
        assert torch.equal(made.rotation.cos, whole.rotation.cos[own])


def test_alibi_is_minus_the_slope_times_the_distance() -> None:
    mask = geometry(PositionEmbedding.ALIBI).of(HIDDEN, None, None).mask
    assert mask is not None
    for head, slope in enumerate(alibi_slopes(4)):
        for i in range(5):
            for j in range(5):
                expected = -slope * (i - j) if j <= i else -float("inf")
                assert mask[0, head, i, j].item() == expected


@pytest.mark.parametrize(
    "kind", [PositionEmbedding.LEARNED, PositionEmbedding.ALIBI, PositionEmbedding.ROPE]
)
@pytest.mark.parametrize("documents", [None, torch.tensor([[0, 0, 1, 1, 1, 1], [2] * 6])])
def test_of_a_part_of_the_sequence_it_is_that_of_the_whole(
    kind: PositionEmbedding, documents: torch.Tensor | None
) -> None:
    config, positions = tiny_config(position_embedding_type=kind), torch.arange(6).expand(2, 6)
    ids = (None, None) if documents is None else (positions, documents)
    split = AttentionGeometry(config, tiny_build(second_of_two(), sequence_parallel=True))
    whole = AttentionGeometry(config, tiny_build(second_of_two()))
    actual, expected = split.of(torch.zeros(3, 2, 16), *ids), whole.of(torch.zeros(6, 2, 16), *ids)
    torch.testing.assert_close(
        (actual.mask, actual.rotation), (expected.mask, expected.rotation), rtol=0, atol=0
    )
