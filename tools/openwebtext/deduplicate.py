"""Drops documents that are nearly the same as an earlier one; the order of the others stays.

Documents that repeat each other are a group, of which the first is kept. What a reader would get
wrong: by default a document is compared with kept ones only, so a chain of small changes is cut
where its end no longer resembles its beginning; `--grouping linked` drops all of it but the first,
as Megatron's group_duplicate_url and remove_group_duplicates do. While this works, the input lies
uncompressed beside the output in a file without a name.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Self

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from megatron import atomic
from megatron.errors import ConfigError
from megatron.program import run_program
from tools.openwebtext.json_lines import (
    add_file_flags,
    check_outputs,
    json_line,
    json_line_files,
    line_of,
    require_rows,
)
from tools.openwebtext.near_duplicates import (
    Likeness,
    NearDuplicates,
    Shingles,
    SignedChunk,
    require_datasketch,
    shingles_of,
    sign_chunk,
)
from tools.preprocessing.documents import DocumentRow, TextRule, fields_of
from tools.preprocessing.encoding import encode_in_order, read_chunks
from tools.preprocessing.text_output import AtomicTextFile


class DuplicateGroups:
    """Documents by number in groups that can be joined; the first one names a group."""

    def __init__(self) -> None:
        self._toward_first = array("q")  # itself for the first of a group

    def add(self) -> int:
        """Add a document as a group of its own; return its number."""
        self._toward_first.append(len(self._toward_first))
        return len(self._toward_first) - 1

    def first(self, number: int) -> int:
        """Return the first document of the group of this document."""
        while (nearer := self._toward_first[number]) != number:
            self._toward_first[number] = self._toward_first[nearer]
            number = nearer
        return number

    def join(self, one: int, two: int) -> None:
        """Join the groups of two documents."""
        firsts = self.first(one), self.first(two)
        self._toward_first[max(firsts)] = min(firsts)

    def dropped(self) -> dict[int, list[int]]:
        """Return for each group of several documents the first, and the others in order."""
        found: dict[int, list[int]] = {}
        for number in range(len(self._toward_first)):
            first = self.first(number)
            if first != number:
                found.setdefault(first, []).append(number)
        return dict(sorted(found.items()))


class Spool:
    """All documents read so far, by number, in a temporary file that never outlives the process."""

    def __init__(self, output: Path, json_key: str) -> None:
        self._output, self._key = output, json_key
        self.places: list[tuple[Path, int]] = []  # file and line of each document
        self._ends = array("q", [0])
        self._flushed = 0

    def __enter__(self) -> Self:
        try:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=self._output.parent)
        except OSError as error:
            raise atomic.write_error(self._output, error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        # What is not written yet is not wanted any more: a full disk may refuse to take it.
        with contextlib.suppress(OSError):
            self._file.close()

    def append(self, path: Path, row: DocumentRow) -> None:
        """Add the next document."""
        data = line_of(row)
        self._write(data)
        self.places.append((path, row.line))
        self._ends.append(self._ends[-1] + len(data))

    def line(self, number: int) -> bytes:
        """Return the document as it was read."""
        start, end = self._ends[number], self._ends[number + 1]
        if end > self._flushed:
            self._write(None)
            self._flushed = self._ends[-1]
        return os.pread(self._file.fileno(), end - start, start)

    def text(self, number: int) -> str:
        """Return the text of the document."""
        path, line = self.places[number]
        return fields_of(path, DocumentRow(line, self.line(number)), [self._key])[0]

    def place(self, number: int) -> str:
        """Return the place of the document as FILE:LINE."""
        path, line = self.places[number]
        return f"{path}:{line}"

    def _write(self, data: bytes | None) -> None:
        try:
            if data is None:
                self._file.flush()
            else:
                self._file.write(data)
        except OSError as error:
            raise atomic.write_error(self._output, error) from error


def main(argv: list[str] | None = None) -> None:
    """Copy the first document of each group, and list the others."""
    args = _parse(argv)
    likeness = Likeness(args.threshold, args.num_hashes, args.seed)
    require_datasketch()  # a missing package shows before any work
    files = json_line_files(args.input)
    output, pairs = Path(args.output), Path(f"{args.output}.duplicates")
    listed = [Path(args.groups)] if args.groups else []
    check_outputs([output, pairs, *listed], files, overwrite=args.overwrite)
    sign = functools.partial(sign_chunk, likeness, args.json_key)
    chunks = read_chunks(files, TextRule("lines"), columns=[args.json_key])
    size = sum(path.stat().st_size for path in files)
    with (
        Spool(output, args.json_key) as spool,
        tqdm(total=size, unit="B", unit_scale=True, disable=not sys.stderr.isatty()) as bar,
        AtomicTextFile(output) as kept_file,
        AtomicTextFile(pairs) as pairs_file,
        contextlib.ExitStack() as more,
        contextlib.closing(encode_in_order(chunks, sign, workers=args.workers)) as signed,  # type: ignore[type-var]
    ):
        finder = _Finder(likeness, spool, linked=args.grouping == "linked")
        for found in signed:
            finder.add(found, pairs_file.write)
            bar.update(found.chunk.disk_bytes)
        total = len(spool.places)
        require_rows(total, args.input)
        dropped = finder.groups.dropped()
        gone = {number for numbers in dropped.values() for number in numbers}
        for number in range(total):
            if number not in gone:
                kept_file.write(spool.line(number))
        for path in listed:
            _write_groups(more.enter_context(AtomicTextFile(path)), dropped, spool)
    print(f"kept {total - len(gone)} of {total} documents in {output}")
    print(f"dropped {len(gone)} of {len(dropped)} groups; the pairs are listed in {pairs}")


class _Finder:
    """Finds the pairs, one document after the other."""

    def __init__(self, likeness: Likeness, spool: Spool, *, linked: bool) -> None:
        self._spool, self._linked, self._width = spool, linked, likeness.width
        self._known = NearDuplicates(likeness, self._shingles)
        self.groups = DuplicateGroups()

    def add(self, signed: SignedChunk, write_pair: Callable[[bytes], None]) -> None:
        """Compare each document of a chunk with those before it."""
        for row, signature in zip(signed.chunk.rows, signed.signatures):
            self._spool.append(signed.chunk.path, row)
            number = self.groups.add()
            for match in self._known.matches(
                signature,
                functools.partial(self._shingles, number),
                functools.partial(self._apart, number),
            ):
                self.groups.join(number, match.number)
                record = {
                    "dropped": self._spool.place(number),
                    "like": self._spool.place(match.number),
                    "similarity": f"{match.similarity:.3f}",
                }
                write_pair(json_line(record))
                if not self._linked:
                    break
            if self._linked or self.groups.first(number) == number:
                self._known.insert(number, signature)

    def _shingles(self, number: int) -> Shingles:
        return shingles_of(self._spool.text(number), self._width)

    def _apart(self, number: int, other: int) -> bool:
        """Return whether two documents are in different groups, and so have to be compared."""
        return self.groups.first(number) != self.groups.first(other)


def _write_groups(file: AtomicTextFile, groups: dict[int, list[int]], spool: Spool) -> None:
    for first, others in groups.items():
        record = {"kept": spool.place(first), "dropped": [spool.place(n) for n in others]}
        file.write(json_line(record))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deduplicate.py",
        description="Drop documents that nearly repeat an earlier one. OUTPUT.duplicates lists "
        "the pairs that were found.",
    )
    add_file_flags(parser)
    add = parser.add_argument
    add("--threshold", type=float, default=0.7, help="share of common shingles to drop at [0.7]")
    add(
        "--grouping",
        choices=("kept", "linked"),
        default="kept",
        help="drop what is like a kept document, or all of a chain of like documents but its "
        "first, as Megatron does [kept]",
    )
    add("--groups", metavar="FILE", help="lists each group: what is kept of it, what is dropped")
    add("--num-hashes", type=int, default=128, help="hashes per document that find pairs [128]")
    add("--seed", type=int, default=0, help="of the hash functions [0]")
    add("--workers", type=int, default=1, help="processes that hash; 1: no other process [1]")
    args = parser.parse_args(argv)
    if not 0 < args.threshold <= 1:
        raise ConfigError(
            "a similarity is above 0 and at most 1",
            found=f"--threshold {args.threshold}",
            fix="use --threshold 0.7",
        )
    if args.num_hashes < 16:
        raise ConfigError(
            "so few hashes find no pair reliably",
            found=f"--num-hashes {args.num_hashes}",
            fix="use --num-hashes 128",
        )
    if not 0 <= args.seed < 2**32:
        raise ConfigError(
            "a seed is a number of 32 bits", found=f"--seed {args.seed}", fix="use --seed 0"
        )
    if args.workers < 1:
        raise ConfigError(
            "--workers is a positive number", found=f"--workers {args.workers}", fix="use 1 or more"
        )
    return args


if __name__ == "__main__":
    run_program(main)
