"""Fill in the middle: documents cut in three, with the middle moved to the end (arXiv 2207.14255).

A document of a window keeps its length, so windows and the borders in them stay where they were:
the three marks take the place of its last three tokens. What a reader would get wrong: a document
that the window cuts off is treated like a whole one ("context-level" in the paper), so its marks
never stand without their parts.
"""

import difflib
import operator
from typing import NamedTuple, Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron.data.blendable_dataset import Sample, SampleDataset
from megatron.data.orders.index_cache import description_digest
from megatron.data.orders.sample_random import random_of_sample
from megatron.errors import ConfigError

_VERSION = 1  # of the draws below; part of the fingerprint
_MARKS = 3
_MIN_DOCUMENT_TOKENS = _MARKS + 1  # a document that has a token of its own left beside the marks


class FIMTokens(NamedTuple):
    """The ids of the three marks, in the order in which PSM writes them."""

    prefix: int
    suffix: int
    middle: int


class FIMTokenNames(NamedTuple):
    """How the vocabulary spells the three marks."""

    prefix: str = "<fim_prefix>"
    suffix: str = "<fim_suffix>"
    middle: str = "<fim_middle>"


class PieceVocabulary(Protocol):
    """The interface of a tokenizer for a search of tokens by name."""

    @property
    def vocab_size(self) -> int:
        """One more than the highest id."""

    def piece(self, token_id: int) -> str:
        """Return one id as the vocabulary spells it."""


def token_named(tokenizer: PieceVocabulary, name: str) -> int | None:
    """Return the id that the vocabulary spells `name`, or None."""
    ids = range(tokenizer.vocab_size)
    return next((token for token in ids if tokenizer.piece(token) == name), None)


def fim_tokens(tokenizer: PieceVocabulary, names: FIMTokenNames) -> FIMTokens:
    """Return the ids of the named tokens; raises ConfigError with similar ones if missing."""
    pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    ids = {piece: token for token, piece in enumerate(pieces)}
    missing = {
        f"--fim-{part}-token": name for part, name in names._asdict().items() if name not in ids
    }
    if missing:
        raise ConfigError(
            "the tokenizer does not have the tokens that mark what is to be filled in",
            found=", ".join(f"{flag} {name}" for flag, name in missing.items()),
            fix=_nearest(pieces, missing),
        )
    return FIMTokens(*(ids[name] for name in names))


def _nearest(pieces: list[str], missing: dict[str, str]) -> str:
    """Return tokens of the vocabulary that look like marks, or else how to get some."""
    marks = [piece for piece in pieces if piece[:1] in ("<", "[") and len(piece) > 1]
    near = {
        flag: difflib.get_close_matches(name, marks, n=1, cutoff=0.75)
        for flag, name in missing.items()
    }
    if all(near.values()) and len({found[0] for found in near.values()}) == len(near):
        return "use " + " ".join(f"{flag} '{found[0]}'" for flag, found in near.items())
    added = [f"<extra_id_{number}>" for number in range(_MARKS)]
    spelled = " ".join(f"{flag} '{name}'" for flag, name in zip(missing, added))
    if set(added) <= set(pieces):
        return f"use {spelled}"
    return (
        f"add --vocab-extra-ids {_MARKS} and use {spelled}, or name tokens of the vocabulary that "
        "no text holds"
    )


