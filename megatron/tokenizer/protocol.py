"""What every tokenizer can do, whatever file it came from.

`vocab_size` is the true size, one more than the highest id that `tokenize` or an added token can
give; the padding that tensor parallelism needs is `padded_vocab_size()`. An id that a tokenizer
does not have is `None`, never -1 and never 0. Reading the files is left to the other modules.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.errors import DataError

END_OF_TEXT = "<|endoftext|>"  # GPT-2's name for the end of a document


class Tokenizer(Protocol):
    """Turns text into ids below `vocab_size` and back."""

    @property
    def name(self) -> str:
        """The `--tokenizer-type` of this tokenizer."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included, padding not included."""

    @property
    def eod(self) -> int | None:
        """The id that ends a document."""

    @property
    def eod_note(self) -> str:
        """The source of `eod` or, where it is None, the names that were not found."""

    @property
    def pad(self) -> int | None:
        """The id that pads short rows."""

    @property
    def bos(self) -> int | None:
        """The id that begins a text, for models that need one."""

    @property
    def unk(self) -> int | None:
        """The id for text without a piece; a count of it is a count of lost text."""

    @property
    def cls(self) -> int | None:
        """BERT's [CLS]."""

    @property
    def sep(self) -> int | None:
        """BERT's [SEP]."""

    @property
    def mask(self) -> int | None:
        """BERT's [MASK]."""

    @property
    def extra_ids(self) -> tuple[int, ...]:
        """The sentinels <extra_id_0>, <extra_id_1>, ... that --vocab-extra-ids asked for."""

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of `text`, without a document end and without truncation."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return `tokenize` of each text, by the fastest available way."""

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; added tokens appear as their names."""

    def piece(self, token_id: int) -> str:
        """Return the spelling of one id in the vocabulary, for example `##ing`."""


@dataclass(frozen=True, kw_only=True)
class SpecialIds:
    """The ids of special tokens; see `Tokenizer` for each."""

    eod: int | None = None
    eod_note: str = ""
    pad: int | None = None
    bos: int | None = None
    unk: int | None = None
    cls: int | None = None
    sep: int | None = None
    mask: int | None = None
    extra_ids: tuple[int, ...] = ()


def extra_names(count: int) -> list[str]:
    """Return the names of T5's sentinels, as Megatron adds them for --vocab-extra-ids."""
    return [f"<extra_id_{index}>" for index in range(count)]


def checked_ids(ids: Iterable[int], vocab_size: int) -> list[int]:
    """Return the ids as a list of integers; an id outside of the vocabulary is an error."""
    checked = [int(token) for token in ids]
    for token in checked:
        if not 0 <= token < vocab_size:
            raise DataError(
                "there is a token id outside of the vocabulary",
                found=f"id {token}, and the vocabulary has {vocab_size}",
                fix="use the tokenizer that made these ids; rows of a padded vocabulary are not "
                "text, so do not sample them",
            )
    return checked


def existing_file(path: str | Path, flag: str) -> Path:
    """Return the path of a tokenizer file; an error names the flag if it is not a file."""
    found = Path(path)
    if not found.is_file():
        raise DataError(
            f"{flag} does not name a file",
            found=f"{flag} {path}" + (" (a folder)" if found.is_dir() else " (nothing there)"),
            fix=f"give {flag} the path of an existing file",
        )
    return found
