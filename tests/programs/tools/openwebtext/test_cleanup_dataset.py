"""Web documents are repaired, the useless ones are refused for a reason; the order stays."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tests.support.documents import json_lines
from tools.openwebtext import cleanup_dataset
from tools.openwebtext.cleaning import CleaningSteps, Verdict, clean, language_of, tidied

ROOT = Path(__file__).resolve().parents[4]
ENGLISH = (
    "The harbour lay quiet in the morning, and the old keeper of the lighthouse went down to the "
    "boats, because somebody had promised him fish for his breakfast. "
)
GERMAN = (
    "Der Hafen lag am Morgen still, und der alte W\u00e4rter des Leuchtturms ging hinunter zu den "
    "Booten, weil ihm jemand Fisch zum Fr\u00fchst\u00fcck versprochen hatte. "
)
FRENCH = (
    "Le port \u00e9tait calme ce matin-l\u00e0, et le vieux gardien du phare descendit vers les "
    "bateaux, parce que quelqu'un lui avait promis du poisson pour son petit d\u00e9jeuner. "
)
MANGLED = "Fr\u00fchst\u00fcck im Caf\u00e9".encode().decode("latin-1")


def run(source: Path, output: Path, *flags: str) -> list[dict[str, object]]:
    cleanup_dataset.main(["--input", str(source), "--output", str(output), *flags])
    return json_lines(output)


def write(path: Path, records: list[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_documents_are_kept_repaired_or_refused_for_a_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [ENGLISH * 8, GERMAN * 8, f"{ENGLISH * 8}{MANGLED}", ENGLISH, " \n", "", FRENCH * 8]
    source = write(tmp_path / "a.jsonl", [{"n": n, "text": t} for n, t in enumerate(texts)])
    rejected = tmp_path / "rejected.jsonl"
    kept = run(source, tmp_path / "new" / "out.jsonl", "--rejected", str(rejected))
    assert [record["n"] for record in kept] == [0, 2]
    lines = source.read_text().splitlines()
    assert (tmp_path / "new" / "out.jsonl").read_text().splitlines()[0] == lines[0]
    assert kept[1]["text"] == f"{ENGLISH * 8}Fr\u00fchst\u00fcck im Caf\u00e9"
    refused = json_lines(rejected)
    assert [(r["reason"], r["detail"], r["place"]) for r in refused] == [
        ("language", "de", f"{source}:2"),
        ("too short", f"{len(ENGLISH.split())} words", f"{source}:4"),
        ("empty", "", f"{source}:5"),
        ("empty", "", f"{source}:6"),
        ("language", "fr", f"{source}:7"),
    ]
    assert refused[0]["document"] == {"n": 1, "text": GERMAN * 8}
    output = capsys.readouterr().out
    assert "kept 2 of 7 documents" in output
    assert "1 of them with changed text" in output
    assert "  2 language\n" in output
    assert "  0 bad line\n" in output


@pytest.mark.parametrize(
    ("text", "steps", "verdict"),
    [
        (MANGLED, CleaningSteps(min_length=0, languages=()), "Fr\u00fchst\u00fcck im Caf\u00e9"),
        (MANGLED, CleaningSteps(min_length=0, languages=(), repair_unicode=False), MANGLED),
        ("a  b", CleaningSteps(min_length=0, languages=(), tidy_white_space=True), "a b"),
        ("a  b", CleaningSteps(min_length=2, languages=()), "a  b"),
        (
            "a  b",
            CleaningSteps(min_length=3, languages=()),
            Verdict("a  b", "too short", "2 words"),
        ),
        ("abc", CleaningSteps(min_length=3, length_unit="characters", languages=()), "abc"),
        (
            "abc",
            CleaningSteps(min_length=4, length_unit="characters", languages=()),
            Verdict("abc", "too short", "3 characters"),
        ),
        (
            "Turn JavaScript on",
            CleaningSteps(javascript_below=19, min_length=0, languages=()),
            Verdict("Turn JavaScript on", "javascript", "18 characters"),
        ),
        (
            "Turn JavaScript on",
            CleaningSteps(javascript_below=18, min_length=0, languages=()),
            "Turn JavaScript on",
        ),
        (GERMAN, CleaningSteps(min_length=0, languages=("en", "de")), GERMAN),
        (GERMAN, CleaningSteps(min_length=0), Verdict(GERMAN, "language", "de")),
        (GERMAN, CleaningSteps(min_length=0, language_below=len(GERMAN)), GERMAN),
        (
            GERMAN,
            CleaningSteps(min_length=0, language_below=len(GERMAN) + 1),
            Verdict(GERMAN, "language", "de"),
        ),
    ],
)
def test_each_step_is_taken_where_it_is_asked_for(
    text: str, steps: CleaningSteps, verdict: str | Verdict
) -> None:
    expected = Verdict(verdict) if isinstance(verdict, str) else verdict
    assert clean(text, steps) == expected


def test_white_space_is_tidied_and_paragraphs_stay() -> None:
    text = "  One\t line \u00a0 \n  and the next\r\n\n \n\nA paragraph. \n"
    assert tidied(text) == "One line\nand the next\n\nA paragraph."
    assert tidied(tidied(text)) == tidied(text)


def test_a_language_is_told_and_always_the_same() -> None:
    for _ in range(3):
        assert [language_of(text) for text in (ENGLISH, GERMAN, FRENCH)] == ["en", "de", "fr"]


def test_tokens_are_counted_by_the_tokenizer_that_is_named(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": text} for text in ("\u00e9" * 5, "abcdefghij")])
    flags = ("--language", "any", "--length-unit", "tokens", "--tokenizer-type", "ByteTokenizer")
    assert len(run(source, tmp_path / "ten.jsonl", *flags, "--min-length", "10")) == 2
    assert len(run(source, tmp_path / "eleven.jsonl", *flags, "--min-length", "11")) == 0


def test_a_bad_line_stops_it_or_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "a.jsonl"
    good = json.dumps({"text": ENGLISH * 8}).encode() + b"\n"
    source.write_bytes(good + b"{\n" + b'{"txt": 1}\n' + b'{"text": "\xff"}\n' + good)
    output, rejected = tmp_path / "out.jsonl", tmp_path / "rejected.jsonl"
    with pytest.raises(DataError, match="not valid JSON"):
        run(source, output)
    assert not output.exists()
    flags = ("--on-bad-line", "skip", "--rejected", str(rejected))
    assert len(run(source, output, *flags)) == 2
    refused = json_lines(rejected)
    assert [(r["reason"], r["place"], r["document"]) for r in refused] == [
        ("bad line", f"{source}:{line}", None) for line in (2, 3, 4)
    ]
    printed = capsys.readouterr()
    assert "  3 bad line\n" in printed.out
    assert f"{source}:2" in printed.err


def test_the_outputs_are_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl.gz"
    texts = [(ENGLISH, GERMAN, MANGLED)[n % 3] * (n % 11) for n in range(200)]
    with gzip.open(source, "wt") as packed:
        packed.write("".join(json.dumps({"text": text}) + "\n" for text in texts))
    one, two = (
        ["--input", source, "--output", tmp_path / f"out{n}", "--rejected", tmp_path / f"no{n}"]
        for n in (1, 2)
    )
    cleanup_dataset.main([*map(str, one), "--workers", "1"])
    # As a program, for its processes are started from the file's name.
    program = [sys.executable, ROOT / "tools" / "openwebtext" / "cleanup_dataset.py"]
    command = [*map(str, [*program, *two]), "--workers", "2"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for name in ("out{}", "no{}"):
        one, two = (tmp_path / name.format(workers) for workers in (1, 2))
        assert one.read_bytes() == two.read_bytes() != b""


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--workers", "0"), "--workers is at least 1"),
        (("--min-length", "-1"), "--min-length is at least 0"),
        (("--javascript-below", "-1"), "--javascript-below is at least 0"),
        (("--language-below", "0"), "--language-below is at least 1"),
        (("--language", "english"), "none that can be detected"),
        (("--language", "any", "en"), "cannot both be meant"),
        (("--length-unit", "tokens"), "a tokenizer is named for counting tokens"),
        (("--tokenizer-type", "ByteTokenizer"), "a tokenizer is named for counting tokens"),
        (("--rejected", "out.jsonl"), "over another file of this run"),
    ],
)
def test_what_cannot_be_done_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a.jsonl", [{"text": ENGLISH}])
    with pytest.raises(ConfigError, match=problem) as raised:
        cleanup_dataset.main(["--input", "a.jsonl", "--output", "out.jsonl", *flags])
    assert raised.value.fix
    assert not list(tmp_path.glob("out*"))
