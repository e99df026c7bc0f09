"""Where sentences end, and that no character is lost on the way."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.tokenizer.sentences import split_sentences

# Far above the milliseconds it takes, far below the minutes that quadratic time would take.
LINEAR_SECONDS = 5.0


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three? Four", ["One.", "Two!", "Three?", "Four"]),
        ("Dr. Smith met J. Doe in Washington. He left.",
         ["Dr. Smith met J. Doe in Washington.", "He left."]),
        ("It costs 3.50 dollars. Cheap.", ["It costs 3.50 dollars.", "Cheap."]),
        ('He said "no." Then he went.', ['He said "no."', "Then he went."]),
        ("The cat sat. See No. 5 there. No. Yes.",
         ["The cat sat.", "See No. 5 there.", "No.", "Yes."]),
        ("Wait... what? Yes.", ["Wait... what?", "Yes."]),
        ("A title\n\nand its text", ["A title", "and its text"]),
        ("One line\nof one sentence.", ["One line\nof one sentence."]),
        ("see e.g. the note", ["see e.g. the note"]),
        ("\u4eca\u306f\u3002\u660e\u65e5\u3002", ["\u4eca\u306f\u3002", "\u660e\u65e5\u3002"]),
        ("\u041f\u0440\u0438\u0432\u0435\u0442. \u041a\u0430\u043a?",
         ["\u041f\u0440\u0438\u0432\u0435\u0442.", "\u041a\u0430\u043a?"]),
        ("  ", []),
        ("", []),
    ],
)  # fmt: skip
def test_sentences_end_where_a_reader_would_end_them(text: str, sentences: list[str]) -> None:
    assert split_sentences(text) == sentences


@given(st.text(alphabet="aB .!?\n\u3002\"'", max_size=60))
def test_kept_newlines_lose_nothing(text: str) -> None:
    parts = split_sentences(text, keep_newlines=True)
    assert "".join(parts) == (text if text.strip() else "")
    assert all(part.strip() for part in parts)


@given(st.text(max_size=60))
def test_only_white_space_between_sentences_goes(text: str) -> None:
    joined = "".join(split_sentences(text))
    assert "".join(joined.split()) == "".join(text.split())


@pytest.mark.parametrize("unit", [" ", ".", "a", "\n", ". ", "a.b"])
def test_long_texts_take_linear_time(unit: str) -> None:
    started = time.perf_counter()
    split_sentences(unit * 300_000)
    assert time.perf_counter() - started < LINEAR_SECONDS
