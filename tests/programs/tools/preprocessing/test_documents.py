"""Which documents input files hold, and the errors of files that hold something else."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron.errors import ConfigError, DataError
from tools.preprocessing.documents import (
    DocumentFile,
    DocumentRow,
    TextRule,
    fields_of,
    find_inputs,
    is_text,
    text_of,
)

PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstandard.ZstdCompressor().compress,
}


def rows(path: Path, rule: TextRule | None = None) -> list[tuple[int, str]]:
    return [(row.line, row.data.decode()) for row in DocumentFile(path, rule)]


@pytest.mark.parametrize("packing", PACKERS)
def test_packed_files_read_like_plain_ones(tmp_path: Path, packing: str) -> None:
    lines = "".join(json.dumps({"text": "x" * size}) + "\n" for size in range(3000))
    path = tmp_path / f"a.jsonl{packing}"
    path.write_bytes(PACKERS[packing](lines.encode()))
    source = DocumentFile(path)
    assert [row.data.decode() for row in source] == lines.splitlines(keepends=True)
    assert source.read_bytes == source.size_bytes == path.stat().st_size


@pytest.mark.parametrize("packing", [".gz", ".zst"])
def test_packed_parts_that_were_joined_are_all_read(tmp_path: Path, packing: str) -> None:
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(b"".join(PACKERS[packing](part) for part in (b"one\n", b"two\n", b"three")))
    assert rows(path, TextRule("lines")) == [(1, "one"), (2, "two"), (3, "three")]


@pytest.mark.parametrize("packing", [".gz", ".zst"])
@pytest.mark.parametrize("cut", [5, 20])
def test_a_packed_file_that_was_cut_short_is_refused(
    tmp_path: Path, packing: str, cut: int
) -> None:
    path = tmp_path / f"a.txt{packing}"
    path.write_bytes(PACKERS[packing](bytes(range(256)) * 40)[:-cut])
    with pytest.raises(DataError, match="damaged or was not copied whole") as caught:
        rows(path)
    assert str(path) in str(caught.value)


def test_a_file_with_a_wrong_suffix_is_refused_when_read(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(b"plain text")
    with pytest.raises(DataError, match="damaged"):
        rows(path)


TEXT = "\none\n\ntwo\n<|endoftext|>\n<|endoftext|>\r\n  three  \n\n"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (TextRule(), [(1, "one\n\ntwo"), (6, ""), (7, "  three  ")]),
        (TextRule(separator="---"), [(1, TEXT.strip("\n"))]),
        (TextRule("file"), [(1, TEXT)]),
        (TextRule("lines"), [(2, "one"), (4, "two"), (5, "<|endoftext|>"),
                             (6, "<|endoftext|>"), (7, "  three  ")]),
        (TextRule("paragraphs"), [(2, "one"),
                                  (4, "two\n<|endoftext|>\n<|endoftext|>\r\n  three  ")]),
    ],
)  # fmt: skip
def test_a_text_file_is_cut_as_the_rule_says(
    tmp_path: Path, rule: TextRule, expected: list[tuple[int, str]]
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.encode())
    assert rows(path, rule) == expected


def test_blank_lines_and_a_byte_order_mark_are_no_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n\n   \n{"text": "b"}')
    found = list(DocumentFile(path))
    assert [(row.line, fields_of(path, row, ["text"])) for row in found] == [(1, ["a"]), (4, ["b"])]


@pytest.mark.parametrize(("name", "line"), [("a.jsonl", 2), ("a.txt", 1)])
def test_an_enormous_document_is_refused(tmp_path: Path, name: str, line: int) -> None:
    path = tmp_path / name
    path.write_text("short\n" + ("long " if name == "a.jsonl" else "long\n") * 9 + "\n")
    with pytest.raises(DataError, match="one document is larger than 40 bytes") as caught:
        list(DocumentFile(path, limit=40))
    assert f"{path}:{line}" in str(caught.value)


def test_a_folder_is_read_in_sorted_order_with_its_subfolders(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "sub/c.json", ".hidden.txt", "README.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    inputs = find_inputs([str(tmp_path), str(tmp_path / "b.txt")])
    assert [path.name for path in inputs.files] == ["a.jsonl.gz", "b.txt", "c.json", "b.txt"]
    assert [path.name for path in inputs.passed_over] == ["README.md"]


def test_folders_behind_links_are_read_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "a.txt").write_text("x")
    given = tmp_path / "in"
    given.mkdir()
    (given / "own").mkdir()
    (given / "own" / "b.txt").write_text("x")
    for name in ("link1", "link2"):
        (given / name).symlink_to(tmp_path / "real")
    (given / "z").symlink_to(given / "own")
    inputs = find_inputs([str(given)])
    assert [str(path.relative_to(given)) for path in inputs.files] == ["link1/a.txt", "own/b.txt"]
    output = capsys.readouterr().err
    assert (
        f"passed over {given / 'link2'}: {tmp_path / 'real'} is read under another name" in output
    )
    assert f"passed over {given / 'z'}" in output


def test_links_that_lead_back_or_nowhere_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.txt").write_text("x")
    link = tmp_path / "a" / "b" / "up"
    link.symlink_to(tmp_path / "a")
    with pytest.raises(DataError, match="leads back to a folder that it is in") as caught:
        find_inputs([str(tmp_path)])
    assert f"{link} is {tmp_path / 'a'}" in str(caught.value)
    link.unlink()
    (tmp_path / "a" / "gone.jsonl").symlink_to(tmp_path / "none")
    with pytest.raises(DataError, match="a link to a file that does not exist") as caught:
        find_inputs([str(tmp_path)])
    assert f"gone.jsonl -> {tmp_path / 'none'}" in str(caught.value)


def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)  # root may read every folder
    with pytest.raises(DataError, match="an input folder cannot be read"):
        find_inputs([str(tmp_path)])


def test_inputs_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the input does not exist"):
        find_inputs([str(tmp_path / "none.txt")])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match="does not show its format"):
        find_inputs([str(tmp_path / "a.csv")])
    with pytest.raises(DataError, match="holds no file that can be read"):
        find_inputs([str(tmp_path)])


def test_only_text_names_are_text() -> None:
    assert is_text(Path("a.txt"))
    assert is_text(Path("a.txt.zst"))
    assert not is_text(Path("a.txt.jsonl.gz"))
    assert not is_text(Path("a.txt/b.jsonl"))


@pytest.mark.parametrize(
    ("line", "problem", "found"),
    [
        (b'{"text": ', "not valid JSON", "f.jsonl:7: Expecting value"),
        (b'["a"]', "not a JSON object", "f.jsonl:7: a list"),
        (b'{"txt": "a", "id": 1}', "has no key 'text'", "f.jsonl:7: keys 'txt', 'id'"),
        (b"{}", "has no key 'text'", "(none)"),
        (b'{"text": null}', "the value of 'text' is not a string", "f.jsonl:7: NoneType"),
        (b'{"text": "a\\ud800"}', "half of a surrogate pair", "\\ud800 at character 1"),
        (b'{"text": "\xff"}', "not UTF-8", "f.jsonl:7: byte 0xff"),
    ],
)
def test_a_bad_line_is_named_with_its_number(line: bytes, problem: str, found: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        fields_of(Path("f.jsonl"), DocumentRow(7, line), ["text"])
    assert found in str(caught.value)


def test_the_nearest_key_is_proposed() -> None:
    with pytest.raises(DataError, match="no key 'text'") as caught:
        fields_of(Path("f"), DocumentRow(1, b'{"id": "x", "txt": "a"}'), ["text"])
    assert "use --json-keys txt" in str(caught.value)


def test_bytes_that_are_no_text_are_named_with_their_own_line() -> None:
    with pytest.raises(DataError, match="not UTF-8") as caught:
        text_of(Path("f.txt"), DocumentRow(10, b"a\nb\n\xff"))
    assert "f.txt:12: byte 0xff" in str(caught.value)
