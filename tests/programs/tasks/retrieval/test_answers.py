"""When a text holds an answer, by words and by patterns."""

import pytest

from megatron.errors import DataError
from tasks.retrieval.answers import AnswerMatch, matcher, words_of


@pytest.mark.parametrize(
    ("answer", "text", "holds"),
    [
        ("Ishmael", "Call me ISHMAEL.", True),
        ("white whale", "the white, whale", False),
        ("white whale", "the White  Whale!", True),
        ("hale", "the white whale", False),
        ("caf\u00e9", "a cafe\u0301 there", True),
        ("cafe", "a caf\u00e9 there", False),
        ("1,851", "in 1,851 words", True),
        ("whale ship end", "whale ship", False),
    ],
)
def test_an_answer_is_a_run_of_whole_words(answer: str, text: str, holds: bool) -> None:
    assert matcher([answer], AnswerMatch.STRING)(text) is holds
    assert matcher(["nothing", answer], AnswerMatch.STRING)(text) is holds


def test_an_answer_may_be_a_pattern() -> None:
    holds = matcher([r"18\d\d", "^ahab"], AnswerMatch.REGEX)
    assert holds("in 1851")
    assert holds("said\nAhab")
    assert not holds("old Ahab, 185")


def test_words_are_runs_of_letters_and_single_signs() -> None:
    assert words_of("Don't; 3.5 m\u2014ok") == [
        *("don", "'", "t", ";", "3", ".", "5", "m", "\u2014", "ok")
    ]


def test_answers_that_cannot_be_found_are_refused() -> None:
    with pytest.raises(DataError, match="no answer that could be found"):
        matcher(["", "  "], AnswerMatch.STRING)
    with pytest.raises(DataError, match="an answer is no regular expression"):
        matcher(["(open"], AnswerMatch.REGEX)
