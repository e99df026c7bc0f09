"""The digest of code differs where a file does, and nowhere else."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.preflight.source import digest_of_source, source_digests


def test_one_changed_byte_a_new_name_and_a_moved_border_are_other_code(tmp_path: Path) -> None:
    one, two = tmp_path / "a.py", tmp_path / "b" / "c.py"
    two.parent.mkdir()
    one.write_text("x = 1\n")
    two.write_text("y = 2\n")
    before = digest_of_source(tmp_path, [one, two])
    assert digest_of_source(tmp_path, [two, one]) == before
    assert len(before) == 16
    seen = {before}
    two.write_text("y = 3\n")
    seen.add(digest_of_source(tmp_path, [one, two]))
    two.write_text("y = 2\n")
    seen.add(digest_of_source(tmp_path, [one, two.rename(tmp_path / "b" / "d.py")]))
    (tmp_path / "b" / "d.py").rename(two)
    one.write_text("x = 1\ny")
    two.write_text(" = 2\n")
    seen.add(digest_of_source(tmp_path, [one, two]))
    assert len(seen) == 4


def test_the_program_is_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mine.py"
    digests = []
    for text in ("a = 1\n", "a = 2\n"):
        program.write_text(text)
        monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(__file__=str(program)))
        digests.append(source_digests())
    assert digests[0]["code of megatron"] == digests[1]["code of megatron"]
    assert digests[0]["code of the program"] != digests[1]["code of the program"]


def test_a_process_without_a_program_file_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace())
    assert source_digests()["code of the program"] == ""
