"""Files as a source: parts in order, and the values that distinguish inputs."""

import os
from pathlib import Path

from tools.preprocessing.documents import TextRule
from tools.preprocessing.sources import FileSource


def source(folder: Path, sizes: list[int]) -> FileSource:
    files = [folder / f"{number}.txt" for number in range(len(sizes))]
    for path, size in zip(files, sizes):
        path.write_bytes(b"x" * size)
    return FileSource(tuple(files), TextRule(), ("text",))


def test_every_file_has_one_part_and_the_order_stays(tmp_path: Path) -> None:
    whole = source(tmp_path, [5, 0, 100, 7, 7, 300, 1, 0, 50])
    assert (whole.size, str(whole)) == (470, "9 files")
    for count in (1, 2, 3, 20):
        parts = whole.split(count)
        assert 1 <= len(parts) <= count
        assert all(part.files for part in parts)
        assert tuple(path for part in parts for path in part.files) == whole.files
        assert sum(part.size for part in parts) == whole.size


def test_parts_of_equal_files_are_equal_and_of_empty_files_one(tmp_path: Path) -> None:
    assert [len(part.files) for part in source(tmp_path, [10] * 8).split(4)] == [2, 2, 2, 2]
    assert len(source(tmp_path, [0, 0]).split(4)) == 1


def test_the_chunks_of_the_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    whole = source(tmp_path, [5, 0, 100])
    rows = [row for part in whole.split(3) for chunk in part.chunks(2) for row in chunk.rows]
    assert rows == [row for chunk in whole.chunks(2) for row in chunk.rows]
    assert sum(chunk.disk_bytes for chunk in whole.chunks(1)) == whole.size


def test_another_size_time_or_rule_is_another_input(tmp_path: Path) -> None:
    one = source(tmp_path, [5, 6])
    before = one.identity(), one.identity(times=False)
    os.utime(one.files[0], ns=(1, 1))
    assert one.identity() != before[0]
    assert one.identity(times=False) == before[1]
    one.files[0].write_bytes(b"longer")
    assert one.identity(times=False) != before[1]
    other = FileSource(one.files, TextRule("lines"), ("text",))
    assert other.identity() != one.identity()
