"""The checksums `P.sums` of a corpus: one of every block of `P.bin`, and one of all of `P.idx`.

Computed while a corpus is written, or for a corpus of other tools by `adopt`. What a reader would
get wrong: the last 16 bytes are the *pair id*, a digest of all the rest, so it names this `.bin`
with this `.idx`. Blocks are verified by `token_file`, which reads them.
"""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import atomic
from megatron.data.corpus.paths import checksum_file_path, data_file_path, index_file_path
from megatron.errors import DataError

Buffer = bytes | bytearray | memoryview

# A block is read whole the first time that one of its tokens is wanted. With random samples of a
# few KiB a larger block makes the first pass over a slow disk slower, and a smaller one makes the
# table larger: 32 MiB per TiB of tokens.
BLOCK_BYTES = 256 * 2**10

_MAGIC = b"MVSUMS\x00\x00"
_VERSION = 1
# magic, version, bytes in a block, bytes in .bin, bytes in .idx, xxh3_128 of .idx
_HEADER = struct.Struct("<8sQQQQ16s")
_DIGEST_BYTES = 16
_READ_BYTES = 8 * 2**20


class CorpusChecksums(NamedTuple):
    """The checksums of a pair of files when it was written."""

    block_bytes: int
    data_bytes: int
    index_bytes: int
    index_digest: bytes  # xxh3_128 of all of .idx
    blocks: npt.NDArray[np.uint64]  # xxh3_64 of each block of .bin; the last may be short

    @property
    def pair_id(self) -> str:
        """32 hex digits for this .bin with this .idx: of equal bytes they are equal anywhere."""
        return xxhash.xxh3_128_hexdigest(_body(self))


