"""The last step of a corpus: the files of a builder, or none."""

import errno
from pathlib import Path

import numpy as np
import pytest

from megatron import atomic
from megatron.data.corpus import publication
from megatron.data.corpus.checksums import BlockHasher
from megatron.data.corpus.metadata import read_metadata
from megatron.data.corpus.paths import corpus_files
from megatron.data.corpus.publication import CorpusLayout, publish_corpus
from megatron.data.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder
from megatron.errors import MachineError
from tests.unit.data.corpora import METADATA

TOKENS = np.arange(7, dtype=np.uint16)


def publish(prefix: Path) -> None:
    temporary = Path(f"{prefix}.tmp")
    temporary.write_bytes(TOKENS.tobytes())
    blocks = BlockHasher()
    blocks.update(TOKENS.tobytes())
    layout = CorpusLayout(TOKENS.dtype, np.array([3, 4], np.int32), np.array([0, 1, 2], np.int64))
    publish_corpus(
        str(prefix), temporary, layout=layout, checksums=blocks.finish, metadata=METADATA
    )


def test_the_files_are_those_of_a_builder(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    with MMapIndexedDatasetBuilder(tmp_path / "b", np.uint16, metadata=METADATA) as builder:
        builder.add_document(TOKENS[:3])
        builder.add_document(TOKENS[3:])
    for one, two in zip(corpus_files(str(tmp_path / "a")), corpus_files(str(tmp_path / "b"))):
        assert one.read_bytes() == two.read_bytes()
    metadata = read_metadata(str(tmp_path / "a"))
    assert metadata is not None
    assert (metadata.num_items, metadata.num_documents, metadata.num_tokens) == (2, 2, 7)
    assert len(list(tmp_path.iterdir())) == 8


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_disk_that_fills_up_leaves_no_file_of_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    publish(tmp_path / "a")
    published = 0
    rename = atomic.publish_file

    def full(temporary: Path, final: Path) -> None:
        nonlocal published
        if published == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        published += 1
        rename(temporary, final)

    monkeypatch.setattr(publication.atomic, "publish_file", full)
    with pytest.raises(MachineError, match=r"cannot write .*a\.(bin|meta\.json)"):
        publish(tmp_path / "a")
    left = [path.name for path in tmp_path.iterdir()]
    assert left == (["a.tmp"] if at == 0 else [])


def test_a_range_of_bytes_is_what_lies_there(tmp_path: Path) -> None:
    publish(tmp_path / "a")
    corpus = MMapIndexedDataset(str(tmp_path / "a"))
    for start, stop in ((0, 14), (3, 9), (4, 4), (13, 14)):
        found = b"".join(map(bytes, corpus.pieces(start, stop)))
        assert found == TOKENS.tobytes()[start:stop]
