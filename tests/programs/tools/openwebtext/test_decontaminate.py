"""The text of tasks leaves a corpus; everything else stays as it is."""

from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tests.support.documents import json_lines, words, write_jsonl
from tools.openwebtext import decontaminate
from tools.openwebtext.decontaminate import NgramRule, TaskNgrams, clean_pieces


def test_tasks_are_cut_out_with_their_surroundings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = " ".join(words(20, 99))
    before, after = (" ".join(words(120, seed)) for seed in (1, 2))
    quoted = task.upper().replace(" ", ", ")
    source = write_jsonl(tmp_path / "a.jsonl", [before, f"{before} {quoted} {after}", f"x {task}"])
    tasks = write_jsonl(tmp_path / "tasks.jsonl", [task, "too short"])
    output = tmp_path / "out.jsonl"
    flags = ["--input", str(source), "--tasks", str(tasks), "--output", str(output)]
    decontaminate.main(flags)
    records = json_lines(output)
    assert output.read_text().splitlines()[0] == source.read_text().splitlines()[0]
    assert [record["id"] for record in records] == [0, 1, 1]
    assert records[1]["text"] == f"{before} "[:-200]
    assert records[2]["text"] == f" {after}"[200:]
    assert "1 were cut, 1 dropped, 1 left as they are" in capsys.readouterr().out


def test_a_document_in_many_pieces_goes_whole() -> None:
    task = " ".join(words(13, 99))
    filler = " ".join(words(120, 1))
    rule = NgramRule()
    ngrams = TaskNgrams([task], rule)
    assert len(clean_pieces(f" {task} ".join([filler] * 10), ngrams, rule)) == 10
    assert clean_pieces(f" {task} ".join([filler] * 11), ngrams, rule) == []


def test_a_short_task_is_looked_for_as_a_whole() -> None:
    rule = NgramRule()
    nine = " ".join(words(9, 5))
    assert len(TaskNgrams([nine, "seven words are too few to count"], rule)) == 1
    assert clean_pieces(f"so: {nine}!", TaskNgrams([nine], rule), rule) == []


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--tasks", "a.jsonl", "--ngram", "0"), "at least one word"),
        (("--tasks", "short.jsonl"), "no text that is long enough"),
        (("--tasks", "a.jsonl", "--output", "a.jsonl", "--overwrite"), "over another file"),
        (("--tasks", "tasks.jsonl", "--output", "tasks.jsonl", "--overwrite"), "over another file"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [" ".join(words(20, 1))])
    write_jsonl(tmp_path / "tasks.jsonl", [" ".join(words(20, 2))])
    write_jsonl(tmp_path / "short.jsonl", ["short"])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises((ConfigError, DataError), match=problem):
        decontaminate.main(["--input", "a.jsonl", "--output", "out.jsonl", *flags])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
