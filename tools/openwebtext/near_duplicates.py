"""Which earlier documents a document nearly repeats: candidates by MinHash, then counted exactly.

Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec, Rajaraman
and Ullman, "Mining of Massive Datasets", section 3.4. Signatures and their index are the package
datasketch's. What a reader would get wrong: no similarity below the threshold is ever reported,
but up to one pair in a hundred that is just at the threshold is missed.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tools.openwebtext.packages import package
from tools.preprocessing.documents import fields_of
from tools.preprocessing.encoding import Chunk

_SCHEME = "affine32"  # of datasketch's permutations; 32 bits are enough for 100 M shingles
_RECALL = 0.99  # of the pairs at the threshold that are compared at all
_BLOCK = 1 << 12  # shingles hashed at a time, so that a long document takes no more memory
_MIXER = np.uint64(0x9E3779B97F4A7C15)  # odd, so that multiplying by it loses nothing

Shingles = npt.NDArray[np.uint64]
Signature = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Likeness:
    """The threshold of near-duplicates, and the parameters of their search."""

    threshold: float = 0.7  # common shingles among all shingles of both (Jaccard)
    num_hashes: int = 128
    seed: int = 0
    width: int = 5  # characters of a shingle

    def bands(self) -> tuple[int, int]:
        """Return numbers of bands and rows: the longest bands with sufficient recall."""
        for rows in range(self.num_hashes // 2, 1, -1):
            bands = self.num_hashes // rows
            if 1 - (1 - self.threshold**rows) ** bands >= _RECALL:
                return bands, rows
        return self.num_hashes, 1

    def certainly_below(self, estimate: float) -> bool:
        """Return whether an estimate is at least four standard errors below the threshold."""
        return estimate < self.threshold - 2 / math.sqrt(self.num_hashes)


class Duplicate(NamedTuple):
    """An earlier document and how similar it is to this one."""

    number: int
    similarity: float


class SignedChunk(NamedTuple):
    """A chunk and the signature of each of its documents."""

    chunk: Chunk
    signatures: list[Signature]


class NearDuplicates:
    """The documents with which later ones are compared, by number.

    Args:
        likeness: what counts as a repetition.
        shingles_of: reads a document again, to compare it exactly.
    """

    def __init__(self, likeness: Likeness, shingles_of: Callable[[int], Shingles]) -> None:
        self._likeness, self._shingles_of = likeness, shingles_of
        self._datasketch = require_datasketch()
        self._signatures: dict[int, Signature] = {}
        self._index = self._datasketch.MinHashLSH(
            num_perm=likeness.num_hashes, params=likeness.bands()
        )

    def insert(self, number: int, signature: Signature) -> None:
        """Add this document, so that later ones are compared with it."""
        self._signatures[number] = signature
        self._index.insert(number, self._minhash(signature))

    def matches(
        self, signature: Signature, shingles: Callable[[], Shingles], wanted: Callable[[int], bool]
    ) -> Iterator[Duplicate]:
        """Yield the inserted documents that are near-duplicates of this one, in order.

        Only documents for which `wanted` is true are compared.
        """
        own: Shingles | None = None
        for other in sorted(self._index.query(self._minhash(signature))):
            estimate = float((self._signatures[other] == signature).mean())
            if self._likeness.certainly_below(estimate) or not wanted(other):
                continue
            own = shingles() if own is None else own
            similarity = jaccard(own, self._shingles_of(other))
            if similarity >= self._likeness.threshold:
                yield Duplicate(other, similarity)

    def _minhash(self, signature: Signature) -> Any:
        return self._datasketch.LeanMinHash(
            seed=self._likeness.seed, hashvalues=signature, scheme=_SCHEME
        )


class Signer:
    """Computes signatures; one per process, since it draws the permutations."""

    def __init__(self, likeness: Likeness) -> None:
        self._empty = require_datasketch().MinHash(
            likeness.num_hashes, seed=likeness.seed, hashfunc=int, scheme=_SCHEME
        )

    def signature(self, shingles: Shingles) -> Signature:
        """Return the smallest hash of any shingle, for each permutation."""
        minhash = self._empty.copy()
        upper = (shingles >> np.uint64(32)).astype(np.uint32)
        for start in range(0, len(upper), _BLOCK):
            minhash.update_batch(upper[start : start + _BLOCK].tolist())
        values: Signature = minhash.hashvalues
        return values


def sign_chunk(likeness: Likeness, key: str, chunk: Chunk) -> SignedChunk:
    """Return the signatures of a chunk, in any process."""
    signer = _signer(likeness)
    texts = (fields_of(chunk.path, row, [key])[0] for row in chunk.rows)
    shingles = (shingles_of(text, likeness.width) for text in texts)
    return SignedChunk(chunk, [signer.signature(found) for found in shingles])


def shingles_of(text: str, width: int) -> Shingles:
    """Return a hash of every distinct run of `width` characters, or of a shorter text.

    Case and white space do not count.
    """
    text = " ".join(text.lower().split())
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    count = max(1, len(codes) - width + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(min(width, len(codes))):
        hashes = (hashes + codes[offset : offset + count]) * _MIXER
    return np.unique(hashes)


def jaccard(one: Shingles, two: Shingles) -> float:
    """Return the ratio of common shingles to all shingles of both."""
    common = np.intersect1d(one, two, assume_unique=True).size
    return float(common / (len(one) + len(two) - common))


def require_datasketch() -> ModuleType:
    """Return the package datasketch; ConfigError with the command to install it if missing."""
    return package(
        "datasketch",
        pip="'datasketch>=2.0'",
        task="finding near duplicates",
        otherwise="leave this step out",
    )


@functools.cache
def _signer(likeness: Likeness) -> Signer:
    return Signer(likeness)
