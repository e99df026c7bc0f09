"""Documents of several files get one numbering."""

from pathlib import Path

import pytest

from megatron.errors import DataError
from tests.support.documents import json_lines
from tools.openwebtext import add_id


def test_documents_are_numbered_in_the_order_of_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "b.jsonl").write_text('{"text": "3", "half": "\\ud800"}\n')
    (folder / "a.jsonl").write_text('{"text": "1"}\n\n{"text": "\\u00e9"}')
    output = tmp_path / "out.jsonl"
    add_id.main(["--input", str(folder), "--output", str(output), "--prefix", "web"])
    assert json_lines(output) == [
        {"id": "web-0000000001", "text": "1"},
        {"id": "web-0000000002", "text": "\u00e9"},
        {"id": "web-0000000003", "text": "3", "half": "\ud800"},
    ]
    assert "3 documents of 2 files" in capsys.readouterr().out


def test_an_id_that_is_there_is_not_replaced(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "1"}\n{"id": 7, "text": "2"}\n')
    flags = ["--input", str(source), "--output", str(tmp_path / "out.jsonl"), "--id-prefix", "web"]
    with pytest.raises(DataError, match="has a value under 'id' already") as raised:
        add_id.main(flags)
    assert raised.value.found == f"{source}:2: 7"
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    add_id.main([*flags, "--id-key", "adlr_id"])
    assert json_lines(tmp_path / "out.jsonl")[1] == {
        "adlr_id": "web-0000000002",
        "id": 7,
        "text": "2",
    }
