"""Rows of datasets that the package `datasets` saved, and the errors of others."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from megatron.data.corpus.paths import corpus_files
from megatron.errors import ConfigError, DataError
from tools import preprocess_data
from tools.preprocessing import dataset_rows
from tools.preprocessing.dataset_rows import DatasetName, open_dataset

Table = dict[str, list[Any]]
TEXTS = [f"text {n} \u00e9" * (n % 3) for n in range(2500)]
TABLE: Table = {"id": list(range(2500)), "text": TEXTS, "title": [f"t{n}" for n in range(2500)]}
BYTES = ("--tokenizer-type", "ByteTokenizer", "--append-eod")


def save_dataset(folder: Path, splits: dict[str, Table], *, as_dict: bool = True) -> Path:
    """Save the splits as a dictionary of datasets, or the split `train` alone."""
    found = {name: datasets.Dataset.from_dict(table) for name, table in splits.items()}
    (datasets.DatasetDict(found) if as_dict else found["train"]).save_to_disk(str(folder))
    return folder


def write_lines(path: Path, table: Table) -> Path:
    rows = [dict(zip(table, row)) for row in zip(*table.values())]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def files_of(prefix: Path) -> list[bytes]:
    return [path.read_bytes() for path in corpus_files(f"{prefix}_text_document")]


def test_a_corpus_of_a_dataset_is_that_of_the_same_rows_as_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = write_lines(tmp_path / "rows.jsonl", TABLE)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    flags = ["--input", str(lines), "--output-prefix", str(tmp_path / "lines"), *BYTES]
    preprocess_data.main(flags)
    saved = save_dataset(tmp_path / "dict", {"train": TABLE, "test": {"text": ["x"]}})
    plain = save_dataset(tmp_path / "plain", {"train": TABLE}, as_dict=False)
    for number, given in enumerate((saved, plain, lines)):
        prefix = tmp_path / f"rows{number}"
        words = ["--hf-dataset", str(given), "--output-prefix", str(prefix), *BYTES]
        preprocess_data.main([*words, "--hf-column", "text"])
        assert files_of(prefix) == files_of(tmp_path / "lines")


def test_the_rows_of_parts_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_dataset(tmp_path / "saved", {"train": TABLE})
    whole = open_dataset(DatasetName(str(saved)), ["text", "title"])
    assert str(whole) == f"2500 rows of {saved}:train"
    rows = [row for chunk in whole.chunks(25) for row in chunk.rows]
    assert [row.line for row in rows] == list(range(1, 2501))
    assert json.loads(rows[7].data) == {"text": TEXTS[7], "title": "t7"}
    assert sum(chunk.disk_bytes for chunk in whole.chunks(25)) == whole.size
    true_size = sum(len(row.data) for row in rows)
    assert 0.8 < whole.size / true_size < 1.25  # an estimate of 64 rows
    for count in (1, 3, 7):
        parts = whole.split(count)
        assert len(parts) == count
        assert [row for part in parts for c in part.chunks(25) for row in c.rows] == rows
    assert len(whole.split(9000)) == 2500


def test_what_a_dataset_does_not_have_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: Table = {"texts": ["a"], "id": [1]}
    saved = save_dataset(tmp_path / "saved", {"one": table, "two": table})
    with pytest.raises(ConfigError, match="has no split 'train'") as caught:
        open_dataset(DatasetName(str(saved)), ["texts"])
    assert "has 'one', 'two'" in str(caught.value)
    name = DatasetName(str(saved), split="two")
    with pytest.raises(DataError, match="has no column 'text'") as caught:
        open_dataset(name, ["text"])
    assert "use --hf-column texts" in str(caught.value)
    with pytest.raises(DataError, match="the column 'id' does not hold text"):
        open_dataset(name, ["id"])
    (tmp_path / "a.xyz").write_text("x")
    with pytest.raises(ConfigError, match="the name of the file does not show"):
        open_dataset(DatasetName(str(tmp_path / "a.xyz")), ["text"])


def test_a_missing_cell_is_a_bad_line_and_no_rows_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "saved"
    saved = save_dataset(folder / "cells", {"train": {"text": ["a", None, "b"]}})
    words = ["--hf-dataset", str(saved), "--output-prefix", str(folder / "out"), *BYTES]
    with pytest.raises(DataError, match="is not a string") as caught:
        preprocess_data.main(words)
    assert f"{saved}:train:2: NoneType" in str(caught.value)
    preprocess_data.main([*words, "--on-bad-line", "skip"])
    assert "skipped 1 bad lines" in capsys.readouterr().err
    monkeypatch.setattr(dataset_rows, "MAX_DOCUMENT_BYTES", 5)
    with pytest.raises(DataError, match="one document is larger than 5 bytes"):
        preprocess_data.main([*words, "--overwrite"])
    monkeypatch.undo()


def test_rows_that_cannot_be_read_are_an_error_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = save_dataset(tmp_path / "saved", {"train": {"text": ["a"]}})
    source = open_dataset(DatasetName(str(saved)), ["text"])

    def broken(self: datasets.Dataset, rows: slice) -> Table:
        raise OSError("Corrupted buffer")

    monkeypatch.setattr(datasets.Dataset, "__getitem__", broken)
    with pytest.raises(DataError, match="rows of the dataset cannot be read") as caught:
        list(source.chunks(1))
    assert f"{saved}:train, rows 1 to 1: Corrupted buffer" in str(caught.value)


def test_a_dataset_without_rows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    text = datasets.Features({"text": datasets.Value("string")})
    empty = datasets.Dataset.from_dict({"text": []}, features=text)  # as of a name in the cache
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: empty)
    with pytest.raises(DataError, match="the dataset has no rows"):
        open_dataset(DatasetName("some/name"), ["text"])


def test_an_empty_dataset_that_was_saved_cannot_be_opened(tmp_path: Path) -> None:
    """The package itself fails on the folder that it writes of one."""
    text = datasets.Features({"text": datasets.Value("string")})
    datasets.Dataset.from_dict({"text": []}, features=text).save_to_disk(str(tmp_path / "empty"))
    with pytest.raises(DataError, match=r"cannot be opened|has no rows"):
        open_dataset(DatasetName(str(tmp_path / "empty")), ["text"])


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="nothing is downloaded here") as caught:
        open_dataset(DatasetName("nobody/none", split="train"), ["text"])
    assert "datasets.load_dataset('nobody/none" in str(caught.value)
    with pytest.raises(DataError, match="nothing is downloaded here"):
        open_dataset(DatasetName("nobody/none"), ["text"])
    assert datasets.config.HF_HUB_OFFLINE
    assert datasets.config.HF_DATASETS_OFFLINE


def test_without_the_package_the_way_to_get_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="package datasets, which is not installed") as caught:
        open_dataset(DatasetName("x", "config"), ["text"])
    assert "pip install datasets" in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((), "the text is either in files or in a dataset"),
        (("--hf-dataset", "x", "--input", "y"), "the text is either in files or in a dataset"),
        (("--input", "y", "--hf-split", "train"), "--hf-split is about a dataset"),
        (("--input", "y", "--hf-config", "en"), "--hf-config is about a dataset"),
    ],
)
def test_flags_of_files_and_of_datasets_are_not_mixed(
    tmp_path: Path, flags: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        preprocess_data.main([*flags, "--output-prefix", str(tmp_path / "out" / "x"), *BYTES])
    assert not (tmp_path / "out").exists()
