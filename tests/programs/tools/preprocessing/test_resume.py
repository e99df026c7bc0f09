"""A run of preprocessing that is broken off goes on behind the parts that it finished."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.data.corpus.metadata import metadata_file_path
from megatron.errors import ConfigError, DataError
from tools import preprocess_data
from tools.preprocessing import resume
from tools.preprocessing.encoding import Chunk, EncodedChunk, EncodeSettings, encode_chunk
from tools.preprocessing.resume import partial_folder

TEXTS = [f"document {n}. Its end." * (n % 4) for n in range(120)]
FLAGS = ("--tokenizer-type", "ByteTokenizer", "--append-eod", "--chunk-size", "5")
KEYS = ("--json-keys", "q", "a")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "PART_BYTES", 1000)


def write_source(folder: Path) -> Path:
    """Two files, one of them with a long stretch of empty documents and a bad line."""
    for name, texts in (("1", TEXTS), ("2", ["", *[""] * 80, *TEXTS])):
        rows = [json.dumps({"q": text, "a": text and f"answer to {text}"}) for text in texts]
        (folder / f"{name}.jsonl").write_text("\n".join([*rows, '{"q": 5}', rows[-1], ""]))
    return folder


def preprocess(source: Path, prefix: Path, *flags: str) -> None:
    words = ["--input", str(source), "--output-prefix", str(prefix), "--on-bad-line", "skip"]
    preprocess_data.main([*words, *FLAGS, *KEYS, *flags])


class BrokenOffError(Exception):
    """What a run is broken off with."""


def encoding(monkeypatch: pytest.MonkeyPatch, *, fails_at: int | None) -> list[Chunk]:
    """The chunks that are encoded from now on; the one of number `fails_at` fails."""
    seen: list[Chunk] = []

    def encode(settings: EncodeSettings, chunk: Chunk) -> EncodedChunk:
        seen.append(chunk)
        if len(seen) == fails_at:
            raise BrokenOffError
        return encode_chunk(settings, chunk)

    monkeypatch.setattr(preprocess_data, "encode_chunk", encode)
    return seen


def outputs(prefix: Path) -> Iterator[bytes]:
    for key in ("q", "a"):
        for suffix in (".bin", ".idx"):
            yield Path(f"{prefix}_{key}_document{suffix}").read_bytes()
        metadata = json.loads(Path(metadata_file_path(f"{prefix}_{key}_document")).read_text())
        yield json.dumps(metadata, sort_keys=True).encode()


def said(text: str) -> list[str]:
    """The summary without rates and names."""
    return [" ".join(line.split()) for line in text.splitlines() if line[:2] in ("q ", "a ", "dr")]


def test_a_run_in_parts_writes_what_a_run_in_one_go_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    preprocess(source, tmp_path / "plain")
    plain = capsys.readouterr()
    preprocess(source, tmp_path / "parts", "--resume")
    parts = capsys.readouterr()
    assert list(outputs(tmp_path / "parts")) == list(outputs(tmp_path / "plain"))
    assert said(parts.out) == said(plain.out)
    assert plain.err.count("skipped 2 bad lines") == parts.err.count("skipped 2 bad lines") == 1
    assert not partial_folder(str(tmp_path / "parts")).exists()


@pytest.mark.parametrize(
    "fails_at", [1, 30, *(pytest.param(at, marks=pytest.mark.wide) for at in (2, 7, 51))]
)
def test_a_run_that_was_broken_off_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails_at: int,
) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    preprocess(source, tmp_path / "plain")
    expected = said(capsys.readouterr().out)
    everything = encoding(monkeypatch, fails_at=None)
    preprocess(source, tmp_path / "other")
    capsys.readouterr()
    encoding(monkeypatch, fails_at=fails_at)
    with pytest.raises(BrokenOffError):
        preprocess(source, tmp_path / "parts", "--resume")
    folder = partial_folder(str(tmp_path / "parts"))
    assert [path.name for path in tmp_path.glob("parts*")] == [folder.name]
    journal = folder / "journal.json"
    parts = json.loads(journal.read_text())["parts"] if journal.exists() else []
    done = sum(part["chunks"] for part in parts)
    assert done >= fails_at - 12  # a part is a few chunks here
    again = encoding(monkeypatch, fails_at=None)
    preprocess(source, tmp_path / "parts", "--resume")
    assert again == everything[done:]
    assert list(outputs(tmp_path / "parts")) == list(outputs(tmp_path / "plain"))
    assert said(capsys.readouterr().out) == expected
    assert not folder.exists()


def test_a_failed_merge_keeps_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    corpora = preprocess_data.CorpusSet

    def fails(self: object, parts: object) -> None:
        raise BrokenOffError

    with monkeypatch.context() as patch:
        patch.setattr(corpora, "merge", fails)
        with pytest.raises(BrokenOffError):
            preprocess(source, tmp_path / "out", "--resume")
    again = encoding(monkeypatch, fails_at=1)
    preprocess(source, tmp_path / "out", "--resume")
    assert again == []


@pytest.mark.parametrize("change", ["flags", "input", "tokenizer"])
def test_parts_of_another_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    with monkeypatch.context() as patch:
        encoding(patch, fails_at=30)
        with pytest.raises(BrokenOffError):
            preprocess(source, tmp_path / "out", "--resume")
    flags = {
        "flags": ["--split-sentences"],
        "input": [],
        "tokenizer": ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
    }[change]
    if change == "input":
        with (source / "2.jsonl").open("a") as file:
            file.write("\n")
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), *FLAGS, *KEYS]
    words = [word for word in words if change != "tokenizer" or word != "--append-eod"]
    with pytest.raises(ConfigError, match="other input, tokenizer or flags") as caught:
        preprocess_data.main([*words, "--on-bad-line", "skip", *flags, "--resume"])
    assert str(partial_folder(str(tmp_path / "out"))) in str(caught.value)


def test_a_journal_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    folder = partial_folder(str(tmp_path / "out"))
    folder.mkdir()
    for text in ("{", "{}", '{"fingerprint": "x", "parts": [{"chunks": 1, "totals": {"a": 1}}]}'):
        (folder / "journal.json").write_text(text)
        with pytest.raises(ConfigError, match="the journal of an earlier run cannot be read"):
            preprocess(source, tmp_path / "out", "--resume")


def test_pieces_of_several_ranks_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    source = write_source(tmp_path / "in")
    folder = partial_folder(str(tmp_path / "out"))
    folder.mkdir()
    (folder / "plan.json").write_text("{}")
    with pytest.raises(ConfigError, match="are of a run on several ranks"):
        preprocess(source, tmp_path / "out", "--resume")
    assert (folder / "plan.json").exists()


def test_nothing_to_write_is_an_error_in_parts_too(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"q": "", "a": ""}\n')
    with pytest.raises(DataError, match="no document is left"):
        preprocess(source, tmp_path / "out", "--resume")
