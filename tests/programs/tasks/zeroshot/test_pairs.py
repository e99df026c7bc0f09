"""How pairs become tokens, what is chosen, and what is wrong with a file of them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron.engine.scoring import RowScore, ScoringRow
from megatron.errors import ConfigError, DataError, NumericsError
from megatron.tokenizer.tokenizer import build_tokenizer
from tasks.loading import LoadedScorer
from tasks.zeroshot.pairs import (
    ContextPair,
    Keys,
    MultipleChoice,
    checked_scores,
    encode_pair,
    evaluate_choices,
    evaluate_pairs,
    read_pairs,
    read_questions,
    row_of,
)

BYTES = build_tokenizer(tokenizer_type="ByteTokenizer")


def file_of(folder: Path, *lines: Mapping[str, Any]) -> list[str]:
    path = folder / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(path)]


def test_a_pair_is_cut_where_its_context_ends() -> None:
    assert encode_pair(BYTES, ContextPair("ab", " c")) == ([97, 98], [32, 99])
    assert encode_pair(BYTES, ContextPair("ab \n", "c")) == ([97, 98], [32, 10, 99])
    assert encode_pair(BYTES, ContextPair("", "c")) == ([256], [99])


def test_without_a_context_there_has_to_be_an_end_of_documents() -> None:
    class Endless:
        name, eod, eod_note = "endless", None, "none"

        def tokenize(self, text: str) -> list[int]:
            return [1] * len(text)

    tokenizer: Any = Endless()
    with pytest.raises(ConfigError, match="a context is empty"):
        encode_pair(tokenizer, ContextPair("", "c"))


def test_a_text_that_begins_with_the_end_of_a_document_has_it_once() -> None:
    class Marked:
        name, eod, eod_note = "marked", 0, ""

        def tokenize(self, text: str) -> list[int]:
            return [0] + [1] * len(text)

    tokenizer: Any = Marked()
    assert encode_pair(tokenizer, ContextPair("", "abc")) == ([0], [1, 1, 1])


def test_a_context_that_is_too_long_is_cut_in_front_and_a_continuation_is_not() -> None:
    assert row_of([1, 2], [3], 2, at=0) == (ScoringRow((1, 2, 3), 2), False)
    assert row_of([1, 2, 3], [4, 5], 3, at=0) == (ScoringRow((2, 3, 4, 5), 2), True)
    assert row_of([1] * 9, [2], None, at=0) == (ScoringRow((1,) * 9 + (2,), 9), False)
    with pytest.raises(DataError, match="a continuation is longer than the model") as caught:
        row_of([1], [2, 3, 4], 2, at=7)
    assert caught.value.found == "row 7: 3 tokens, 2 positions"
    for given, continuation in (([], [1]), ([1], [])):
        with pytest.raises(DataError, match="a continuation has no token"):
            row_of(given, continuation, 4, at=0)


class Fixed:
    """A scorer that returns given scores, in the order of the rows."""

    max_length = 64

    def __init__(self, *values: float) -> None:
        self.values = values

    def score(self, rows: list[ScoringRow]) -> list[RowScore]:
        return [
            RowScore(value, value == -1.0, len(row.tokens) - row.first)
            for value, row in zip(self.values, rows, strict=True)
        ]


def loaded(*values: float) -> LoadedScorer:
    scorer: Any = Fixed(*values)
    return LoadedScorer(scorer, None, BYTES, 64, None)  # type: ignore[arg-type]


def test_the_likeliest_choice_and_the_likeliest_by_length() -> None:
    questions = [
        MultipleChoice("a", ("bc", "defghi"), 1),
        MultipleChoice("a", ("b", "c"), 0),  # equal: the first is chosen
    ]
    result = evaluate_choices(loaded(-4.0, -6.0, -2.0, -2.0), questions)
    assert (result.chosen, result.chosen_by_length) == ((0, 0), (1, 0))
    assert (result.acc, result.acc_norm) == (0.5, 1.0)
    assert result.numbers()["log_likelihoods"] == ((-4.0, -6.0), (-2.0, -2.0))
    assert "acc: 5.0000E-01 | acc_norm: 1.0000E+00" in result.describe()


def test_pairs_are_added_up_over_tokens() -> None:
    result = evaluate_pairs(loaded(-1.0, -3.0), [ContextPair("a", "b"), ContextPair("a", "cde")])
    assert (result.tokens, result.loss, result.greedy) == (4, 1.0, 0.5)
    assert result.numbers()["pairs"][1] == {
        "log_likelihood": -3.0,
        "is_greedy": False,
        "num_tokens": 3,
    }
    with pytest.raises(NumericsError, match="the model's scores are no probabilities"):
        checked_scores([RowScore(float("nan"), False, 1)])


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    files = file_of(tmp_path, {"sentence_good": "a b", "sentence_bad": "b a", "x": 1})
    keys = Keys(choices=("sentence_good", "sentence_bad"))
    assert read_questions(files, keys) == [MultipleChoice("", ("a b", "b a"), 0)]
    files = file_of(tmp_path, {"q": "a", "options": ["b", "c"], "gold": 1})
    assert read_questions(files, Keys("q", choices=("options",), label="gold")) == [
        MultipleChoice("a", ("b", "c"), 1)
    ]
    files = file_of(tmp_path, {"before": "a", "after": "b"})
    assert read_pairs(files, Keys("before", "after")) == [ContextPair("a", "b")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"choices": ["a", "b"], "label": 0}, "lacks a field that the task reads"),
        ({"context": "", "choices": ["a", "b"]}, "lacks a field that the task reads"),
        ({"context": "", "choices": "ab", "label": 0}, "is not a list of texts"),
        ({"context": "", "choices": ["a", ""], "label": 0}, "is not a list of texts"),
        ({"context": "", "choices": ["a", "b"], "label": 2}, "the number of a choice, 0 to 1"),
        ({"context": "", "choices": ["a", "b"], "label": "a"}, "the number of a choice, 0 to 1"),
        ({"context": "", "choices": ["a"], "label": 0}, "is not a list of two texts or more"),
    ],
)
def test_a_question_that_cannot_be_asked_is_said(
    line: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_questions(file_of(tmp_path, line), Keys())
    assert "lines.jsonl:1" in str(caught.value.found)


def test_a_continuation_has_a_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a text that is not empty"):
        read_pairs(file_of(tmp_path, {"context": "a", "continuation": ""}), Keys())
