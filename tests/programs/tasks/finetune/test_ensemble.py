"""Several models' predictions as one: the arithmetic, and what may not be joined."""

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError
from tasks.finetune.ensemble import Combine, check_alike, check_weights, combined
from tasks.finetune.examples import ClassificationQuestion
from tasks.finetune.predictions import Prediction, Predictions, decision_of, softmax

QUESTION = ClassificationQuestion(("no", "maybe", "yes"))
GRADES = ClassificationQuestion(metrics=("pearson", "spearman"))
EXAMPLES = 40
# Of float64 sums in another order.
SAME = 1e-12


def predictions(name: str, seed: int, **changes: object) -> Predictions:
    """Return the predictions of this seed's model for the same examples."""
    scores = np.random.RandomState(seed).randn(EXAMPLES, 3)
    rows = tuple(
        Prediction(str(at), f"d{at}", "dev", QUESTION.answers[at % 3], tuple(row), softmax(row))
        for at, row in enumerate(scores.tolist())
    )
    return Predictions(name, "MNLI", QUESTION.answers, rows)._replace(**changes)  # type: ignore[arg-type]


def as_array(file: Predictions) -> np.ndarray:
    return np.array([row.probabilities for row in file.rows])


def decisions(rows: tuple[Prediction, ...]) -> list[float]:
    return [decision_of(QUESTION, row) for row in rows]


def test_probabilities_are_averaged() -> None:
    files = [predictions("a", 0), predictions("b", 1), predictions("c", 2)]
    found = combined(files, QUESTION)
    expected = np.mean([as_array(file) for file in files], axis=0)
    np.testing.assert_allclose([row.probabilities for row in found], expected, atol=SAME)
    assert decisions(found) == expected.argmax(-1).tolist()
    assert [row[:4] for row in found] == [row[:4] for row in files[0].rows]


def test_weights_count() -> None:
    files = [predictions("a", 0), predictions("b", 1)]
    found = combined(files, QUESTION, weights=[3.0, 1.0])
    expected = 0.75 * as_array(files[0]) + 0.25 * as_array(files[1])
    np.testing.assert_allclose([row.probabilities for row in found], expected, atol=SAME)
    assert decisions(combined(files, QUESTION, weights=[1e6, 1.0])) == decisions(files[0].rows)


def test_scores_are_averaged_before_the_softmax() -> None:
    files = [predictions("a", 0), predictions("b", 1)]
    found = combined(files, QUESTION, combine=Combine.SCORES)
    scores = np.mean([[row.scores for row in file.rows] for file in files], axis=0)
    expected = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose([row.probabilities for row in found], expected, atol=SAME)


def test_most_votes_win_and_ties_go_by_probability() -> None:
    files = [predictions(str(seed), seed) for seed in range(4)]
    arrays = [as_array(file) for file in files]
    found = combined(files, QUESTION, combine=Combine.VOTES)
    votes = np.mean([array == array.max(-1, keepdims=True) for array in arrays], axis=0)
    mean = np.mean(arrays, axis=0)
    expected = [
        max(range(3), key=lambda answer: (vote[answer], p[answer])) for vote, p in zip(votes, mean)
    ]
    assert decisions(found) == expected
    ties = [sorted(vote)[-1] == sorted(vote)[-2] for vote in votes.tolist()]
    assert any(ties), "ties are meant to be among them"
    assert expected != mean.argmax(-1).tolist(), "and majorities that the mean is against"


def test_grades_are_averaged_and_not_voted_on() -> None:
    rows = [Prediction("1", "d", "dev", "2.5", (grade,), ()) for grade in (1.0, 4.0)]
    files = [Predictions("f", "STS-B", (), (row,)) for row in rows]
    (found,) = combined(files, GRADES, weights=[2.0, 1.0])
    assert decision_of(GRADES, found) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="there are no votes on a grade"):
        combined(files, GRADES, combine=Combine.VOTES)


def changed_row(**changes: object) -> Predictions:
    first, second, *others = predictions("b", 1).rows
    return predictions("b", 1, rows=(first, second._replace(**changes), *others))  # type: ignore[arg-type]


DIFFERENT = {
    "tasks": predictions("b", 1, task="SNLI"),
    "answers": predictions("b", 1, answers=("yes", "maybe", "no")),
    "numbers of examples": predictions("b", 1, rows=predictions("b", 1).rows[:-1]),
    "examples": changed_row(uid="7"),
    "texts of an example": changed_row(digest="d7"),
    "labels": changed_row(label=""),
    "numbers of scores": changed_row(scores=(0.0,)),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_is_not_alike_is_not_joined(what: str) -> None:
    check_alike([predictions("a", 0), predictions("b", 1)], QUESTION)
    with pytest.raises(DataError, match=f"predictions are of different {what}\n") as raised:
        check_alike([predictions("a", 0), DIFFERENT[what]], QUESTION)
    assert "b" in str(raised.value.found)
    if DIFFERENT[what].rows[1:2] != predictions("b", 1).rows[1:2]:
        assert "a:3: " in str(raised.value.found)  # the line, with the header as the first


@pytest.mark.parametrize("weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("inf")]])
def test_each_file_has_a_weight_of_its_own(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="needs a positive weight for each of its files"):
        check_weights(weights, [predictions("a", 0), predictions("b", 1)])
