"""Properties of the shares of a sequence, and of the blocks in which ranks attend to each other."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.mpu.context_parallel.shares import SequenceShare, key_blocks
from tests.support.examples import examples

sizes = st.integers(1, 6)
lengths = st.integers(1, 5)  # tokens of a chunk


def shares(size: int, *, paired: bool) -> list[SequenceShare]:
    return [SequenceShare(rank, size, paired) for rank in range(size)]


@given(sizes, st.booleans(), lengths)
@examples(60)
def test_ranks_hold_each_token_once_and_equally_many(size: int, paired: bool, chunk: int) -> None:
    of_ranks = shares(size, paired=paired)
    length = of_ranks[0].parts * chunk
    positions = [share.positions(length).tolist() for share in of_ranks]
    in_order = [*chain.from_iterable(positions)]
    assert sorted(in_order) == list(range(length))
    assert {len(own) for own in positions} == {length // size}
    for share, own in zip(of_ranks, positions):
        assert own == sorted(own)
        assert share.gathered_positions(length).tolist() == in_order
        whole = torch.arange(2 * length).view(2, length)
        assert torch.equal(share.take(whole, 1), whole[:, own])
        assert torch.equal(share.take(whole.t(), 0), whole.t()[own])
    # The first token of a sequence is the first of the first rank: BERT's pooler reads it there.
    assert positions[0][0] == 0


@given(sizes, st.booleans(), lengths)
@examples(60)
def test_every_query_meets_every_key_that_it_may_see_once(
    size: int, causal: bool, chunk: int
) -> None:
    of_ranks = shares(size, paired=True)
    length = of_ranks[0].parts * chunk
    computed = []
    for share in of_ranks:
        own = share.positions(length)
        seen = torch.zeros(len(own), length, dtype=torch.int64)
        blocks = list(key_blocks(share, len(own), causal=causal))
        # Its own keys first, then in the order in which keys come round.
        assert [b.source for b in blocks] == [(share.rank - at) % size for at in range(size)]
        pairs = 0
        for block in blocks:
            rows = torch.arange(len(own))[block.queries]
            keys = share.of_rank(block.source).positions(length)[block.keys]
            met = torch.ones(len(rows), len(keys), dtype=torch.int64)
            if block.causal:
                assert torch.equal(own[rows], keys)
                met = met.tril()
            for row, part in zip(rows, met):
                seen[row, keys] += part
            pairs += int(met.sum())
        allowed = own[:, None] >= torch.arange(length) if causal else torch.ones_like(seen)
        assert torch.equal(seen, allowed.to(torch.int64))
        computed.append(pairs)
    assert len(set(computed)) == 1, "all ranks compute equally much"


def test_a_share_of_all_is_the_tensor_itself() -> None:
    whole = torch.arange(5)
    assert SequenceShare(paired=True).take(whole, 0) is whole
    assert SequenceShare(paired=True).parts == 1


@pytest.mark.parametrize(("paired", "parts"), [(True, 4), (False, 2)])
def test_a_sequence_that_does_not_divide_is_refused(paired: bool, parts: int) -> None:
    with pytest.raises(ConfigError, match="cannot be shared out evenly") as caught:
        SequenceShare(1, 2, paired).positions(5)
    assert f"5 tokens in {parts} parts over 2 ranks" in str(caught.value)
    assert f"a multiple of {parts} tokens, such as {parts * 2 if parts == 4 else 6}" in str(
        caught.value
    )
