"""Near duplicates and the text of tasks leave a corpus; everything else stays as it is."""

import errno
import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import ConfigError, DataError, MachineError
from tools.openwebtext import decontaminate, deduplicate
from tools.openwebtext.decontaminate import Rule, TaskNgrams, clean_pieces
from tools.openwebtext.deduplicate import NearDuplicates
from tools.text_output import WholeFile

ROOT = Path(__file__).resolve().parents[2]
# 128 minima estimate a similarity with a standard error of at most 0.044; this is five of them.
ESTIMATE = 0.22


def words(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(count)]


def write_jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": n, "text": t}) + "\n" for n, t in enumerate(texts)))
    return path


def shingles(text: str) -> set[str]:
    return {text[at : at + 5] for at in range(len(text) - 4)}


def test_the_estimate_is_near_the_share_of_common_shingles() -> None:
    known = NearDuplicates(threshold=1.0)
    for replaced in (0, 10, 30, 60, 100):
        one = words(200, 1)
        two = words(replaced, 2) + one[replaced:]
        texts = [" ".join(one), " ".join(two)]
        a, b = map(shingles, texts)
        estimate = (known.signature(texts[0]) == known.signature(texts[1])).mean()
        assert abs(estimate - len(a & b) / len(a | b)) < ESTIMATE
    assert np.array_equal(known.signature("A  b\nc"), known.signature("a b c"))
    assert known.signature("").shape == known.signature("x" * 200_000).shape == (128,)


def test_near_duplicates_go_and_the_others_stay_byte_for_byte(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [" ".join(words(150, seed)) for seed in range(40)]
    copy = texts[3].upper().replace(" ", "  ")
    changed = " ".join([*texts[5].split()[:-4], "quite", "another", "end"])
    source = write_jsonl(tmp_path / "a.jsonl", [*texts[:20], copy, *texts[20:], changed, "", ""])
    output = tmp_path / "new" / "out.jsonl"
    deduplicate.main(["--input", str(source), "--output", str(output)])
    lines = source.read_text().splitlines(keepends=True)
    assert output.read_text() == "".join(lines[:20] + lines[21:41] + lines[42:43])
    listed = [json.loads(line) for line in Path(f"{output}.duplicates").read_text().splitlines()]
    assert [(record["dropped"], record["like"]) for record in listed] == [
        (f"{source}:21", f"{source}:4"), (f"{source}:42", f"{source}:6"),
        (f"{source}:44", f"{source}:43"),
    ]  # fmt: skip
    assert listed[0]["similarity"] == "1.000"
    assert "kept 41 of 44 documents" in capsys.readouterr().out


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
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert output.read_text().splitlines()[0] == source.read_text().splitlines()[0]
    assert [record["id"] for record in records] == [0, 1, 1]
    assert records[1]["text"] == f"{before} "[:-200]
    assert records[2]["text"] == f" {after}"[200:]
    assert "1 were cut, 1 dropped, 1 left as they are" in capsys.readouterr().out


def test_a_document_in_many_pieces_goes_whole() -> None:
    task = " ".join(words(13, 99))
    filler = " ".join(words(120, 1))
    rule = Rule()
    ngrams = TaskNgrams([task], rule)
    assert len(clean_pieces(f" {task} ".join([filler] * 10), ngrams, rule)) == 10
    assert clean_pieces(f" {task} ".join([filler] * 11), ngrams, rule) == []


def test_a_short_task_is_looked_for_as_a_whole() -> None:
    rule = Rule()
    nine = " ".join(words(9, 5))
    assert len(TaskNgrams([nine, "seven words are too few to count"], rule)) == 1
    assert clean_pieces(f"so: {nine}!", TaskNgrams([nine], rule), rule) == []


@pytest.mark.parametrize(
    ("module", "flags", "problem"),
    [
        (deduplicate, ("--threshold", "0"), "a similarity is above 0"),
        (deduplicate, ("--num-hashes", "6"), "compared in bands of 4"),
        (decontaminate, ("--tasks", "a.jsonl", "--ngram", "0"), "at least one word"),
        (decontaminate, ("--tasks", "short.jsonl"), "no text that is long enough"),
        (decontaminate, ("--tasks", "a.jsonl", "--input", "a.txt"), "read from JSON lines"),
        (deduplicate, ("--input", "a.txt"), "read from JSON lines"),
        (deduplicate, ("--input", "none.jsonl"), "the input holds no document"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: object, flags: str, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", [" ".join(words(20, 1))])
    write_jsonl(tmp_path / "short.jsonl", ["short"])
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "none.jsonl").write_text("\n")
    with pytest.raises((ConfigError, DataError), match=problem):
        module.main(["--input", "a.jsonl", "--output", "out.jsonl", *flags])  # type: ignore[attr-defined]
    assert not list(tmp_path.glob("out*"))


def break_off(path: Path) -> None:
    with WholeFile(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_a_file_that_cannot_be_written_whole_does_not_appear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        break_off(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(MachineError, match="cannot write"), WholeFile(tmp_path / "a") as file:
        file.write(b"all")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["deduplicate", "decontaminate"])
def test_the_programs_start_from_any_folder(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / "openwebtext" / f"{name}.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--input" in done.stdout