class FIMDataset:
    """`dataset` with a share `rate` of the documents of its samples rearranged.

    Of these, a share `spm_rate` is written suffix first (SPM: the marks of prefix and suffix, the
    suffix, the mark of the middle, prefix and middle), the others prefix first (PSM: each part
    behind its mark). The draws depend on `seed` and the number of the sample alone.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        tokens: FIMTokens,
        eod: int | None,
        rate: float,
        spm_rate: float = 0.5,
        seed: int,
    ) -> None:
        eod = checked_eod(tokens, eod, rate=rate, spm_rate=spm_rate)
        self.dataset, self.tokens, self.eod = dataset, tokens, eod
        self.rate, self.spm_rate, self.seed = rate, spm_rate, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index` of the dataset below, rearranged, of the same length."""
        i = operator.index(index)
        sample = self.dataset[i]
        if sample.keys() != {"text"}:
            raise ValueError(f"samples with {sorted(sample)} are no plain windows of text")
        rng = random_of_sample(self.seed, i, use="fim")
        text = sample["text"].copy()
        for start, stop in document_ranges(text, self.eod):
            # One draw per document, also for those that are too short: lengths move no draws.
            chosen = rng.random_sample() < self.rate
            if chosen and stop - start >= _MIN_DOCUMENT_TOKENS:
                text[start:stop] = fill_in_the_middle(
                    text[start:stop], self.tokens, spm_rate=self.spm_rate, rng=rng
                )
        return {"text": text}

    def fingerprint(self) -> str:
        """Return 32 hex digits that change with the dataset below and every parameter."""
        return description_digest(
            {
                "order": f"fim-{_VERSION}",
                "of": self.dataset.fingerprint(),
                "tokens": " ".join(map(str, (*self.tokens, self.eod))),
                "rate": self.rate,
                "spm_rate": self.spm_rate,
                "seed": self.seed,
            }
        )

    def check_unchanged(self) -> None:
        """Raise DataError if a corpus below was touched since it was opened."""
        self.dataset.check_unchanged()


def checked_eod(tokens: FIMTokens, eod: int | None, *, rate: float, spm_rate: float) -> int:
    """Return `eod`, after checking the flags about rearranging.

    Raises:
        ConfigError: a rate outside [0, 1], no end of documents, or two marks of one id.
    """
    for flag, value in (("--fim-rate", rate), ("--fim-spm-rate", spm_rate)):
        if not 0 <= value <= 1:
            raise ConfigError(
                f"{flag} is no share", found=value, fix="use a number from 0 to 1, as 0.5"
            )
    if eod is None:
        raise ConfigError(
            "documents to fill in cannot be separated without an end-of-document token",
            found="a tokenizer without one",
            fix="use a tokenizer with an end-of-document token, or leave --fim-data out",
        )
    if len({*tokens, eod}) != _MARKS + 1:
        raise ConfigError(
            "the marks of fill-in-the-middle are not four different tokens with the "
            "end of a document",
            found=f"{tokens}, eod {eod}",
            fix="give each its own token, for example those of --vocab-extra-ids 3",
        )
    return eod


def document_ranges(text: npt.NDArray[np.int64], eod: int) -> list[tuple[int, int]]:
    """Return (start, stop) of each document in `text` without its `eod`; none is empty."""
    ends = np.flatnonzero(text == eod).tolist()
    starts = [0, *(end + 1 for end in ends)]
    pairs = zip(starts, [*ends, len(text)], strict=True)
    return [(start, stop) for start, stop in pairs if stop > start]


def fill_in_the_middle(
    document: npt.NDArray[np.int64],
    tokens: FIMTokens,
    *,
    spm_rate: float,
    rng: np.random.RandomState,
) -> npt.NDArray[np.int64]:
    """Return `document` (4 tokens or more) cut at two random places and rearranged, as long.

    Its last three tokens are lost to the marks. The cuts are drawn from every border of the rest,
    so a part may be empty (section 3 of the paper, on tokens).
    """
    kept = document[: len(document) - _MARKS]
    first, second = np.sort(rng.randint(0, len(kept) + 1, size=2)).tolist()
    prefix, middle, suffix = np.split(kept, [first, second])
    suffix_first = rng.random_sample() < spm_rate
    parts: list[npt.NDArray[np.int64] | list[int]]
    if suffix_first:
        parts = [[tokens.prefix, tokens.suffix], suffix, [tokens.middle], prefix, middle]
    else:
        parts = [[tokens.prefix], prefix, [tokens.suffix], suffix, [tokens.middle], middle]
    return np.concatenate(parts, dtype=np.int64)
