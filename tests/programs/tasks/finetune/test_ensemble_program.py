"""The task that joins predictions, from the command line: two files by hand, and bad input."""

import json
from pathlib import Path

import pytest
from sklearn.metrics import accuracy_score

from megatron.errors import ConfigError, DataError, MegatronError
from tasks.finetune.examples import Example, TextPair
from tasks.finetune.predictions import prediction_of, read_predictions, written
from tasks.finetune.questions import QUESTIONS
from tasks.main import main

RTE = QUESTIONS["RTE"]
TRUE = (0, 1, 1, 0)
# Each is right of two of the four, and where one is wrong the other is surer.
FIRST = ((2.0, 0.0), (0.5, 0.0), (0.0, 0.2), (0.0, 0.1))
SECOND = ((0.0, 1.0), (0.0, 3.0), (0.1, 0.0), (4.0, 0.0))


def write(folder: Path, scores: tuple[tuple[float, float], ...], **changes: object) -> Path:
    labels = changes.get("labels", TRUE)
    task = str(changes.get("task", "RTE"))
    rows = [
        prediction_of(RTE, Example(str(at), (TextPair(f"text {at}"),), label), of_row, "dev")
        for at, (of_row, label) in enumerate(zip(scores, labels))  # type: ignore[call-overload]
    ]
    folder.mkdir(exist_ok=True)
    (folder / "predictions.tsv").write_text(written(task, RTE, rows))
    return folder


def run(*words: object) -> None:
    main(["--task", "ENSEMBLE-CLASSIFIER", *map(str, words)])


def test_two_files_are_joined_and_judged(tmp_path: Path) -> None:
    folders = [write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND)]
    out, output = tmp_path / "out", tmp_path / "result.json"
    run("--paths", *folders, "--eval", "--outdir", out, "--output", output)
    found = json.loads(output.read_text())
    assert found["accuracy"] == accuracy_score(TRUE, TRUE) == 1.0
    assert [model["accuracy"] for model in found["models"]] == [0.5, 0.5]
    assert (found["task"], found["examples"]) == ("RTE", 4)
    joined = read_predictions(out / "predictions.tsv")
    decisions = [
        line.split("\t")[1] for line in (out / "predictions.tsv").read_text().splitlines()[1:]
    ]
    assert decisions == [RTE.answers[answer] for answer in TRUE]
    # What it writes may be joined again: with its first model, that one counts for more.
    again = tmp_path / "again.json"
    run("--paths", out, folders[0], "--weights", 1, 20, "--output", again)
    assert json.loads(again.read_text())["accuracy"] == 0.5
    assert len(joined.rows) == 4


def test_files_without_labels_are_joined_and_not_judged(tmp_path: Path) -> None:
    unknown = (None,) * len(TRUE)
    folders = [
        write(tmp_path / "a", FIRST, labels=unknown),
        write(tmp_path / "b", SECOND, labels=unknown),
    ]
    run("--paths", *folders, "--output", tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert "accuracy" not in found
    with pytest.raises(DataError, match="examples have no label to judge by"):
        run("--paths", *folders, "--eval")


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    one, two = write(tmp_path / "a", FIRST), write(tmp_path / "b", SECOND)
    odd = write(tmp_path / "c", SECOND, task="HANS")
    wrong = write(tmp_path / "d", FIRST)
    text = (wrong / "predictions.tsv").read_text()
    (wrong / "predictions.tsv").write_text(text.replace("\tentailment\tRTE", "\tentails\tRTE"))
    cases: list[tuple[list[object], type[MegatronError], str]] = [
        (["--paths", one], ConfigError, "an ensemble is of several models"),
        (["--paths", one, two, "--threshold", "0.5"], ConfigError, "has no thresholds"),
        (["--paths", one, two, "--calc-threshold"], ConfigError, "has no thresholds"),
        (["--paths", one, two, "--weights", 1], ConfigError, "a positive weight for each"),
        (["--paths", one, tmp_path / "no"], DataError, "does not exist"),
        (["--paths", odd, odd], DataError, "predictions are of a task that is not known"),
        (["--paths", wrong, wrong], DataError, "a label is not one of its task"),
        (["--paths", one, odd], DataError, "files of predictions are of different tasks"),
    ]
    for words, kind, problem in cases:
        with pytest.raises(kind, match=problem):
            run(*words, "--outdir", tmp_path / "out")
    assert not (tmp_path / "out").exists()
