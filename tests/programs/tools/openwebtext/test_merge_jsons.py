"""Files of JSON lines become one, in a stated order and byte for byte."""

import gzip
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from tools.openwebtext import merge_jsons


def test_files_come_in_the_order_given_and_folders_sorted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    (folder / "sub").mkdir(parents=True)
    (folder / "b.jsonl").write_bytes(b'{"text" : "3"}\r\n')
    (folder / "sub" / "c.json").write_bytes(b'{"text": "4"}')
    with gzip.open(folder / "a.jsonl.gz", "wb") as packed:
        packed.write(b'{"text": "1", "n": 1.50}\n\n{"text": "2"}')
    first = tmp_path / "z.jsonl"
    first.write_bytes(b'{"text": "0"}\n')
    output = folder / "all.jsonl"
    flags = ["--input", str(first), str(folder), "--output", str(output)]
    merge_jsons.main(flags)
    assert output.read_bytes() == (
        b'{"text": "0"}\n{"text": "1", "n": 1.50}\n{"text": "2"}\n{"text" : "3"}\n{"text": "4"}\n'
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("5 documents of 4 files")
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "1", "1"]
    # The second time the output would be read, too.
    with pytest.raises(ConfigError, match="over another file of this run"):
        merge_jsons.main([*flags, "--overwrite"])


def test_a_line_without_text_stops_it(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "1"}\n{"txt": "2"}\n')
    with pytest.raises(DataError, match="no key 'text'") as raised:
        merge_jsons.main(["--input", str(source), "--output", str(tmp_path / "out.jsonl")])
    assert f"{source}:2" in str(raised.value)
    assert not (tmp_path / "out.jsonl").exists()
