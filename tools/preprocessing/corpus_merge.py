"""Several corpora written as one, by one process or by all ranks at once: the same bytes.

Together, each rank writes its range of the one `.bin` at planned offsets, cut at borders of
checksum blocks, so that it has the checksums of what it wrote; the first rank adds the index and
publishes. What a reader would get wrong: ranges do not follow the inputs, so ranks have equal work
whatever the sizes of the inputs are. Whether inputs belong together is left to the caller.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megatron import atomic
from megatron.data.corpus.checksums import BLOCK_BYTES, BlockHasher, CorpusChecksums, IndexHasher
from megatron.data.corpus.metadata import CorpusMetadata
from megatron.data.corpus.paths import corpus_files, data_file_path
from megatron.data.corpus.publication import CorpusLayout, publish_corpus
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import DataError, MachineError
from tools.preprocessing.ranks import ToolRanks

METHODS = ("serial", "distributed")


class Merge(NamedTuple):
    """One corpus to write: its name, its inputs in order, and its sidecar."""

    output: str
    inputs: Sequence[str]
    metadata: CorpusMetadata | None


class MergePiece(NamedTuple):
    """Bytes [start, stop) of the `.bin` of input number `source`."""

    source: int
    start: int
    stop: int


def block_range(total_bytes: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the output bytes of `rank`: whole blocks, evenly divided."""
    blocks = -(-total_bytes // BLOCK_BYTES)
    first, last = (blocks * each // ranks * BLOCK_BYTES for each in (rank, rank + 1))
    return min(first, total_bytes), min(last, total_bytes)


def pieces_of(sizes: Sequence[int], start: int, stop: int) -> list[MergePiece]:
    """Return the pieces of output bytes [start, stop), for inputs of `sizes` bytes."""
    pieces = []
    for source, (first, last) in enumerate(pairwise(accumulate(sizes, initial=0))):
        begin, end = max(start, first), min(stop, last)
        if begin < end:
            pieces.append(MergePiece(source, begin - first, end - first))
    return pieces


def require_space_for_merge(output: str, wanted: int) -> None:
    """Raise MachineError if the disk of `output` has fewer than `wanted` bytes free."""
    free = shutil.disk_usage(Path(output).parent).free
    if free < wanted:
        raise MachineError(
            "the disk has no room for the merged corpus",
            found=f"{free} bytes free in {Path(output).parent}; it takes {wanted}",
            fix="make room, or choose an --output-prefix on another disk",
        )


def space_of(corpora: Sequence[MMapIndexedDataset]) -> int:
    """Return the bytes of the merged corpus, or a few more."""
    return sum(_Input.of(corpus).space for corpus in corpora)


def merge_on_ranks(
    ranks: ToolRanks,
    merges: Sequence[Merge],
    *,
    progress: Callable[[int], object] = lambda size: None,
) -> None:
    """Write every corpus of `merges`, each rank its range; either all appear or none.

    Every rank calls this; the inputs that the first rank is given count, so the others may give
    none. `progress` is called with the bytes that this rank wrote.
    """
    opened = [
        [_Input.of(MMapIndexedDataset(name)) for name in merge.inputs]
        for merge in merges
        if ranks.is_first
    ]
    temporaries: list[Path] = []
    finished: list[str] = []
    is_whole = False
    try:
        plan = None
        if ranks.is_first:
            _require_room_for_all(merges, opened)
            for merge, inputs in zip(merges, opened):
                temporaries.append(_created(merge.output, sum(each.size for each in inputs)))
            plan = [
                _Plan(str(path), merge.output, [_Part(*each[:3]) for each in inputs])
                for path, merge, inputs in zip(temporaries, merges, opened)
            ]
        for number, (temporary, output, parts) in enumerate(ranks.from_first("merge/plan", plan)):
            own = _Plan(temporary, output, [_Part(*part) for part in parts])
            blocks = _write_range(ranks, own, progress)
            found = ranks.gather_at_first(f"merge/blocks/{number}", blocks)
            if found is not None:
                hashes = np.frombuffer(bytes.fromhex("".join(found)), "<u8")
                _require_what_was_hashed(own, hashes, ranks.size)
                _publish(merges[number], opened[number], temporaries[number], hashes)
                finished.append(output)
        ranks.from_first("merge/end", True)
        is_whole = True
    finally:
        for path in temporaries:
            path.unlink(missing_ok=True)
        for prefix in finished if not is_whole else ():
            for path in corpus_files(prefix):
                path.unlink(missing_ok=True)


class _Input(NamedTuple):
    """The first rank's data about an input, without its open file: there may be thousands."""

    prefix: str
    size: int  # bytes of its tokens
    fingerprint: str
    dtype: "np.dtype[np.integer]"
    sizes: npt.NDArray[np.int32]
    doc_idx: npt.NDArray[np.int64]

    @classmethod
    def of(cls, corpus: MMapIndexedDataset) -> "_Input":
        size = corpus.num_tokens * corpus.dtype.itemsize
        arrays = (corpus.dtype, corpus.sizes, corpus.doc_idx)
        return cls(corpus.prefix, size, corpus.fingerprint(), *arrays)

    @property
    def space(self) -> int:
        """Bytes in the output: tokens, and the part of the index."""
        return self.size + 12 * len(self.sizes) + 8 * len(self.doc_idx)


class _Part(NamedTuple):
    """The data about an input that every rank needs."""

    prefix: str
    size: int
    fingerprint: str


class _Plan(NamedTuple):
    """The data about an output that every rank needs."""

    temporary: str
    output: str
    parts: list[_Part]

    @property
    def sizes(self) -> list[int]:
        return [part.size for part in self.parts]


def _require_room_for_all(merges: Sequence[Merge], opened: Sequence[Sequence[_Input]]) -> None:
    for merge in merges:
        Path(merge.output).parent.mkdir(parents=True, exist_ok=True)
    require_space_for_merge(
        merges[0].output, sum(each.space for inputs in opened for each in inputs)
    )


def _created(output: str, size: int) -> Path:
    """Return a temporary file of the output's full length, for every rank to write to."""
    path = Path(data_file_path(output))
    temporary = atomic.temporary_name(path)
    try:
        with temporary.open("xb") as file:
            file.truncate(size)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise atomic.write_error(path, error) from error
    return temporary


def _write_range(ranks: ToolRanks, plan: _Plan, progress: Callable[[int], object]) -> str:
    """Write this rank's bytes and sync them; return the checksums of its blocks as hex."""
    total = sum(plan.sizes)
    start, stop = block_range(total, ranks.rank, ranks.size)
    hasher = BlockHasher()
    try:
        descriptor = os.open(plan.temporary, os.O_WRONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DataError(
            "a rank does not see the file that all ranks write",
            found=f"rank {ranks.rank}: {plan.temporary}: {error.strerror}",
            fix="put --output-prefix on a file system that all machines share, or use "
            "--merge serial",
        ) from error
    try:
        at = start
        for piece in pieces_of(plan.sizes, start, stop):
            corpus = _opened_as_planned(ranks, plan.parts[piece.source])
            for data in corpus.pieces(piece.start, piece.stop):
                hasher.update(data)
                _write_at(descriptor, data, at)
                at += len(data)
                progress(len(data))
                ranks.check()
            corpus.check_unchanged()
        os.fsync(descriptor)
    except OSError as error:
        raise atomic.write_error(Path(data_file_path(plan.output)), error) from error
    finally:
        os.close(descriptor)
    return hasher.finish(IndexHasher()).blocks.tobytes().hex()


def _opened_as_planned(ranks: ToolRanks, part: _Part) -> MMapIndexedDataset:
    corpus = MMapIndexedDataset(part.prefix)
    if corpus.fingerprint() != part.fingerprint:
        raise DataError(
            "ranks see different corpora under one name",
            found=f"{corpus.prefix} has other items on rank {ranks.rank} than on rank 0",
            fix="put the inputs on a file system that all machines share, and leave them alone",
        )
    return corpus


def _write_at(descriptor: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):  # a disk that fills up takes a part first, and nothing after it
        done += os.pwrite(descriptor, data[done:], start + done)


def _require_what_was_hashed(plan: _Plan, hashes: npt.NDArray[np.uint64], num_ranks: int) -> None:
    """Check the length, and the blocks at the borders between ranks.

    A file system that caches whole pages for each machine may lose one side of such a border.
    """
    total = sum(plan.sizes)
    ranges = [block_range(total, rank, num_ranks) for rank in range(num_ranks)]
    ends = [at for start, stop in ranges if start < stop for at in (start, stop - 1)]
    blocks = {at // BLOCK_BYTES for at in ends}
    with open(plan.temporary, "rb") as file:
        wrong = [block for block in sorted(blocks) if _hash(file, block) != int(hashes[block])]
        found = os.fstat(file.fileno()).st_size
    if wrong or found != total:
        raise MachineError(
            "what the ranks wrote into one file is not what it holds",
            found=f"{plan.output}.bin: {found} of {total} bytes, {len(wrong)} wrong blocks",
            fix="use --merge serial: the file system may not take writes of several machines to "
            "one file",
        )


def _hash(file: BinaryIO, block: int) -> int:
    file.seek(block * BLOCK_BYTES)
    return xxhash.xxh3_64_intdigest(file.read(BLOCK_BYTES))


def _publish(
    merge: Merge, inputs: Sequence[_Input], temporary: Path, hashes: npt.NDArray[np.uint64]
) -> None:
    firsts = accumulate((len(each.sizes) for each in inputs), initial=0)
    borders = [each.doc_idx[1:] + first for each, first in zip(inputs, firsts)]

    def checksums(index: IndexHasher) -> CorpusChecksums:
        total = sum(each.size for each in inputs)
        return CorpusChecksums(BLOCK_BYTES, total, index.total_bytes, index.digest(), hashes)

    publish_corpus(
        merge.output,
        temporary,
        layout=CorpusLayout(
            inputs[0].dtype,
            np.concatenate([each.sizes for each in inputs]),
            np.concatenate([np.zeros(1, np.int64), *borders]),
        ),
        checksums=checksums,
        metadata=merge.metadata,
    )
