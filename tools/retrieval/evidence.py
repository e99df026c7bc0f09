"""The blocks of text that are searched: a table of passages, or the blocks of a corpus.

A table has lines `id <tab> text <tab> title` under a header, as those of DPR and REALM. A corpus is
cut as for the inverse cloze task, once through.
"""

import csv
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from megatron.checkpoint.files import store
from megatron.data.data_utils import DocumentSlice
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import description_digest
from megatron.data.orders.sentence_maps import build_block_map
from megatron.data.samples.ict_dataset import ICTRecipe, row_of_text, title_sizes
from megatron.data.samples.masking import MaskingVocabulary
from megatron.errors import DataError
from megatron.tokenizer.tokenizer import Tokenizer

_HEADER = ("id", "text", "title")


class EvidenceBlock(NamedTuple):
    """A block of text."""

    id: int
    text: str
    title: str | None


class Evidence(Protocol):
    """Blocks by their place in the source, each read when it is asked for."""

    def __len__(self) -> int: ...

    def id_of(self, place: int) -> int:
        """Return the id of the block at a place."""

    def block(self, place: int) -> EvidenceBlock:
        """Return the block at a place as text."""

    def tokens(self, place: int) -> list[int]:
        """Return the row of a block as its tower reads it, without padding."""

    def fingerprint(self) -> str:
        """Return a digest of all that decides the rows."""


class RowMaker:
    """Makes rows of text for a tower; counts those that are cut."""

    def __init__(self, tokenizer: Tokenizer, seq_length: int) -> None:
        self.vocabulary = MaskingVocabulary.of(tokenizer)
        self._tokenizer, self.seq_length = tokenizer, seq_length
        self.cut = 0

    def row(self, text: str, title: str | None = None) -> list[int]:
        """Return CLS, the title and SEP if there is one, as much of the text as fits, SEP."""
        words = self._tokenizer.tokenize(text)
        opening = None if title is None else self._tokenizer.tokenize(title)
        row, is_cut = row_of_text(self.vocabulary, words, opening, self.seq_length)
        self.cut += is_cut
        return row


class EvidenceTable:
    """The passages of a table.

    Raises:
        DataError: it cannot be read, a line has other columns, an id is no number or stands twice.
    """

    def __init__(self, path: Path, rows: RowMaker) -> None:
        self.path, self.rows = path, rows
        self._blocks = list(_read_table(path))
        seen: set[int] = set()
        for block in self._blocks:
            if block.id in seen:
                raise DataError(
                    "two blocks have the same id",
                    found=f"{path}: {block.id}",
                    fix="give each line an id of its own",
                )
            seen.add(block.id)
        if not self._blocks:
            raise DataError(
                "there are no blocks to search",
                found=f"{path} has no line below its header",
                fix="give a table with lines of id, text and title",
            )

    def __len__(self) -> int:
        return len(self._blocks)

    def id_of(self, place: int) -> int:
        """Return the id of the block at a place."""
        return self._blocks[place].id

    def block(self, place: int) -> EvidenceBlock:
        """Return the block at a place as text."""
        return self._blocks[place]

    def tokens(self, place: int) -> list[int]:
        """Return the row of a block as its tower reads it, without padding."""
        block = self._blocks[place]
        return self.rows.row(block.text, block.title)

    def fingerprint(self) -> str:
        """Return a digest of the table's content and the length of rows."""
        _, table = store.digest_of(self.path)
        return description_digest({"table": table, "seq_length": self.rows.seq_length, "recipe": 1})


class CorpusBlocks:
    """The blocks of a corpus of sentences, cut as for the inverse cloze task; ids are numbers.

    Raises:
        DataError: the corpus gives no block, or the titles are not its own.
    """

    def __init__(
        self,
        indexed: MMapIndexedDataset,
        titles: MMapIndexedDataset | None,
        recipe: ICTRecipe,
        tokenizer: Tokenizer,
    ) -> None:
        self._indexed, self._titles, self._recipe = indexed, titles, recipe
        self._tokenizer = tokenizer
        documents = DocumentSlice(name="evidence", start=0, stop=len(indexed.doc_idx) - 1)
        rule = recipe.rule(sys.maxsize)
        sizes = title_sizes(indexed, titles, documents, rule.max_tokens)
        once = replace(rule, num_epochs=1)
        found = build_block_map(indexed.doc_idx, indexed.sizes, sizes, once).astype(np.int64)
        self._blocks = found[np.argsort(found[:, 3])]

    def __len__(self) -> int:
        return len(self._blocks)

    def id_of(self, place: int) -> int:
        """Return the number of a block."""
        return int(self._blocks[place][3])

    def block(self, place: int) -> EvidenceBlock:
        """Return a block as text."""
        words, title = self._words(place)
        text = self._tokenizer.detokenize(words)
        return EvidenceBlock(
            self.id_of(place), text, None if title is None else self._tokenizer.detokenize(title)
        )

    def tokens(self, place: int) -> list[int]:
        """Return the row of a block as its tower reads it, without padding."""
        words, title = self._words(place)
        row, _ = row_of_text(self._recipe.vocabulary, words, title, self._recipe.seq_length)
        return row

    def fingerprint(self) -> str:
        """Return a digest of the corpus, its titles and the length of rows."""
        titles = "none" if self._titles is None else self._titles.fingerprint()
        return description_digest(
            {
                "corpus": self._indexed.fingerprint(),
                "titles": titles,
                "seq_length": self._recipe.seq_length,
                "one_sentence": self._recipe.one_sentence_documents,
                "recipe": 1,
            }
        )

    def _words(self, place: int) -> tuple[list[int], list[int] | None]:
        start, stop, document, _ = self._blocks[place].tolist()
        words = [
            token
            for sentence in range(start, stop)
            for token in self._indexed.get(sentence).tolist()
        ]
        return words, None if self._titles is None else self._titles.get(document).tolist()


def block_shares(count: int, ranks: int) -> Sequence[range]:
    """Return the blocks of each rank: in order, as equally many as possible."""
    return [range(count * rank // ranks, count * (rank + 1) // ranks) for rank in range(ranks)]


def _read_table(path: Path) -> Iterator[EvidenceBlock]:
    csv.field_size_limit(1 << 30)
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.reader(file, delimiter="\t")
            for fields in reader:
                if reader.line_num == 1 and tuple(fields) == _HEADER:
                    continue
                yield _block(path, reader.line_num, fields)
    except OSError as error:
        raise DataError(
            "the table of evidence cannot be read",
            found=f"{path}: {error.strerror or error}",
            fix="give a file with lines of id, text and title to --evidence-data-path",
        ) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            "the table of evidence is damaged",
            found=f"{path}: {error}",
            fix="write it again, in UTF-8 with tabs between columns",
        ) from error


def _block(path: Path, line: int, fields: Sequence[str]) -> EvidenceBlock:
    if len(fields) not in (2, 3) or not fields[0].isdecimal():
        shown = "\t".join(fields)[:80]
        raise DataError(
            "a line of the table of evidence is not an id, a text and a title",
            found=f"{path}, line {line}: {len(fields)} columns, {shown!r}",
            fix="write a number, a tab, the text, a tab and the title",
        )
    return EvidenceBlock(int(fields[0]), fields[1], fields[2] if len(fields) == 3 else None)
