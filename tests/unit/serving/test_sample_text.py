"""The tokens of a sample stand at their places in its text."""

from megatron.serving.engine_client import TokenDrawn, TokenScore
from megatron.serving.sample_text import SampleText, prompt_tokens
from tests.support.serving.models import served_model

RULES = served_model().rules


def sample(stops: tuple[str, ...] = (), min_tokens: int = 0) -> SampleText:
    return SampleText(RULES, (), stops=stops, min_tokens=min_tokens)


def test_a_token_is_given_away_with_its_text() -> None:
    made = sample(("abc",))
    shown = []
    for letter in "xabd":
        made.add(TokenDrawn(0, ord(letter)))
        part = made.take()
        shown.append((part.text, [token.offset for token in part.tokens]))
    assert shown == [("x", [0]), ("", []), ("", []), ("abd", [1, 2, 3])]


def test_tokens_behind_a_stop_string_are_dropped_and_counted() -> None:
    made = sample(("bc",))
    for letter in "abcd":
        made.add(TokenDrawn(0, ord(letter)))
    part = made.take()
    assert (part.text, [token.token for token in part.tokens]) == ("a", [97])
    assert (made.finish, made.count) == ("stop", 3)


def test_what_is_held_back_is_shown_at_the_end() -> None:
    made = sample(("bc",))
    made.add(TokenDrawn(0, 97))
    made.add(TokenDrawn(0, 98))
    made.add(TokenDrawn(0, 0xE6, finish="length"))  # the first byte of three
    part = made.take()
    assert (part.text, made.finish) == ("ab\ufffd", "length")
    assert [token.offset for token in part.tokens] == [0, 1, 2]


def test_a_stop_string_in_the_last_character_counts() -> None:
    made = sample(("\ufffd",))
    made.add(TokenDrawn(0, 97))
    made.add(TokenDrawn(0, 0xE6, finish="length"))
    assert (made.take().text, made.finish) == ("a", "stop")


def test_a_stop_string_before_the_least_number_of_tokens_is_text() -> None:
    made = sample(("b",), min_tokens=3)
    for letter in "abcb":
        made.add(TokenDrawn(0, ord(letter)))
    assert (made.take().text, made.finish) == ("abc", "stop")


def test_a_stop_token_is_a_token_without_text() -> None:
    made = sample()
    made.add(TokenDrawn(0, 97))
    made.add(TokenDrawn(0, 256, finish="stop"))
    part = made.take()
    assert (part.text, [token.token for token in part.tokens]) == ("a", [97, 256])


def test_the_first_token_of_a_prompt_has_no_score() -> None:
    score = TokenScore(-1.0)
    tokens = prompt_tokens(RULES, list("\u00e9a".encode()), [score, score])
    assert [(each.offset, each.score) for each in tokens] == [(0, None), (0, score), (1, score)]
