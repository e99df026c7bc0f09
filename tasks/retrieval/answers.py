"""Whether a block of text holds an answer, by its words or by a pattern (DPR's rules).

By words: text and answer are cut into runs of letters, digits and marks, and single other signs,
in lower case; the words of the answer have to stand in the text one after the other.
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

import regex

from megatron.errors import DataError

_WORDS = regex.compile(r"[\p{L}\p{N}\p{M}]+|[^\p{Z}\p{C}]")
HasAnswer = Callable[[str], bool]


class AnswerMatch(StrEnum):
    """How answers are looked for."""

    STRING = "string"
    REGEX = "regex"


def matcher(answers: Iterable[str], match: AnswerMatch) -> HasAnswer:
    """Return a function that says whether a text holds one of the answers.

    Raises:
        DataError: an answer is no pattern, or none has a word.
    """
    given = list(answers)
    if match is AnswerMatch.REGEX:
        patterns = [_pattern(answer) for answer in given]
        return lambda text: any(one.search(unicodedata.normalize("NFD", text)) for one in patterns)
    wanted = [found for answer in given if (found := words_of(answer))]
    if not wanted:
        raise DataError(
            "a question has no answer that could be found in a text",
            found=f"answers {given}",
            fix="give at least one answer with a letter or a digit",
        )
    return lambda text: _has_one(words_of(text), wanted)


def words_of(text: str) -> list[str]:
    """Return the words of a text, in lower case, with accents as signs of their own letters."""
    return [word.lower() for word in _WORDS.findall(unicodedata.normalize("NFD", text))]


def _has_one(text: Sequence[str], wanted: Iterable[Sequence[str]]) -> bool:
    return any(
        list(answer) == list(text[at : at + len(answer)])
        for answer in wanted
        for at in range(len(text) - len(answer) + 1)
    )


def _pattern(answer: str) -> "regex.Pattern[str]":
    try:
        return regex.compile(
            unicodedata.normalize("NFD", answer),
            regex.IGNORECASE | regex.UNICODE | regex.MULTILINE,
        )
    except regex.error as error:
        raise DataError(
            "an answer is no regular expression",
            found=f"{answer!r}: {error}",
            fix="correct it, or use --faiss-match string",
        ) from error
