"""An open `P.bin`: tokens by their place in it, each block verified before its first use.

Reads are `pread` on a held descriptor unless a mapping was asked for. What a reader would get
wrong: a mapping is faster and has no copy, but a file that is cut short under it ends the process
with SIGBUS, without a message; and blocks are verified through `pread` in either case.
"""

import mmap
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.data.compiled import built_module, is_current, warn_of_python_twin
from megatron.data.corpus.checksums import BLOCK_BYTES, CorpusChecksums
from megatron.data.corpus.index_file import Stamp, changed, open_to_read
from megatron.errors import DataError, MachineError

Tokens = npt.NDArray[np.integer]

_built = built_module("token_reader")
_INTERFACE = 1  # of csrc/data/token_reader.cpp
_MOST_DAMAGES_SHOWN = 8
_BLOCKS_PER_BEAT = 256  # 64 MiB: about a second of a slow disk


class DamagedBlock(NamedTuple):
    """A block with another checksum than when it was written."""

    start: int  # byte in the .bin
    stop: int
    found: int  # xxh3_64
    expected: int

    def __str__(self) -> str:
        return (
            f"bytes [{self.start}, {self.stop}) have xxh3_64 {self.found:016x}, "
            f"expected {self.expected:016x}"
        )


class TokenReader(Protocol):
    """Reads items end to end in compiled code."""

    def join(
        self, items: npt.NDArray[np.integer], start: int, stop: int, /
    ) -> npt.NDArray[np.int64] | None:
        """Return the tokens of `items`, of the first from `start` on and of the last before `stop`.

        A negative `stop` is the end. Returns None if items do not exist or were not verified, or if
        bytes cannot be read.
        """
        ...


class TokenFile:
    """The `.bin` at `path`, held open; closed with the object."""

    def __init__(self, path: str, *, mapped: bool = False) -> None:
        self.path = path
        self._descriptor = open_to_read(path)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        self.stamp = Stamp.of(os.fstat(self._descriptor))
        self._mapping: mmap.mmap | None = None
        if mapped:
            self._mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        self._checksums: CorpusChecksums | None = None
        self._verified: mmap.mmap | None = None

    def read(self, start: int, count: int, dtype: np.dtype[np.integer]) -> Tokens:
        """Return `count` tokens from byte `start` on: a copy, or a read-only view of the mapping.

        Raises DataError when the file is shorter than it was. Does not verify.
        """
        if count == 0:
            return np.empty(0, dtype)
        if self._mapping is not None:
            return np.frombuffer(self._mapping, dtype, count, start)
        tokens = np.empty(count, dtype)
        self._read_into(tokens, start)
        return tokens

    def reader(
        self,
        dtype: np.dtype[np.integer],
        sizes: npt.NDArray[np.int32],
        pointers: npt.NDArray[np.int64],
        *,
        only_verified: bool,
    ) -> TokenReader | None:
        """Return a compiled reader for items of `sizes` tokens at bytes `pointers`, or None.

        None if it was not built. With `only_verified` the reader returns None for items of blocks
        that were not compared since `expect`.
        """
        if not is_current(_built, _INTERFACE) or _built is None or sys.byteorder != "little":
            warn_of_python_twin("token_reader", _built)
            return None
        marks = self._verified if only_verified else None
        reader: TokenReader = _built.TokenReader(
            self, self._descriptor, self._mapping, dtype, sizes, pointers, marks, self._block_bytes
        )
        return reader

    def expect(self, checksums: CorpusChecksums) -> mmap.mmap:
        """Set the checksums that `verify` compares with; return the marks of compared blocks."""
        self._checksums = checksums
        # One byte for each block, 1 where it was verified. Shared memory: what a forked worker
        # verifies need not be verified again by the others.
        self._verified = mmap.mmap(-1, len(checksums.blocks))
        return self._verified

    def verify(self, start: int, stop: int) -> None:
        """Compare those blocks of bytes [start, stop) that were not yet; DataError if damaged."""
        if self._checksums is None or self._verified is None or start == stop:
            return
        for damage in self._damages(self._checksums, self._verified, self._blocks(start, stop)):
            raise self._damaged([damage])

    def is_verified(self, start: int, stop: int) -> bool:
        """Return whether every block that holds bytes of [start, stop) was compared."""
        if self._verified is None or start == stop:
            return self._verified is not None
        blocks = self._blocks(start, stop)
        return self._verified.find(b"\0", blocks.start, blocks.stop) == -1

    def verify_all(
        self, report_progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """Compare every block; raise one DataError that names the damaged ones.

        `report_progress` is called regularly with the bytes that were compared, and the total.
        """
        if self._checksums is None:
            return
        verified = self.expect(self._checksums)  # also blocks that were compared before
        blocks = range(len(self._checksums.blocks))
        damages: list[DamagedBlock] = []
        for first in blocks[::_BLOCKS_PER_BEAT]:
            piece = blocks[first : first + _BLOCKS_PER_BEAT]
            damages += self._damages(self._checksums, verified, piece)
            total = self._checksums.data_bytes
            report_progress(min(piece.stop * self._checksums.block_bytes, total), total)
        if damages:
            raise self._damaged(damages)

    @property
    def _block_bytes(self) -> int:
        return BLOCK_BYTES if self._checksums is None else self._checksums.block_bytes

    def _blocks(self, start: int, stop: int) -> range:
        return range(start // self._block_bytes, (stop - 1) // self._block_bytes + 1)

    def _damages(
        self, checksums: CorpusChecksums, verified: mmap.mmap, blocks: range
    ) -> Iterator[DamagedBlock]:
        """Verify those of `blocks` that were not verified yet, and mark the intact ones."""
        buffer = np.empty(checksums.block_bytes, np.uint8)
        for number in blocks:
            if verified[number]:
                continue
            start = number * checksums.block_bytes
            stop = min(start + checksums.block_bytes, checksums.data_bytes)
            block = buffer[: stop - start]
            self._read_into(block, start)
            found = xxhash.xxh3_64_intdigest(block.data)
            expected = int(checksums.blocks[number])
            if found == expected:
                verified[number] = 1
            else:
                yield DamagedBlock(start, stop, found, expected)

    def _read_into(self, tokens: Tokens, start: int) -> None:
        """Read into `tokens` from byte `start` on."""
        buffer = tokens.data
        done = self._read_some(buffer, start)
        while done < tokens.nbytes:
            done += self._read_some(buffer.cast("B")[done:], start + done)

    def _read_some(self, buffer: memoryview, start: int) -> int:
        try:
            got = os.preadv(self._descriptor, [buffer], start)
        except OSError as error:
            raise MachineError(
                f"cannot read {self.path} at byte {start}",
                found=f"{error.strerror} (errno {error.errno})",
                fix="check the disk or the network file system, then start again",
            ) from error
        if got == 0:
            raise changed(
                self.path,
                f"end of file at byte {start}, where {buffer.nbytes} more bytes were when it was "
                "opened",
            )
        return got

    def _damaged(self, damages: list[DamagedBlock]) -> DataError:
        shown = "; ".join(map(str, damages[:_MOST_DAMAGES_SHOWN]))
        more = len(damages) - _MOST_DAMAGES_SHOWN
        return DataError(
            f"the tokens are not those that were written: {self.path}",
            found=f"{shown}; and {more} more blocks" if more > 0 else shown,
            fix="copy the corpus again from its source, or make it again; a damaged disk is "
            "likely where the same file was good before",
        )
