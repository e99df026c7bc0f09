"""Who writes which bytes of a merged corpus, and that they arrive."""

import itertools
import os
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.corpus.checksums import BLOCK_BYTES
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder
from megatron.errors import DataError, MachineError
from megatron.launch import Launch
from tests.unit.data.corpora import METADATA
from tools.preprocessing import corpus_merge
from tools.preprocessing.corpus_merge import Merge, block_range, merge_on_ranks, pieces_of
from tools.preprocessing.ranks import ToolRanks


@given(st.integers(0, 40 * BLOCK_BYTES), st.integers(1, 9))
def test_ranges_cover_every_byte_once_and_are_cut_at_blocks(total: int, ranks: int) -> None:
    ranges = [block_range(total, rank, ranks) for rank in range(ranks)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == total
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert stop == start
        assert start % BLOCK_BYTES == 0 or start == total
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= 2 * BLOCK_BYTES


@given(st.lists(st.integers(0, 9), max_size=8), st.data())
def test_pieces_are_the_bytes_of_the_inputs_in_order(sizes: list[int], data: st.DataObject) -> None:
    whole = [(source, at) for source, size in enumerate(sizes) for at in range(size)]
    start = data.draw(st.integers(0, len(whole)))
    stop = data.draw(st.integers(start, len(whole)))
    found = pieces_of(sizes, start, stop)
    assert [(p.source, at) for p in found for at in range(p.start, p.stop)] == whole[start:stop]


def write(prefix: Path, documents: list[int], dtype: type = np.uint16) -> str:
    """A corpus of documents of these lengths, each of two items."""
    with MMapIndexedDatasetBuilder(prefix, dtype, metadata=METADATA) as builder:
        for number, length in enumerate(documents):
            tokens = (np.arange(length) + number) % 5000
            builder.add_document(tokens, [length // 2, length - length // 2])
    return str(prefix)


def test_one_rank_writes_what_a_builder_writes(tmp_path: Path) -> None:
    lengths = [[400_000, 1], [3], [7] * 100, [BLOCK_BYTES]]
    parts = [write(tmp_path / str(number), each) for number, each in enumerate(lengths)]
    with MMapIndexedDatasetBuilder(tmp_path / "serial", np.uint16, metadata=METADATA) as builder:
        for part in parts:
            builder.merge_file_(part)
    seen: list[int] = []
    merge = Merge(str(tmp_path / "new" / "together"), parts, METADATA)
    merge_on_ranks(ToolRanks(Launch()), [merge], progress=seen.append)
    pairs = zip(corpus_files(str(tmp_path / "serial")), corpus_files(merge.output))
    assert all(one.read_bytes() == two.read_bytes() for one, two in pairs)
    assert sum(seen) == os.path.getsize(f"{merge.output}.bin")
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_a_failure_with_the_second_output_takes_the_first_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part", [5, 6])
    out = tmp_path / "out"
    merges = [Merge(str(out / name), [part, part], None) for name in ("a", "b")]
    publish = corpus_merge.publish_corpus

    def full(prefix: str, *given: object, **more: object) -> None:
        if prefix.endswith("b"):
            raise MachineError("no space left", fix="make room")
        publish(prefix, *given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus_merge, "publish_corpus", full)
    with pytest.raises(MachineError, match="no space left"):
        merge_on_ranks(ToolRanks(Launch()), merges)
    assert list(out.iterdir()) == []


def test_bytes_that_did_not_arrive_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part", [5, 6])
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: len(data))
    with pytest.raises(MachineError, match="is not what it holds") as caught:
        merge_on_ranks(ToolRanks(Launch()), [Merge(str(tmp_path / "out" / "a"), [part], None)])
    assert "22 of 22 bytes, 1 wrong blocks" in str(caught.value)
    assert list((tmp_path / "out").iterdir()) == []


def test_a_write_that_takes_only_a_part_is_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part", [500])
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:7], at))
    merge_on_ranks(ToolRanks(Launch()), [Merge(str(tmp_path / "out"), [part], METADATA)])
    for one, two in zip(corpus_files(part), corpus_files(str(tmp_path / "out"))):
        assert one.read_bytes() == two.read_bytes()


def test_no_room_and_a_folder_that_cannot_be_written_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = write(tmp_path / "part", [500])
    merge = Merge(str(tmp_path / "out" / "a"), [part], None)
    with monkeypatch.context() as patch:
        patch.setattr(corpus_merge.atomic, "temporary_name", lambda path: tmp_path / "no" / "x")
        with pytest.raises(MachineError, match=r"cannot write .*a\.bin"):
            merge_on_ranks(ToolRanks(Launch()), [merge])
    usage = namedtuple("usage", "total used free")  # shutil's own shape
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1000, 900, 100))
    with pytest.raises(MachineError, match="no room for the merged corpus"):
        merge_on_ranks(ToolRanks(Launch()), [merge])


def test_other_machines_that_see_other_files_are_refused(tmp_path: Path) -> None:
    part = corpus_merge._Part(write(tmp_path / "part", [500]), 1000, "another")
    plan = corpus_merge._Plan(str(tmp_path / "none"), str(tmp_path / "out"), [part])
    with pytest.raises(DataError, match="does not see the file that all ranks write"):
        corpus_merge._write_range(ToolRanks(Launch()), plan, print)
    (tmp_path / "there").write_bytes(b"")
    plan = plan._replace(temporary=str(tmp_path / "there"))
    with pytest.raises(DataError, match="ranks see different corpora under one name"):
        corpus_merge._write_range(ToolRanks(Launch()), plan, print)
