"""Parquet input: rows, columns and damage of files that pyarrow wrote."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet
import pytest

from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import ConfigError, DataError
from tools import preprocess_data
from tools.preprocessing.documents import DocumentFile, find_inputs
from tools.preprocessing.parquet_rows import parquet_rows

Table = dict[str, list[Any]]
BYTES = ("--tokenizer-type", "ByteTokenizer")


def write_table(path: Path, table: Table) -> Path:
    """Write the columns as a file of several groups of rows."""
    columns = {}
    for name, cells in table.items():
        column = arrow.array(cells)
        if arrow.types.is_binary(column.type):
            column = column.view(arrow.string())  # without a look at its bytes
        columns[name] = column
    pyarrow.parquet.write_table(arrow.table(columns), path, row_group_size=700)
    return path


def test_rows_come_in_order_with_their_numbers_and_the_share_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"text {n} \u00e9" for n in range(2500)]
    path = write_table(tmp_path / "a.parquet", {"id": list(range(2500)), "text": texts})
    source = DocumentFile(path)
    rows = list(source)
    assert [row.line for row in rows] == list(range(1, 2501))
    assert [json.loads(row.data) for row in rows] == [{"text": text} for text in texts]
    assert source.read_bytes == source.size_bytes
    shares = [share for _, share in parquet_rows(path, ["text"])]
    assert shares == sorted(shares)


def test_a_corpus_of_parquet_is_that_of_the_same_rows_as_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table: Table = {"q": ["q1", "", "q\u00e9"], "a": ["a1", "a2", "a3"], "n": [1, 2, 3]}
    lines = tmp_path / "a.jsonl"
    rows = [dict(zip(table, row)) for row in zip(*table.values())]
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path / "parquet"
    folder.mkdir()
    write_table(folder / "a.parquet", table)
    for source, name in ((lines, "json"), (folder, "parquet")):
        prefix = tmp_path / f"made_of_{name}"
        flags = ["--input", str(source), "--output-prefix", str(prefix), *BYTES]
        preprocess_data.main([*flags, "--json-keys", "q", "a"])
    for key in ("q", "a"):
        one, two = (
            MMapIndexedDataset(str(tmp_path / f"made_of_{name}_{key}_document"))
            for name in ("json", "parquet")
        )
        assert [item.tolist() for item in one] == [item.tolist() for item in two]


def test_a_missing_cell_and_bytes_that_are_no_text_are_bad_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "out"
    for name, cells in (("none", ["a", None]), ("bytes", [b"a", b"\xff"])):
        path = write_table(tmp_path / f"{name}.parquet", {"text": cells})
        words = ["--input", str(path), "--output-prefix", f"{prefix}{name}", *BYTES]
        with pytest.raises(DataError, match=r"not a string|not UTF-8") as caught:
            preprocess_data.main(words)
        assert f"{path}:2: " in str(caught.value)
        preprocess_data.main([*words, "--on-bad-line", "skip"])
        assert "skipped 1 bad lines" in capsys.readouterr().err


def test_columns_that_are_not_there_or_hold_no_text_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", {"texts": ["x"], "id": [1]})
    with pytest.raises(DataError, match="has no column 'text'") as caught:
        list(DocumentFile(path))
    assert "columns 'texts', 'id'" in str(caught.value)
    assert "use --json-keys texts" in str(caught.value)
    with pytest.raises(DataError, match="the column 'id' does not hold text") as caught:
        list(DocumentFile(path, columns=["id"]))
    assert "int64" in str(caught.value)


def test_a_damaged_file_and_a_giant_row_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "a.parquet", {"text": ["long " * 20]})
    with pytest.raises(DataError, match="larger than 40 bytes") as caught:
        list(DocumentFile(path, limit=40))
    assert f"{path}:1" in str(caught.value)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="damaged or was not copied whole"):
        list(DocumentFile(path))


def test_without_pyarrow_the_input_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    for given in (path, tmp_path):
        with pytest.raises(ConfigError, match="pyarrow, which is not installed") as caught:
            find_inputs([str(given)])
        assert "pip install pyarrow" in str(caught.value)
        assert str(path) in str(caught.value)
