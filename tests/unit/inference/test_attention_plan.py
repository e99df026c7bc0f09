"""Groups hold every slice once; what is read together is short, and padded as bits demand."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.inference.attention_plan import (
    MOST_KEYS,
    MOST_SEQUENCES,
    attention_groups,
)
from megatron.scheduling.forward_plan import SequenceSlice
from tests.support.examples import examples


def slice_of(name: int, end: int, tokens: int) -> SequenceSlice:
    return SequenceSlice(name, (0,) * tokens, end - tokens, (), True)


@st.composite
def slices(draw: st.DrawFn) -> list[SequenceSlice]:
    found = []
    for name in range(draw(st.integers(1, 20))):
        end = draw(st.integers(1, 5000))
        tokens = draw(st.sampled_from([1, 1, 1, 2, 7]))
        found.append(slice_of(name, max(end, tokens), tokens))
    return found


@examples(100)
@given(slices(), st.sampled_from([1, 32, 512]), st.sampled_from([4, 32, 96]))
def test_every_slice_is_in_one_group_that_covers_its_keys(
    each: list[SequenceSlice], multiple: int, block: int
) -> None:
    groups = attention_groups(each, block_size=block, key_multiple=multiple)
    assert sorted(at for group in groups for at in group.slices) == list(range(len(each)))
    for group in groups:
        members = [each[at] for at in group.slices]
        assert all(len(member.tokens) == group.tokens for member in members)
        assert group.keys >= max(member.end for member in members)
        assert group.keys % block == group.keys % multiple == 0
        assert len(members) == 1 or group.tokens == 1
        assert len(members) <= MOST_SEQUENCES
        assert len(members) == 1 or len(members) * group.keys <= MOST_KEYS
        if multiple == 1:
            assert group.keys < max(member.end for member in members) + block


def test_sequences_of_similar_length_are_read_together() -> None:
    lengths = [600, 40, 4000, 50, 700, 30]
    each = [slice_of(name, length, 1) for name, length in enumerate(lengths)]
    groups = attention_groups(each, block_size=32, key_multiple=32)
    assert [[lengths[at] for at in group.slices] for group in groups] == [
        [30, 40, 50, 600, 700],
        [4000],
    ]