class BlockHasher:
    """Checksums of consecutive blocks of bytes that arrive in any pieces."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._current = xxhash.xxh3_64()
        self._room = BLOCK_BYTES
        self._total_bytes = 0

    def update(self, data: Buffer) -> None:
        """Take the next bytes of the file."""
        view = memoryview(data).cast("B")
        self._total_bytes += len(view)
        while len(view) >= self._room:
            self._current.update(view[: self._room])
            view = view[self._room :]
            self._close_block()
        self._current.update(view)
        self._room -= len(view)

    def finish(self, index: "IndexHasher") -> CorpusChecksums:
        """Return the checksums of all updates, together with those of its index."""
        if self._room < BLOCK_BYTES:
            self._close_block()
        return CorpusChecksums(
            BLOCK_BYTES,
            self._total_bytes,
            index.total_bytes,
            index.digest(),
            np.array(self._blocks, "<u8"),
        )

    def _close_block(self) -> None:
        self._blocks.append(self._current.intdigest())
        self._current = xxhash.xxh3_64()
        self._room = BLOCK_BYTES


class IndexHasher:
    """A file to write an index to, which computes its digest."""

    def __init__(self, file: "IO[bytes] | None" = None) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.total_bytes = 0

    def write(self, data: Buffer) -> int:
        """Write to the underlying file, and update the digest."""
        count = len(memoryview(data).cast("B"))
        if self._file is not None:
            self._file.write(data)
        self._digest.update(data)
        self.total_bytes += count
        return count

    def digest(self) -> bytes:
        """Return the xxh3_128 of what was written."""
        return self._digest.digest()


def write_checksums(path: Path, checksums: CorpusChecksums) -> None:
    """Write `checksums` to `path` and force them to disk; naming the file is left to the caller."""
    body = _body(checksums)
    with open(path, "wb") as file:
        file.write(body)
        file.write(xxhash.xxh3_128_digest(body))
        file.flush()
        os.fsync(file.fileno())


def read_checksums(prefix: str) -> CorpusChecksums | None:
    """Return the checksums of `prefix`, or None; raises DataError for damaged ones."""
    path = checksum_file_path(prefix)
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"{error.strerror}") from error
    body, end = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(body) < _HEADER.size:
        raise _unusable(path, f"{len(content)} bytes; expected at least {_HEADER.size + 16}")
    magic, version, block_bytes, data_bytes, index_bytes, digest = _HEADER.unpack_from(body)
    if magic != _MAGIC or version != _VERSION:
        raise _unusable(path, f"{magic!r}, version {version}; expected {_MAGIC!r}, {_VERSION}")
    if xxhash.xxh3_128_digest(body) != end:
        raise _unusable(path, "bytes that are not those that were written")
    blocks = np.frombuffer(body, "<u8", offset=_HEADER.size)
    if len(blocks) != -(-data_bytes // block_bytes):
        raise _unusable(path, f"{len(blocks)} blocks for {data_bytes} bytes of tokens")
    return CorpusChecksums(block_bytes, data_bytes, index_bytes, digest, blocks)


class Digests(NamedTuple):
    """Digests that identify a corpus without reading it, as hex digits."""

    index_digest: str  # xxh3_128 of .idx
    pair_id: str


def recorded_digests(prefix: str) -> Digests | None:
    """Return the digests recorded in the checksums of `prefix`, or None; reads a few bytes.

    Does not compare them with the data. Raises DataError when the file cannot be read as checksums.
    """
    path = checksum_file_path(prefix)
    try:
        with open(path, "rb") as file:
            head = file.read(_HEADER.size)
            file.seek(-_DIGEST_BYTES, os.SEEK_END)
            pair = file.read(_DIGEST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, f"{error.strerror}") from error
    if len(head) < _HEADER.size or not head.startswith(_MAGIC):
        raise _unusable(path, f"{head[:8]!r}; expected {_MAGIC!r}")
    return Digests(_HEADER.unpack(head)[-1].hex(), pair.hex())


def digest_of_file(path: str) -> str:
    """Return the xxh3_128 of a whole file, as hex digits; DataError if it cannot be read."""
    digest = xxhash.xxh3_128()
    for piece in _pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def check_index(prefix: str, checksums: CorpusChecksums) -> None:
    """Raise DataError unless `P.idx` is, to the last byte, the one that the checksums are of."""
    path = index_file_path(prefix)
    hasher = IndexHasher()
    for piece in _pieces(path):
        hasher.write(piece)
    expected = (checksums.index_bytes, checksums.index_digest)
    if (hasher.total_bytes, hasher.digest()) != expected:
        raise DataError(
            f"the index is not the one that the checksums of its corpus are of: {path}",
            found=f"{hasher.total_bytes} bytes, xxh3_128 {hasher.digest().hex()}; expected "
            f"{expected[0]} bytes, {expected[1].hex()}",
            fix=f"copy {prefix}.idx, .bin and .sums again, all three from the same place",
        )


def adopt(prefix: str) -> CorpusChecksums:
    """Write `P.sums` for a corpus that has none, from its bytes as they are now.

    Raises DataError if there are checksums: new ones would hide any damage.
    """
    path = Path(checksum_file_path(prefix))
    if path.exists():
        raise DataError(
            f"the corpus {prefix} has checksums already",
            found=str(path),
            fix="verify it with tools/inspect_dataset.py --verify; remove the file first if the "
            "tokens were changed on purpose",
        )
    blocks, index = BlockHasher(), IndexHasher()
    for piece in _pieces(data_file_path(prefix)):
        blocks.update(piece)
    for piece in _pieces(index_file_path(prefix)):
        index.write(piece)
    checksums = blocks.finish(index)
    temporary = atomic.temporary_name(path)
    try:
        write_checksums(temporary, checksums)
        atomic.publish_file(temporary, path)
    except OSError as error:
        raise atomic.write_error(path, error) from error
    finally:
        temporary.unlink(missing_ok=True)
    return checksums


def _body(checksums: CorpusChecksums) -> bytes:
    head = _HEADER.pack(_MAGIC, _VERSION, *checksums[:4])
    return head + checksums.blocks.astype("<u8", copy=False).tobytes()


def _pieces(path: str) -> Iterator[bytes]:
    try:
        with open(path, "rb") as file:
            yield from iter(lambda: file.read(_READ_BYTES), b"")
    except OSError as error:
        raise DataError(
            f"cannot read {path}", found=f"{error.strerror}", fix="check the disk and permissions"
        ) from error


def _unusable(path: str, found: str) -> DataError:
    return DataError(
        f"the checksums of a corpus cannot be used: {path}",
        found=found,
        fix="copy it again with its corpus; or remove it, and the corpus is not verified",
    )
