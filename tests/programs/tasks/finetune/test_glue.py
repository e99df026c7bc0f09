"""The files of each task as they are handed out, and what is wrong with others."""

import json
from pathlib import Path

import pytest

from megatron.errors import DataError
from tasks.finetune.examples import TextPair
from tasks.finetune.glue import TASKS, read_glue


def write(folder: Path, *lines: str, name: str = "dev.tsv") -> list[str]:
    file = folder / name
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return [str(file)]


FILES = {
    "COLA": (["gj04\t1\t\tThis is fine.", "gj04\t0\t*\tThis fine is."], [1, 0]),
    "MNLI": (
        [
            "index\tsentence1\tsentence2\tlabel1\tgold_label",
            "0\tA.\tB.\tneutral\tneutral",
            "1\tA.\tC.\tneutral\tcontradiction",
        ],
        [2, 0],
    ),
    "MRPC": (["\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\tA.\tB."], [1]),
    "QNLI": (["index\tquestion\tsentence\tlabel", "0\tA?\tB.\tnot_entailment"], [1]),
    "QQP": (["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\tA?\tB?\t0"], [0]),
    "RTE": (["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\tentailment"], [0]),
    "SST-2": (["sentence\tlabel", "good \t1"], [1]),
    "STS-B": (["index\tsentence1\tsentence2\tscore", "0\tA.\tB.\t3.800"], [3.8]),
    "WNLI": (["index\tsentence1\tsentence2\tlabel", "0\tA.\tB.\t1"], [1]),
}


@pytest.mark.parametrize("name", FILES)
def test_each_task_reads_its_files(name: str, tmp_path: Path) -> None:
    lines, labels = FILES[name]
    examples = read_glue(TASKS[name], write(tmp_path, *lines))
    assert [example.label for example in examples] == labels
    assert all(len(example.rows) == 1 for example in examples)
    assert (examples[0].rows[0].second is None) == (name in ("COLA", "SST-2"))


def test_a_file_of_tests_has_no_labels_and_may_have_a_header(tmp_path: Path) -> None:
    (only,) = read_glue(TASKS["COLA"], write(tmp_path, "index\tsentence", "0\tFine."))
    assert only.rows == (TextPair("Fine."),)
    assert only.label is None


def test_snli_is_lines_of_json_without_the_undecided(tmp_path: Path) -> None:
    rows = [
        {"pairID": "a", "sentence1": "A.", "sentence2": "B.", "gold_label": "entailment"},
        {"pairID": "b", "sentence1": "A.", "sentence2": "B.", "gold_label": "-"},
    ]
    files = write(tmp_path, *map(json.dumps, rows), name="dev.jsonl")
    (only,) = read_glue(TASKS["SNLI"], files)
    assert (only.uid, only.label) == ("a", 1)


def test_every_task_of_glue_is_there() -> None:
    assert {*FILES, "SNLI"} == set(TASKS)


def wrong(folder: Path, name: str, *lines: str, file: str = "dev.tsv") -> str:
    with pytest.raises(DataError) as raised:
        read_glue(TASKS[name], write(folder, *lines, name=file))
    return str(raised.value)


def test_what_is_wrong_is_said_with_file_and_line(tmp_path: Path) -> None:
    header = "index\tsentence1\tsentence2\tlabel"
    message = wrong(tmp_path, "RTE", "index\tsentence_1\tsentence2\tlabel", "0\tA.\tB.\tentailment")
    assert "a file lacks a column of its task" in message
    assert "wanted sentence1; nearest: sentence_1" in message
    message = wrong(tmp_path, "RTE", header, "0\tA.\tB.\tentails")
    assert "a label is not one of its task" in message
    assert (
        "dev.tsv:2: 'entails'; wanted one of entailment, not_entailment; nearest: entail" in message
    )
    message = wrong(tmp_path, "RTE", header, "0\tA.\t \tentailment")
    assert "an example has an empty text" in message
    assert "dev.tsv:2: nothing in column sentence2" in message
    message = wrong(tmp_path, "RTE", header, "0\tA.\tB.\tC.\tentailment")
    assert "a line has another number of columns than the file's header" in message
    assert "5 columns, wanted 4" in message
    assert "there is no example" in wrong(tmp_path, "RTE", header)
    for grade in ("much", "-1", "5.5", "nan"):
        message = wrong(tmp_path, "STS-B", "sentence1\tsentence2\tscore", f"A.\tB.\t{grade}")
        assert "a grade is not a number of its task" in message
        assert f"'{grade}'; wanted 0 to 5" in message
    for line in ("{", "[1]"):
        assert "a line is not a JSON object" in wrong(tmp_path, "SNLI", line, file="dev.jsonl")
    row = json.dumps({"sentence1": "A.", "sentence2": "B.", "gold_label": 0})
    assert "'0'; wanted one of contradiction" in wrong(tmp_path, "SNLI", row, file="dev.jsonl")


def test_training_needs_labels(tmp_path: Path) -> None:
    files = write(tmp_path, "index\tsentence1\tsentence2\tgold_label", "0\tA.\tB.\tneutral")
    with pytest.raises(DataError, match="a file lacks a column of its task") as raised:
        read_glue(TASKS["RTE"], files, needs_labels=True)
    assert "wanted label; nearest: gold_label" in str(raised.value)
    row = {"sentence1": "A.", "sentence2": "B.", "gold_label": None}
    files = write(tmp_path, json.dumps(row), name="train.jsonl")
    assert read_glue(TASKS["SNLI"], files)[0].label is None
    with pytest.raises(DataError, match="an example has no label, and training needs it"):
        read_glue(TASKS["SNLI"], files, needs_labels=True)
