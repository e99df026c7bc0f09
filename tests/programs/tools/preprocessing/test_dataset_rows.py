"""Rows of datasets: by the package `datasets` where it is installed, by a stand-in everywhere."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

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


class FakeDataset:
    """A datasets.Dataset of a table that is JSON on disk."""

    def __init__(self, path: Path, table: Table) -> None:
        self._path, self._table = path, table
        self.num_rows = len(next(iter(table.values()), []))
        kinds = {True: "string", False: "int64"}
        self.features = {
            name: SimpleNamespace(dtype=kinds[all(isinstance(c, str | None) for c in cells)])
            for name, cells in table.items()
        }
        self.cache_files = [{"filename": str(path)}]

    def with_format(self, kind: None) -> "FakeDataset":
        return self

    def select_columns(self, names: list[str]) -> "FakeDataset":
        return FakeDataset(self._path, {name: self._table[name] for name in names})

    def __getitem__(self, rows: slice) -> Table:
        return {name: cells[rows] for name, cells in self._table.items()}


def fake_module() -> ModuleType:
    """The part of the package that is used; a saved dataset is one JSON file."""

    def load_from_disk(folder: str) -> Any:
        path = Path(folder, "rows.json")
        found = {name: FakeDataset(path, t) for name, t in json.loads(path.read_text()).items()}
        return found if (path.parent / "dataset_dict.json").exists() else found["train"]

    def load_dataset(name: str, config: Any = None, **given: Any) -> Any:
        if "data_files" not in given:
            raise ConnectionError("offline")
        path = Path(given["data_files"])
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        table = {key: [row[key] for row in rows] for key in rows[0]}
        return {"train": FakeDataset(path, table)}

    module = ModuleType("datasets")
    module.__dict__.update(
        load_from_disk=load_from_disk, load_dataset=load_dataset, config=SimpleNamespace()
    )
    return module


def save_fake(folder: Path, splits: dict[str, Table], *, as_dict: bool = True) -> Path:
    folder.mkdir(parents=True)
    (folder / ("dataset_dict.json" if as_dict else "dataset_info.json")).write_text("{}")
    (folder / "rows.json").write_text(json.dumps(splits))
    return folder


def save_real(folder: Path, splits: dict[str, Table], *, as_dict: bool = True) -> Path:
    module = importlib.import_module("datasets")
    found = {name: module.Dataset.from_dict(table) for name, table in splits.items()}
    (module.DatasetDict(found) if as_dict else found["train"]).save_to_disk(str(folder))
    return folder


def savers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What saves a dataset for the stand-in, then for the package where it is installed."""
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "datasets", fake_module())
        yield save_fake
    try:
        importlib.import_module("datasets")
    except ImportError:
        return
    yield save_real


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
    flags = ["--input", str(lines), "--output-prefix", str(tmp_path / "lines"), *BYTES]
    preprocess_data.main(flags)
    for save in savers(monkeypatch):
        name = save.__name__
        saved = save(tmp_path / name / "dict", {"train": TABLE, "test": {"text": ["x"]}})
        plain = save(tmp_path / name / "plain", {"train": TABLE}, as_dict=False)
        for number, given in enumerate((saved, plain, lines)):
            prefix = tmp_path / f"{name}{number}"
            words = ["--hf-dataset", str(given), "--output-prefix", str(prefix), *BYTES]
            preprocess_data.main([*words, "--hf-column", "text"])
            assert files_of(prefix) == files_of(tmp_path / "lines")


def test_the_rows_of_parts_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for save in savers(monkeypatch):
        saved = save(tmp_path / save.__name__, {"train": TABLE})
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
    for save in savers(monkeypatch):
        table: Table = {"texts": ["a"], "id": [1]}
        saved = save(tmp_path / save.__name__, {"one": table, "two": table})
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
        with pytest.raises(ConfigError, match="the name of the file does not say"):
            open_dataset(DatasetName(str(tmp_path / "a.xyz")), ["text"])


def test_a_missing_cell_is_a_bad_line_and_no_rows_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for save in savers(monkeypatch):
        folder = tmp_path / save.__name__
        saved = save(folder / "cells", {"train": {"text": ["a", None, "b"]}})
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


def test_rows_that_cannot_be_read_are_an_error_of_the_data(tmp_path: Path) -> None:
    class Broken(FakeDataset):
        def __getitem__(self, rows: slice) -> Table:
            raise OSError("Corrupted buffer")

    broken = Broken(tmp_path, {"text": ["a"]})
    source = dataset_rows.DatasetSource(DatasetName("x"), broken, ("text",), 0, 1, 1)
    with pytest.raises(DataError, match="rows of the dataset cannot be read") as caught:
        list(source.chunks(1))
    assert "x:train, rows 1 to 1: Corrupted buffer" in str(caught.value)


def test_a_dataset_without_rows_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", fake_module())
    with pytest.raises(DataError, match="the dataset has no rows"):
        open_dataset(DatasetName(str(save_fake(tmp_path / "d", {"train": {"text": []}}))), ["text"])


def test_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for save in savers(monkeypatch):
        with pytest.raises(DataError, match="nothing is downloaded here") as caught:
            open_dataset(DatasetName(f"nobody/none-{save.__name__}", split="train"), ["text"])
        assert "datasets.load_dataset('nobody/none" in str(caught.value)
        with pytest.raises(DataError, match="nothing is downloaded here"):
            open_dataset(DatasetName("nobody/none"), ["text"])
        config = importlib.import_module("datasets").config
        assert config.HF_HUB_OFFLINE
        assert config.HF_DATASETS_OFFLINE


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
