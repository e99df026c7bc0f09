"""What became of a preparation is reported once, in whatever order it ends and is asked for."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.scheduling.control.member import PrepareDone
from megatron.serving.ranks.votes import Votes
from tests.support.examples import examples


def test_a_result_is_reported_when_both_are_there() -> None:
    reported: list[PrepareDone] = []
    votes = Votes(reported.append)
    votes.ask(3)
    assert reported == []
    votes.done(PrepareDone(3))
    votes.done(PrepareDone(4, "refused", "no memory"))
    assert reported == [PrepareDone(3)]
    votes.ask(4)
    assert reported == [PrepareDone(3), PrepareDone(4, "refused", "no memory")]


def test_a_result_of_a_transition_that_was_rolled_back_meanwhile_is_kept_from_the_next() -> None:
    reported: list[PrepareDone] = []
    votes = Votes(reported.append)
    votes.ask(1)
    votes.ask(2)
    votes.done(PrepareDone(1))
    votes.done(PrepareDone(2))
    assert reported == [PrepareDone(2)]


@examples(100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=20))
def test_nothing_is_reported_that_was_not_asked_for(events: list[tuple[bool, int]]) -> None:
    reported: list[PrepareDone] = []
    votes, asked, done = Votes(reported.append), set(), set()
    for is_ask, epoch in events:
        if is_ask:
            votes.ask(epoch)
            asked.add(epoch)
        else:
            votes.done(PrepareDone(epoch))
            done.add(epoch)
        assert {each.epoch for each in reported} <= asked & done


def test_results_that_nobody_asks_for_are_few() -> None:
    votes = Votes(lambda done: None)
    for epoch in range(100):
        votes.done(PrepareDone(epoch))
    assert sorted(votes._done) == list(range(84, 100))
