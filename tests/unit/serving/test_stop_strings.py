"""A stop string is never shown, nothing else is lost, and little is held back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.serving.stop_strings import StopStrings
from tests.support.examples import examples

FEW_LETTERS = st.text(alphabet="ab", max_size=30)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3)


def end_of(text: str, stops: list[str]) -> int | None:
    """Where the text before the first complete stop string ends, letter by letter."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


@examples(400)
@given(FEW_LETTERS, STOPS, st.lists(st.integers(1, 6), min_size=1))
def test_any_pieces_of_a_text_give_what_it_gives_letter_by_letter(
    text: str, stops: list[str], sizes: list[int]
) -> None:
    found, shown, at, is_stopped = StopStrings(stops), "", 0, False
    for number in range(len(text)):
        size = sizes[number % len(sizes)]
        released = found.add(text[at : at + size])
        shown += released.text
        at += size
        is_stopped = released.is_stopped
        if is_stopped or at >= len(text):
            break
    shown += found.end()
    end = end_of(text, stops)
    assert is_stopped == (end is not None)
    assert shown == text[:end]


@examples(200)
@given(FEW_LETTERS, STOPS)
def test_only_the_beginning_of_a_stop_string_is_held(text: str, stops: list[str]) -> None:
    found = StopStrings(stops)
    for letter in text:
        if found.add(letter).is_stopped:
            return
        assert not found.pending or any(stop.startswith(found.pending) for stop in stops)
        assert all(found.pending != stop for stop in stops)


@pytest.mark.parametrize(
    ("pieces", "stops", "shown"),
    [
        (["one. ", "two"], ["\n"], ["one. ", "two"]),
        (["a\n", "\nb"], ["\n\n"], ["a", ""]),
        (["a\n", "b"], ["\n\n"], ["a", "\nb"]),
        (["abc"], ["bc", "c"], ["a"]),
        (["abc"], ["c", "ab"], [""]),
    ],
)
def test_text_is_released_as_soon_as_it_cannot_be_a_stop(
    pieces: list[str], stops: list[str], shown: list[str]
) -> None:
    found = StopStrings(stops)
    assert [found.add(piece).text for piece in pieces] == shown
