"""Proposed tokens are those that followed the same tokens before."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.inference.drafts import LONGEST_NGRAM, SHORTEST_NGRAM, NgramDrafter, ngram_draft
from megatron.inference.sampling import SequenceDraw
from megatron.scheduling.forward_plan import ForwardPlan, SequenceSlice
from tests.support.examples import examples


def naive_draft(tokens: list[int], count: int) -> tuple[int, ...]:
    """Return the same by comparing every place of a text, and by going on token by token."""
    for length in range(LONGEST_NGRAM, SHORTEST_NGRAM - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == tokens[-length:]:
                text, at = list(tokens), start + length
                while len(text) < len(tokens) + count:
                    text.append(text[at])
                    at += 1
                return tuple(text[len(tokens) :])
    return ()


@examples(300)
@given(
    # Ids whose bytes look like those of two others.
    tokens=st.lists(st.sampled_from((0, 1, 256, 257, 1 << 32)), min_size=1, max_size=30),
    count=st.integers(1, 8),
)
def test_what_followed_the_last_place_of_the_longest_tokens_is_proposed(
    tokens: list[int], count: int
) -> None:
    assert ngram_draft(tokens, count) == naive_draft(tokens, count)


def test_nothing_is_proposed_for_a_text_that_does_not_repeat_itself() -> None:
    assert ngram_draft(range(9), 3) == ()
    assert ngram_draft([7, 1, 7], 3) == ()  # one token alone
    assert ngram_draft([7], 3) == ()


def test_prompt_and_output_are_searched_for_the_sequences_with_room() -> None:
    slices = (
        SequenceSlice(4, (2,), 5, (0,), True, draft_room=2),
        SequenceSlice(5, (2,), 5, (1,), True),
        SequenceSlice(6, (3, 1), 0, (2,), False),
    )
    draws = {
        sequence: SequenceDraw(seed=0, prompt=(1, 2, 9, 8), output=(1, 2)) for sequence in (4, 5)
    }
    assert NgramDrafter().propose(ForwardPlan((), slices), draws) == {4: (9, 8)}
