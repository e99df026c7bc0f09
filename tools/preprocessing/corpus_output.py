"""The corpora that one run of preprocessing writes, one per JSON key: all of them, or none.

Builders come into being with the first document, so a stretch of input without one writes nothing.
Parts written before are put together by `merge`, with the bytes that one run would have written.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from megatron.data.corpus.metadata import CorpusMetadata, ItemLevel, digests_of_files
from megatron.data.corpus.paths import corpus_files
from megatron.data.indexed_dataset import MMapIndexedDatasetBuilder, best_fitting_dtype
from megatron.tokenizer.tokenizer import Tokenizer
from tools.preprocessing.encoding import BAD_LINES_SHOWN, Column, EncodedChunk, EncodeSettings


@dataclass
class Totals:
    """Counts of the run so far; the lists have one entry per key."""

    items: list[int]
    tokens: list[int]
    unknown: list[int]
    documents: int = 0
    dropped: int = 0
    text_bytes: int = 0
    bad: int = 0
    bad_examples: list[str] = field(default_factory=list)

    @classmethod
    def zero(cls, keys: int) -> "Totals":
        """Return totals of nothing, under `keys` keys."""
        return cls([0] * keys, [0] * keys, [0] * keys)

    def add(self, encoded: EncodedChunk) -> None:
        """Count one more chunk."""
        columns = encoded.columns
        self.include(
            Totals(
                items=[len(column.sizes) for column in columns],
                tokens=[len(column.tokens) for column in columns],
                unknown=[column.unknown for column in columns],
                documents=len(columns[0].items),
                dropped=encoded.dropped,
                text_bytes=encoded.text_bytes,
                bad=encoded.bad,
                bad_examples=list(encoded.bad_examples),
            )
        )

    def include(self, other: "Totals") -> None:
        """Add the totals of a later part of the input."""
        for name in ("items", "tokens", "unknown"):
            both = zip(getattr(self, name), getattr(other, name))
            setattr(self, name, [one + two for one, two in both])
        for name in ("documents", "dropped", "text_bytes", "bad"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad_examples += other.bad_examples[: BAD_LINES_SHOWN - len(self.bad_examples)]

    def to_plain(self) -> dict[str, Any]:
        """Return JSON values; `Totals(**plain)` is the inverse."""
        return asdict(self)


class CorpusSet:
    """Writes the corpora `prefixes`, one per key; an unfinished one leaves no file."""

    def __init__(
        self, prefixes: Sequence[str], settings: EncodeSettings, tokenizer: Tokenizer
    ) -> None:
        self.totals = Totals.zero(len(prefixes))
        self._prefixes, self._settings, self._tokenizer = prefixes, settings, tokenizer
        self._builders: list[MMapIndexedDatasetBuilder] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def append(self, chunk: EncodedChunk) -> None:
        """Write the documents of a chunk under every key."""
        self.totals.add(chunk)
        if not chunk.columns[0].items:
            return
        for builder, column in zip(self._open(), chunk.columns):
            _append(builder, column)

    def merge(self, parts: Sequence[Sequence[str]]) -> None:
        """Append existing corpora; a part is one prefix per key."""
        for part in parts:
            for builder, prefix in zip(self._open(), part):
                builder.merge_file_(prefix)

    def finish(self) -> None:
        """Publish all outputs; if one fails, none remains."""
        finished: list[str] = []
        try:
            for builder in self._builders:
                builder.finalize()
                finished.append(builder.prefix)
        except BaseException:
            for prefix in finished:
                for path in corpus_files(prefix):
                    path.unlink(missing_ok=True)
            raise

    def _open(self) -> list[MMapIndexedDatasetBuilder]:
        if not self._builders:
            self._builders = [
                self._stack.enter_context(self._builder(prefix, key))
                for prefix, key in zip(self._prefixes, self._settings.keys)
            ]
        return self._builders

    def _builder(self, prefix: str, key: str) -> MMapIndexedDatasetBuilder:
        return MMapIndexedDatasetBuilder(
            prefix,
            best_fitting_dtype(self._tokenizer.vocab_size),
            metadata=sidecar_of(self._settings, self._tokenizer, key),
        )


def sidecar_of(settings: EncodeSettings, tokenizer: Tokenizer, key: str) -> CorpusMetadata:
    """Return the metadata of the corpus of `key` under these settings."""
    splits = settings.split_sentences
    by = settings.splitter.description(keep_newlines=settings.keep_newlines)
    return CorpusMetadata(
        tokenizer_type=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        eod=tokenizer.eod if settings.append_eod else None,
        level=ItemLevel.SENTENCE if splits else ItemLevel.DOCUMENT,
        json_key=key,
        tokenizer_files=digests_of_files(settings.tokenizer.files()),
        sentence_splitter=by if splits else "",
    )


def _append(builder: MMapIndexedDatasetBuilder, column: Column) -> None:
    start = item = 0
    for count in column.items:
        for size in column.sizes[item : item + count]:
            builder.add_item(column.tokens[start : start + size])
            start += size
        item += count
        builder.end_document()
