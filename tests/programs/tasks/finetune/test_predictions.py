"""Files of predictions: what is written is read again, and what is not one is refused."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from tasks.finetune.examples import ClassificationQuestion, Example, TextPair
from tasks.finetune.predictions import (
    decision_of,
    prediction_of,
    read_predictions,
    softmax,
    written,
)

QUESTION = ClassificationQuestion(("no", "yes"))
CHOICE = ClassificationQuestion(num_choices=4)
GRADE = ClassificationQuestion(metrics=("pearson",))
# Nine digits are written.
DIGITS = 1e-8


def example(label: float | None, uid: str = "7", text: str = "A.") -> Example:
    return Example(uid, (TextPair(text, "B."),), label)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows = [
        prediction_of(QUESTION, example(1.0), (0.1, 1 / 3), "dev"),
        prediction_of(QUESTION, example(None, uid="8\t9"), (2.0, -1.0), "test"),
    ]
    (tmp_path / "a.tsv").write_text(written("RTE", QUESTION, rows))
    found = read_predictions(tmp_path / "a.tsv")
    assert (found.task, found.answers) == ("RTE", ("no", "yes"))
    for own, row in zip(found.rows, rows, strict=True):
        assert own[:4] == row[:4]
        assert own.scores == pytest.approx(row.scores, rel=DIGITS)
        assert own.probabilities == pytest.approx(softmax(row.scores), rel=DIGITS)
    assert [row.label for row in found.rows] == ["yes", ""]
    assert [row.uid for row in found.rows] == ["7", "8 9"]
    assert [decision_of(QUESTION, row) for row in found.rows] == [1.0, 0.0]
    lines = (tmp_path / "a.tsv").read_text().splitlines()
    assert lines[0].split("\t")[-2:] == ["p(no)", "p(yes)"]
    assert [line.split("\t")[1] for line in lines[1:]] == ["yes", "no"]


def test_choices_are_letters_and_grades_have_no_probabilities(tmp_path: Path) -> None:
    chosen = prediction_of(CHOICE, example(2.0), (0.0, 1.0, 3.0, 2.0), "dev")
    (tmp_path / "a.tsv").write_text(written("RACE", CHOICE, [chosen]))
    assert read_predictions(tmp_path / "a.tsv").answers == ("A", "B", "C", "D")
    assert (tmp_path / "a.tsv").read_text().splitlines()[1].startswith("7\tC\t0 1 3 2\tC\tRACE\t")
    graded = prediction_of(GRADE, example(2.5), (1.25,), "dev")
    (tmp_path / "b.tsv").write_text(written("STS-B", GRADE, [graded]))
    (only,) = read_predictions(tmp_path / "b.tsv").rows
    assert (decision_of(GRADE, only), only.label, only.probabilities) == (1.25, "2.5", ())


def test_the_digest_is_of_all_texts_and_where_they_are_divided() -> None:
    texts = [
        Example("1", (TextPair("A B"),), None),
        Example("1", (TextPair("A", "B"),), None),
        Example("1", (TextPair("B", "A"),), None),
        Example("1", (TextPair("A"), TextPair("B")), None),
    ]
    assert len({each.digest for each in texts}) == len(texts)
    assert example(None).digest == example(1.0, uid="other").digest


GOOD = written("RTE", QUESTION, [prediction_of(QUESTION, example(1.0), (0.0, 0.0), "dev")] * 2)
BROKEN = {
    "is not one of predictions": "uid\tprediction\n7\tyes\n",
    "holds none": GOOD.splitlines()[0] + "\n",
    "another number of columns than its header": GOOD.replace("\tdev\t", "\t", 1),
    "predictions of several tasks": GOOD.replace("\tRTE\t", "\tWNLI\t", 1),
    "not some of one whole": GOOD.replace("\t0.5\t0.5", "\t0.5\t0.6", 1),
    "a prediction is not a number": GOOD.replace("\t0 0\t", "\t0 nan\t", 1),
    "does not exist": None,
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_is_no_file_of_predictions_is_refused(problem: str, tmp_path: Path) -> None:
    text = BROKEN[problem]
    if text is not None:
        assert text != GOOD
        (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(DataError, match=problem) as raised:
        read_predictions(tmp_path / "a.tsv")
    assert "a.tsv" in str(raised.value.found)
    (tmp_path / "good.tsv").write_text(GOOD)
    assert len(read_predictions(tmp_path / "good.tsv").rows) == 2
