"""The corpus format of Megatron: `P.idx` (sizes, offsets) and `P.bin` (tokens), read and written.

Opening checks every number of the index against the length of both files, and the index against its
checksum, so a damaged or mismatched pair is refused before the first token is read. What a reader
would get wrong: an *item* is an entry of `sizes`; a *document* is a range of items in `doc_idx`;
GPT corpora have one item per document. `token_file` reads the bytes.
"""

import contextlib
import itertools
import mmap
import operator
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, SupportsIndex, overload

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import atomic, log
from megatron.config.data import DataIntegrity
from megatron.data.corpus.checksums import (
    BlockHasher,
    check_index,
    read_checksums,
)
from megatron.data.corpus.index_file import Stamp, changed, damaged, index_code_of
from megatron.data.corpus.legacy_index import read_any_index
from megatron.data.corpus.metadata import (
    CorpusMetadata,
    metadata_file_path,
    read_metadata,
)
from megatron.data.corpus.paths import (
    both_files_exist,
    checksum_file_path,
    data_file_path,
    index_file_path,
    refuse_suffix,
    require_regular_file,
)
from megatron.data.corpus.publication import CorpusLayout, publish_corpus
from megatron.data.corpus.token_file import TokenFile, TokenReader, Tokens
from megatron.data.corpus.verification_progress import (
    ReportProgress,
    VerificationProgress,
    no_progress,
)
from megatron.errors import DataError

__all__ = [
    "MMapIndexedDataset",
    "MMapIndexedDatasetBuilder",
    "best_fitting_dtype",
    "data_file_path",
    "index_file_path",
    "make_builder",
]

_COPY_BYTES = 8 * 2**20
_BYTE = np.dtype(np.uint8)
_LARGEST_ITEM = np.iinfo(np.int32).max  # sizes are int32 in the format


def best_fitting_dtype(vocab_size: int | None = None) -> type[np.uint16] | type[np.int32]:
    """Return the token type that Megatron's tools choose for a vocabulary: uint16 below 65500 ids.

    The threshold is 65500 and not 65536 for the sake of corpora that exist; the builder checks
    every id against the type anyway.
    """
    return np.uint16 if vocab_size is not None and vocab_size < 65500 else np.int32


