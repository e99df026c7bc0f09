"""Which documents input files hold, and what is said about files that hold something else."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from megatron.errors import ConfigError, DataError
from tools.documents import (
    DocumentFile,
    Row,
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


def test_inputs_that_cannot_be_read_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the input does not exist"):
        find_inputs([str(tmp_path / "none.txt")])
    (tmp_path / "a.csv").write_text("x")
    with pytest.raises(ConfigError, match="does not say what is in it"):
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
        fields_of(Path("f.jsonl"), Row(7, line), ["text"])
    assert found in str(caught.value)


def test_the_nearest_key_is_proposed() -> None:
    with pytest.raises(DataError, match="no key 'text'") as caught:
        fields_of(Path("f"), Row(1, b'{"id": "x", "txt": "a"}'), ["text"])
    assert "use --json-keys txt" in str(caught.value)


def test_bytes_that_are_no_text_are_named_with_their_own_line() -> None:
    with pytest.raises(DataError, match="not UTF-8") as caught:
        text_of(Path("f.txt"), Row(10, b"a\nb\n\xff"))
    assert "f.txt:12: byte 0xff" in str(caught.value)
