"""Public files as the quality runs read them: books as documents, pairs and reviews in three parts.

Whether something is trained on or judged by is decided by a checksum of its source (an image, a
text), so no part depends on the order of a file, and nothing that shares a source is in two parts.
"""

import json
import re
import zlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from megatron.errors import DataError
from megatron.tokenizer.sentences import split_sentences
from tasks.text_files import read_text

Row = TypeVar("Row")

DOCUMENT_CHARACTERS = 4000  # paragraphs are joined up to this length
_FEWEST_WORDS = 6  # of a sentence of a novel that is asked for
_START = re.compile(r"^\*\*\* ?START OF TH.*$", re.MULTILINE)
_END = re.compile(r"^\*\*\* ?END OF TH.*$", re.MULTILINE)


class Parts(NamedTuple, Generic[Row]):
    """Rows for training, for choosing the best epoch, and for testing."""

    train: list[Row]
    valid: list[Row]
    test: list[Row]


def documents_of_book(text: str, *, keep_lines: bool = False) -> Iterator[str]:
    """Yield parts of a book of some pages each, without Project Gutenberg's header and footer.

    Args:
        keep_lines: leave the lines of a paragraph as they are, and a blank one between two.
    """
    parts = re.split(r"\n\s*\n", body_of_book(text))
    paragraphs = [part.strip() if keep_lines else " ".join(part.split()) for part in parts]
    between = "\n\n" if keep_lines else " "
    joined: list[str] = []
    for paragraph in filter(None, paragraphs):
        if joined and sum(map(len, joined)) + len(paragraph) > DOCUMENT_CHARACTERS:
            yield between.join(joined)
            joined = []
        joined.append(paragraph)
    if joined:
        yield between.join(joined)


def body_of_book(text: str) -> str:
    """Return a book without Project Gutenberg's header and footer."""
    start, end = _START.search(text), _END.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)]


def write_documents(
    files: Iterable[Path],
    target: Path,
    *,
    keep_lines: bool = False,
    without: Container[str] = frozenset(),
) -> int:
    """Write all books as JSON lines of {"text": ...}; return the number of documents.

    Args:
        without: documents that are left out.
    """
    found = [
        document
        for path in files
        for document in documents_of_book(read_text(path), keep_lines=keep_lines)
        if document not in without
    ]
    write_lines(target, ({"text": document} for document in found))
    return len(found)


def parts_by(rows: Iterable[Row], source: Callable[[Row], str]) -> Parts[Row]:
    """Split rows by source: odd CRC-32 for testing, every fifth of the others for choosing."""
    parts = Parts[Row]([], [], [])
    for row in rows:
        half, place = zlib.crc32(source(row).encode()) % 2, zlib.crc32(source(row).encode()) // 2
        part = parts.test if half else parts.valid if place % 5 == 0 else parts.train
        part.append(row)
    if not all(parts):
        raise DataError(
            "a part of the examples is empty",
            found=f"{len(parts.train)} to train on, {len(parts.valid)} to choose by, "
            f"{len(parts.test)} to judge by",
            fix="give more examples",
        )
    return parts


def snli_parts(path: Path) -> Parts[dict[str, Any]]:
    """Split SNLI's pairs; all pairs about one image, of any caption, are in the same part.

    Pairs that the annotators did not agree on are left out.
    """
    lines = read_text(path).splitlines()
    rows = [row for row in map(json.loads, lines) if row["gold_label"] != "-"]
    return parts_by(rows, image_of)


def image_of(pair: dict[str, Any]) -> str:
    """Return the image that the first sentence of an SNLI pair describes."""
    return str(pair["captionID"]).partition("#")[0]


def polarity_parts(favourable: Path, unfavourable: Path) -> Parts[tuple[str, str]]:
    """Split sentences of reviews as (sentence, "1" or "0"); equal ones are in the same part."""
    rows = [
        (" ".join(line.split()), label)
        for path, label in ((favourable, "1"), (unfavourable, "0"))
        for line in path.read_text(encoding="latin-1").splitlines()
        if line.strip()
    ]
    return parts_by(rows, lambda row: row[0])


def novel_parts(first: Path, second: Path) -> Parts[tuple[str, str, str]]:
    """Split sentences of two novels as (sentence, "1" for the first one or "0", document).

    All sentences of a document are in the same part. Short ones, of less than six words, are left
    out, and so are those that both novels have.
    """
    rows = [
        (sentence, label, document)
        for path, label in ((first, "1"), (second, "0"))
        for document in documents_of_book(read_text(path))
        for sentence in split_sentences(document)
        if len(sentence.split()) >= _FEWEST_WORDS
    ]
    novels: dict[str, set[str]] = {}
    for sentence, label, _ in rows:
        novels.setdefault(sentence, set()).add(label)
    return parts_by([row for row in rows if len(novels[row[0]]) == 1], lambda row: row[2])


def mixed(rows: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return sentences and labels in an order that only the sentences decide."""
    return sorted(rows, key=lambda row: (zlib.crc32(row[0].encode()), row))


def write_lines(target: Path, rows: Iterable[object]) -> None:
    """Write JSON lines."""
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_sst2(target: Path, rows: Sequence[tuple[str, str]]) -> None:
    """Write sentences and labels in the format of GLUE's SST-2."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{sentence}\t{label}\n" for sentence, label in rows]
    target.write_text("".join(["sentence\tlabel\n", *lines]), encoding="utf-8")