class MMapIndexedDataset:
    """A corpus of token sequences, read by item number; checked whole when it is opened.

    `integrity` selects how much is compared with the checksums of the corpus; a corpus without any
    is read after one warning. `mapped` reads through a mapping: faster, without a copy, but a file
    that is cut short under it ends the process with SIGBUS. `report_progress` gets the progress of
    a verification of everything (`full`). Raises DataError when the pair of files is missing,
    damaged, or not one corpus.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        *,
        integrity: DataIntegrity = DataIntegrity.TOUCHED,
        mapped: bool = False,
        report_progress: ReportProgress = no_progress,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.integrity, self.mapped = integrity, mapped
        refuse_suffix(self.prefix)
        for path in (index_file_path(self.prefix), data_file_path(self.prefix)):
            require_regular_file(self.prefix, path)
        index = read_any_index(index_file_path(self.prefix))
        self.dtype = index.dtype
        self.sizes = index.sizes  # int32 [items], tokens per item
        self.doc_idx = index.doc_idx  # int64 [documents + 1], first item of each document
        self.modes = index.modes  # int8 [items] in corpora of several modes, else None
        self.num_tokens = int(self.sizes.sum(dtype=np.int64))
        self._pointers = index.pointers
        self._index_stamp = index.stamp
        self._file = TokenFile(data_file_path(self.prefix), mapped=mapped)
        self._check_length_of_data()
        self.metadata: CorpusMetadata | None = read_metadata(self.prefix)
        self._check_counts_of_metadata()
        self._seen: mmap.mmap | None = None  # 1 for each item of which every block was verified
        if integrity is not DataIntegrity.OFF:
            self._check_integrity(report_progress)
        self._reader = self._compiled_reader()

    @staticmethod
    def exists(prefix: str) -> bool:
        """Return whether both files of the corpus `prefix` exist."""
        return both_files_exist(prefix)

    def __len__(self) -> int:
        return len(self.sizes)

    def __repr__(self) -> str:
        return (
            f"MMapIndexedDataset({self.prefix!r}: {len(self)} items, {self.num_tokens} tokens, "
            f"{self.dtype.name})"
        )

    @overload
    def __getitem__(self, index: SupportsIndex) -> Tokens: ...

    @overload
    def __getitem__(self, index: slice) -> list[Tokens]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> Tokens | list[Tokens]:
        """Return the tokens of an item, or of each item of a slice: copies or mapped views."""
        if isinstance(index, slice):
            return [self.get(item) for item in range(*index.indices(len(self)))]
        return self.get(index)

    def __iter__(self) -> Iterator[Tokens]:
        return (self.get(item) for item in range(len(self)))

    def get(self, idx: SupportsIndex, offset: int = 0, length: int | None = None) -> Tokens:
        """Return `length` tokens of item `idx` from `offset` on; to its end without a length.

        Raises IndexError outside the item: nothing is cut short and no index counts from the end.
        """
        item = operator.index(idx)
        if not 0 <= item < len(self.sizes):
            raise IndexError(f"item {item} of {self.prefix}, which has {len(self)} items")
        size = self.sizes.item(item)
        count = size - offset if length is None else length
        if offset < 0 or count < 0 or offset + count > size:
            raise IndexError(
                f"tokens [{offset}, {offset + count}) of item {item} of {self.prefix}, "
                f"which has {size} tokens"
            )
        start: int = self._pointers.item(item) + offset * self.dtype.itemsize
        if self._seen is not None and not self._seen[item]:
            self._verify(item, start, start + count * self.dtype.itemsize)
        return self._file.read(start, count, self.dtype)

    def join(
        self, items: npt.NDArray[np.integer], start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of `items` end to end, widened: [tokens].

        The first item counts from token `start` on, and the last up to token `stop`. Raises
        IndexError like `get`.
        """
        if self._reader is not None:
            tokens = self._reader.join(items, start, -1 if stop is None else stop)
            if tokens is not None:
                return tokens
        return self._join_with_python(items, start, stop)

    def verify(self, report_progress: ReportProgress = no_progress) -> None:
        """Compare every byte with the checksums; DataError names the damaged blocks.

        Does nothing without checksums, or if `integrity` is off. `report_progress` is called after
        each piece with what is being done.
        """
        self._file.verify_all(VerificationProgress(self._file.path, report_progress))
        self._seen = None
        self._reader = self._compiled_reader()

    def pieces(self, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        """Yield bytes [start, stop) of all tokens in order, verified like single items."""
        end = self._file.stamp.size_bytes if stop is None else stop
        for first in range(start, end, _COPY_BYTES):
            last = min(first + _COPY_BYTES, end)
            if self._seen is not None:
                self._file.verify(first, last)
            yield self._file.read(first, last - first, _BYTE).data

    def fingerprint(self) -> str:
        """Return 32 hex digits that change with the sizes, the documents and the files' lengths.

        The tokens themselves are not read, so this costs one pass over the index.
        """
        digest = xxhash.xxh3_128()
        digest.update(f"{self.dtype.str} {len(self)} {self._file.stamp.size_bytes}".encode())
        digest.update(self.sizes.view(np.uint8).data)
        digest.update(self.doc_idx.view(np.uint8).data)
        return digest.hexdigest()

    def check_unchanged(self) -> None:
        """Raise DataError if either file was touched or replaced since it was opened."""
        for path, before in (
            (index_file_path(self.prefix), self._index_stamp),
            (data_file_path(self.prefix), self._file.stamp),
        ):
            try:
                now = Stamp.of(os.stat(path))
            except OSError as error:
                raise changed(path, f"{error.strerror}") from error
            if now != before:
                raise changed(path, f"at opening {before}, now {now}")

    def __getstate__(self) -> dict[str, object]:
        # Another process of this job need not read everything again to use it.
        full = self.integrity is DataIntegrity.FULL
        return {
            "prefix": self.prefix,
            "fingerprint": self.fingerprint(),
            "integrity": DataIntegrity.TOUCHED if full else self.integrity,
            "mapped": self.mapped,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        MMapIndexedDataset.__init__(
            self, state["prefix"], integrity=state["integrity"], mapped=state["mapped"]
        )
        if self.fingerprint() != state["fingerprint"]:
            raise changed(self.prefix, "another index than the process that sent this dataset has")

    def _compiled_reader(self) -> TokenReader | None:
        verifies = self._seen is not None
        return self._file.reader(self.dtype, self.sizes, self._pointers, only_verified=verifies)

    def _join_with_python(
        self, items: npt.NDArray[np.integer], start: int, stop: int | None
    ) -> npt.NDArray[np.int64]:
        """Join tokens in Python: the twin of the compiled reader, with verification and errors."""
        parts: list[Tokens] = []
        for place, item in enumerate(items.tolist()):
            begin = start if place == 0 else 0
            end = stop if place == len(items) - 1 else None
            parts.append(self.get(item, begin, None if end is None else end - begin))
        return np.concatenate(parts, dtype=np.int64) if parts else np.empty(0, np.int64)

    def _check_integrity(self, report_progress: ReportProgress) -> None:
        checksums = read_checksums(self.prefix)
        if checksums is None:
            log.warning_once(
                f"unverified {self.prefix}",
                f"{self.prefix} has no checksums: its lengths and its index are consistent, but "
                "changed tokens and files exchanged for others of the same lengths cannot be "
                "found (tools/inspect_dataset.py --write-sidecar adds checksums)",
            )
            return
        if self.metadata is not None and self.metadata.pair_id not in ("", checksums.pair_id):
            raise damaged(
                checksum_file_path(self.prefix),
                "the checksums and the sidecar are of different corpora",
                expected=f"pair id {self.metadata.pair_id}, as in the sidecar",
                found=checksums.pair_id,
                fix=f"copy all files {self.prefix}.* again from one place",
            )
        check_index(self.prefix, checksums)
        self._file.expect(checksums)
        if self.integrity is DataIntegrity.FULL:
            self.verify(report_progress)
        elif self.integrity is DataIntegrity.TOUCHED:
            # Checked for each read, so it is one byte per item. Shared by forked workers.
            self._seen = mmap.mmap(-1, len(self))

    def _verify(self, item: int, start: int, stop: int) -> None:
        """Verify bytes [start, stop) of an item with a block that was not verified yet."""
        first: int = self._pointers.item(item)
        last = first + self.sizes.item(item) * self.dtype.itemsize
        if not self._file.is_verified(first, last):
            self._file.verify(start, stop)
            if not self._file.is_verified(first, last):
                return  # a long item: its next read verifies again
        if self._seen is not None:
            self._seen[item] = 1

    def _check_length_of_data(self) -> None:
        expected = self.num_tokens * self.dtype.itemsize
        if self._file.stamp.size_bytes != expected:
            raise damaged(
                data_file_path(self.prefix),
                "the token file has another length than its index says",
                expected=f"{expected} bytes ({self.num_tokens} {self.dtype.name} tokens)",
                found=f"{self._file.stamp.size_bytes} bytes",
                fix="copy both files again: one was cut short, or they are of different corpora",
            )

    def _check_counts_of_metadata(self) -> None:
        if self.metadata is None:
            return
        recorded = (self.metadata.num_items, self.metadata.num_documents, self.metadata.num_tokens)
        found = (len(self), len(self.doc_idx) - 1, self.num_tokens)
        if recorded != found:
            raise damaged(
                metadata_file_path(self.prefix),
                "the sidecar describes another corpus",
                expected=f"(items, documents, tokens) {recorded}",
                found=found,
                fix=f"remove it, or copy the one that belongs to {self.prefix}.bin",
            )


class MMapIndexedDatasetBuilder:
    """Writes one corpus item by item; memory grows by 4 bytes per item and 8 per document.

    As a context manager it finalizes when the block ends and leaves nothing when the block fails.
    """

    def __init__(
        self,
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike = np.int32,
        *,
        metadata: CorpusMetadata | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype: np.dtype[np.integer] = np.dtype(dtype).newbyteorder("<")  # type: ignore[assignment]  # code_of
        index_code_of(self.dtype)  # refuses a type without a code before anything is written
        self._metadata = metadata
        self._sizes = array("i")
        self._doc_idx = array("q", [0])
        self._num_tokens = 0
        self._blocks = BlockHasher()
        self._data_path = Path(data_file_path(self.prefix))
        self._index_path = Path(index_file_path(self.prefix))
        self._refuse_bad_prefix()
        self._temporary = atomic.temporary_name(self._data_path)
        try:
            self._file = open(self._temporary, "wb")  # noqa: SIM115  # closed by _discard
        except OSError as error:
            raise atomic.write_error(self._data_path, error) from error
        self._discard = weakref.finalize(self, _discard, self._file, self._temporary, os.getpid())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None and self._discard.alive:
                self.finalize()
        finally:
            self._discard()

    def add_item(self, tokens: Sequence[int] | npt.ArrayLike) -> None:
        """Append one item (a document, or a sentence of one).

        Raises DataError if an id does not fit the token type: a plain cast would wrap it.
        """
        ids = _as_token_array(tokens)
        limits = np.iinfo(self.dtype)
        if len(ids) and (int(ids.min()) < limits.min or int(ids.max()) > limits.max):
            raise DataError(
                f"a token id does not fit the type of the corpus {self.prefix}",
                found=f"ids {ids.min()}..{ids.max()} in item {len(self._sizes)}; "
                f"{self.dtype.name} holds {limits.min}..{limits.max}",
                fix="build with the dtype of best_fitting_dtype(size of the vocabulary with every "
                "added token)",
            )
        if len(ids) > _LARGEST_ITEM:
            raise DataError(
                "an item is longer than the format can store",
                found=f"{len(ids)} tokens; at most {_LARGEST_ITEM}",
                fix="split the document",
            )
        self._write(ids.astype(self.dtype, copy=False).tobytes())
        self._sizes.append(len(ids))
        self._num_tokens += len(ids)

    def end_document(self) -> None:
        """Close the current document: the items since the last call are one document."""
        self._doc_idx.append(len(self._sizes))

    def add_document(
        self, tokens: Sequence[int] | npt.ArrayLike, lengths: Sequence[int] | None = None
    ) -> None:
        """Append a whole document: one item, or one item per length in `lengths`."""
        ids = _as_token_array(tokens)
        borders = np.cumsum([0, *(lengths if lengths is not None else [len(ids)])])
        if borders[-1] != len(ids) or (np.diff(borders) < 0).any():
            raise DataError(
                "the lengths of a document's items do not add up to its tokens",
                found=f"lengths {list(lengths or [])}, {len(ids)} tokens",
                fix="pass one length per sentence, of the tokens in the order given",
            )
        for start, stop in itertools.pairwise(borders):
            self.add_item(ids[start:stop])
        self.end_document()

    def merge_file_(self, prefix: str) -> None:
        """Append all items and documents of the corpus `prefix`, verified while they are copied."""
        if Path(prefix).resolve() == Path(self.prefix).resolve():
            raise DataError(
                "a merge may not read the corpus that it writes",
                found=prefix,
                fix="give the merged corpus a name of its own",
            )
        other = MMapIndexedDataset(prefix)
        if other.dtype != self.dtype:
            raise DataError(
                "corpora of different token types cannot be merged",
                found=f"{prefix} has {other.dtype.name}, {self.prefix} has {self.dtype.name}",
                fix="preprocess both with the same tokenizer",
            )
        self._require_closed_document()
        offset = len(self._sizes)
        for piece in other.pieces():
            self._write(piece)
        other.check_unchanged()
        self._sizes.frombytes(other.sizes.tobytes())
        self._doc_idx.frombytes((other.doc_idx[1:] + offset).tobytes())
        self._num_tokens += other.num_tokens

    def finalize(self) -> None:
        """Write the index, force both files to disk and rename them to their final names."""
        if not self._discard.alive:
            raise DataError(
                f"the corpus {self.prefix} is already finished or given up",
                fix="make a new builder",
            )
        if self._num_tokens == 0:
            raise DataError(
                f"the corpus {self.prefix} would hold nothing",
                found=f"{len(self._sizes)} items without a token",
                fix="check that the input has text under the key that was asked for",
            )
        self._require_closed_document()
        try:
            try:
                _sync_and_close(self._file)
            except OSError as error:
                raise atomic.write_error(self._data_path, error) from error
            publish_corpus(
                self.prefix,
                self._temporary,
                layout=CorpusLayout(
                    self.dtype,
                    np.frombuffer(self._sizes, np.int32),
                    np.frombuffer(self._doc_idx, np.int64),
                ),
                checksums=self._blocks.finish,
                metadata=self._metadata,
            )
        finally:
            self._discard()

    def _refuse_bad_prefix(self) -> None:
        refuse_suffix(self.prefix)
        if not self._data_path.parent.is_dir():
            raise DataError(
                f"the folder of the corpus {self.prefix} does not exist",
                found=str(self._data_path.parent),
                fix=f"mkdir -p {self._data_path.parent}",
            )

    def _require_closed_document(self) -> None:
        if self._doc_idx[-1] != len(self._sizes):
            raise DataError(
                f"the last document of {self.prefix} was never closed",
                found=f"{len(self._sizes) - self._doc_idx[-1]} items after the last end_document()",
                fix="call end_document() after the items of each document",
            )

    def _write(self, data: bytes | memoryview) -> None:
        self._blocks.update(data)
        try:
            self._file.write(data)
        except OSError as error:
            self._discard()
            raise atomic.write_error(self._data_path, error) from error


def make_builder(
    prefix: str, *, vocab_size: int | None, metadata: CorpusMetadata | None = None
) -> MMapIndexedDatasetBuilder:
    """Return a builder with the token dtype that Megatron chooses for `vocab_size` ids."""
    return MMapIndexedDatasetBuilder(prefix, best_fitting_dtype(vocab_size), metadata=metadata)


def _as_token_array(tokens: Sequence[int] | npt.ArrayLike) -> npt.NDArray[np.integer]:
    array = np.asarray(tokens)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(
            "tokens are a flat sequence of integers",
            found=f"shape {array.shape}, type {array.dtype}",
            fix="pass the list of ids of one item",
        )
    return array


def _sync_and_close(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()


def _discard(file: BinaryIO, temporary: Path, owner: int) -> None:
    """Close and remove the unpublished files; does nothing after a publication."""
    if os.getpid() != owner:
        return  # a forked child dropped its copy of the builder; the file is the parent's
    with contextlib.suppress(OSError):  # a full disk refuses the last buffer
        file.close()
    temporary.unlink(missing_ok=True)
