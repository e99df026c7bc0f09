"""The last step of every writer of a corpus: index, checksums and sidecar, then the names.

What a reader would get wrong: the token file has to be on disk, whole and closed, before this is
called; and no moment may show new tokens with an old index, so the old index is removed first and
the new one appears last.
"""

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron import atomic
from megatron.data.corpus.checksums import CorpusChecksums, IndexHasher, write_checksums
from megatron.data.corpus.index_file import write_index
from megatron.data.corpus.metadata import CorpusMetadata, write_metadata
from megatron.data.corpus.paths import (
    checksum_file_path,
    corpus_files,
    data_file_path,
    index_file_path,
)


class CorpusLayout(NamedTuple):
    """The sizes and documents in the index of a new corpus."""

    dtype: "np.dtype[np.integer]"
    sizes: npt.NDArray[np.int32]  # tokens of each item
    doc_idx: npt.NDArray[np.int64]  # first item of each document, and the number of items


def publish_corpus(
    prefix: str,
    temporary: Path,
    *,
    layout: CorpusLayout,
    checksums: Callable[[IndexHasher], CorpusChecksums],
    metadata: CorpusMetadata | None,
) -> None:
    """Make the token file `temporary` the corpus `prefix`: all of its files appear, or none.

    `checksums` returns the checksums of the tokens and of the index as written; the counts of
    `metadata` are filled in. Raises MachineError if something cannot be written; the caller then
    removes `temporary`.
    """
    data_path, index_path = Path(data_file_path(prefix)), Path(index_file_path(prefix))
    checksum_path = Path(checksum_file_path(prefix))
    new_index = atomic.temporary_name(index_path)
    new_checksums = atomic.temporary_name(checksum_path)
    unfinished: tuple[Path, ...] = ()  # the remains of a corpus without an index
    try:
        found = checksums(_write_index(new_index, layout))
        write_checksums(new_checksums, found)
        for path in corpus_files(prefix):
            if path != data_path:
                path.unlink(missing_ok=True)
        unfinished = corpus_files(prefix)
        atomic.publish_file(temporary, data_path)
        atomic.publish_file(new_checksums, checksum_path)
        if metadata is not None:
            write_metadata(prefix, _with_counts(metadata, layout, found.pair_id))
        atomic.publish_file(new_index, index_path)
        unfinished = ()
    except OSError as error:
        raise atomic.write_error(data_path, error) from error
    finally:
        new_index.unlink(missing_ok=True)
        new_checksums.unlink(missing_ok=True)
        for path in unfinished:
            path.unlink(missing_ok=True)


def _write_index(path: Path, layout: CorpusLayout) -> IndexHasher:
    with open(path, "wb") as file:
        hasher = IndexHasher(file)
        write_index(hasher, *layout)
        file.flush()
        os.fsync(file.fileno())
    return hasher


def _with_counts(metadata: CorpusMetadata, layout: CorpusLayout, pair_id: str) -> CorpusMetadata:
    return dataclasses.replace(
        metadata,
        num_items=len(layout.sizes),
        num_documents=len(layout.doc_idx) - 1,
        num_tokens=int(layout.sizes.sum(dtype=np.int64)),
        pair_id=pair_id,
    )
