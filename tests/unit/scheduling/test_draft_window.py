"""The number of proposed tokens follows what was drawn of those before."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.draft_window import LONGEST_PAUSE, DraftWindow, window_after
from tests.support.examples import examples

SIZES = st.integers(1, 16)


def steps(most: int, is_right: list[bool]) -> tuple[list[int], list[DraftWindow]]:
    """Propose all that there is room for; each step either draws all of it or nothing."""
    window, rooms, windows = DraftWindow(most), [], []
    for right in is_right:
        rooms.append(window.room)
        accepted = window.room if right else 0
        window = window_after(window, proposed=window.room, accepted=accepted, most=most)
        windows.append(window)
    return rooms, windows


@examples(100)
@given(SIZES, st.lists(st.tuples(st.integers(0, 16), st.integers(0, 16)), max_size=40))
def test_there_is_never_room_for_more_than_the_most(
    most: int, found: list[tuple[int, int]]
) -> None:
    window = DraftWindow(most)
    for proposed, accepted in found:
        proposed = min(proposed, window.room)
        accepted = min(accepted, proposed)
        window = window_after(window, proposed=proposed, accepted=accepted, most=most)
        assert 1 <= window.size <= most
        assert 0 <= window.pause <= LONGEST_PAUSE
        assert window.room in (0, window.size)


@examples(50)
@given(SIZES, st.integers(1, 3000))
def test_where_all_are_wrong_few_are_proposed(most: int, count: int) -> None:
    rooms, _ = steps(most, [False] * count)
    # The sizes 16, 8, .. 1; then pauses of 1, 2, .. 64 steps, and 64 again, each behind one token.
    assert sum(rooms) <= 2 * most + 6 + count / (LONGEST_PAUSE + 1)


@examples(50)
@given(SIZES, st.lists(st.booleans(), max_size=60))
def test_where_all_are_right_again_all_are_proposed_soon(most: int, before: list[bool]) -> None:
    _, windows = steps(most, before)
    window = windows[-1] if windows else DraftWindow(most)
    for _ in range(window.pause):
        window = window_after(window, proposed=0, accepted=0, most=most)
    assert window.room >= 1
    for _ in range(most.bit_length()):
        window = window_after(window, proposed=window.room, accepted=window.room, most=most)
    assert window.room == most


def test_the_size_follows_what_is_drawn() -> None:
    window = window_after(DraftWindow(8), proposed=8, accepted=3, most=8)
    assert window == DraftWindow(4)
    assert window_after(window, proposed=4, accepted=4, most=8) == DraftWindow(8)
    assert window_after(window, proposed=0, accepted=0, most=8) == window
    assert window_after(window, proposed=3, accepted=0, most=8) == DraftWindow(2)
    paused = window_after(DraftWindow(1), proposed=1, accepted=0, most=8)
    assert (paused, paused.room) == (DraftWindow(1, pause=1, next_pause=2), 0)
    again = window_after(paused, proposed=0, accepted=0, most=8)
    assert (again.room, again.next_pause) == (1, 2), "the next pause is longer"
    assert window_after(again, proposed=1, accepted=1, most=8) == DraftWindow(2)
