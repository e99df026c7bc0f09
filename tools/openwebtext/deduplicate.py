"""Drops documents that are nearly the same as an earlier one, by MinHash; the order stays.

A document is compared with those kept before it, so chains of small changes do not remove each
other's last copy. What a reader would get wrong: similarity is *estimated* from `--num-hashes`
minima (standard error at most 0.5 / sqrt of it), and a kept document takes about 10 KiB of memory.
"""

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

if importlib.util.find_spec("megatron") is None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from megatron.program import run
from tools.documents import DocumentFile, fields_of, find_inputs, is_text
from tools.text_output import WholeFile, refuse_existing

_ROWS_PER_BAND = 4  # with 32 bands a pair of similarity 0.7 is compared with probability 0.9998
_BLOCK = 1 << 14  # shingles hashed at a time, so that a long document takes no more memory

Signature = npt.NDArray[np.uint64]


class Duplicate(NamedTuple):
    """An earlier document and how similar it is to this one."""

    number: int
    similarity: float


class NearDuplicates:
    """The documents kept so far; asked for each one in turn.

    Broder 1997, "On the resemblance and containment of documents"; bands as in Leskovec,
    Rajaraman and Ullman, "Mining of Massive Datasets", section 3.4.
    """

    def __init__(self, *, threshold: float, num_hashes: int = 128, width: int = 5, seed: int = 0):
        self._threshold, self._width = threshold, width
        draw = np.random.RandomState(seed)
        self._factors = draw.randint(0, 2**63, size=num_hashes, dtype=np.uint64) | np.uint64(1)
        self._salts = draw.randint(0, 2**63, size=num_hashes, dtype=np.uint64)
        self._buckets: defaultdict[tuple[int, bytes], list[int]] = defaultdict(list)
        self._kept: dict[int, Signature] = {}

    def add(self, number: int, text: str) -> Duplicate | None:
        """Keep document `number`, or say which kept one it repeats."""
        signature = self.signature(text)
        keys = [
            (start, signature[start : start + _ROWS_PER_BAND].tobytes())
            for start in range(0, len(signature), _ROWS_PER_BAND)
        ]
        near = sorted({other for key in keys for other in self._buckets.get(key, ())})
        for other in near:
            similarity = float((self._kept[other] == signature).mean())
            if similarity >= self._threshold:
                return Duplicate(other, similarity)
        self._kept[number] = signature
        for key in keys:
            self._buckets[key].append(number)
        return None

    def signature(self, text: str) -> Signature:
        """The minima of the hashes of the text's shingles; case and white space do not count."""
        shingles = _shingles(" ".join(text.lower().split()), self._width)
        minima = np.full(len(self._factors), np.iinfo(np.uint64).max)
        for start in range(0, len(shingles), _BLOCK):
            block = shingles[start : start + _BLOCK]
            hashes = _mixed(block[None, :] * self._factors[:, None] + self._salts[:, None])
            minima = np.minimum(minima, hashes.min(axis=1))
        return minima


def main(argv: list[str] | None = None) -> None:
    """Copy the documents that repeat none before them, and list the others."""
    args = _parse(argv)
    output, report = Path(args.output), Path(f"{args.output}.duplicates")
    refuse_existing([output, report], overwrite=args.overwrite)
    known = NearDuplicates(threshold=args.threshold, num_hashes=args.num_hashes, seed=args.seed)
    places: list[str] = []
    dropped = 0
    with WholeFile(output) as kept_file, WholeFile(report) as report_file:
        for path in find_inputs(args.input).files:
            if is_text(path):
                raise ConfigError(
                    "documents are read from JSON lines",
                    found=str(path),
                    fix="write them as .jsonl",
                )
            for row in DocumentFile(path, columns=[args.json_key]):
                place = f"{path}:{row.line}"
                found = known.add(len(places), fields_of(path, row, [args.json_key])[0])
                places.append(place)
                if found is None:
                    kept_file.write(row.data.rstrip(b"\r\n") + b"\n")
                    continue
                dropped += 1
                record = {"dropped": place, "like": places[found.number]}
                record |= {"similarity": f"{found.similarity:.3f}"}
                report_file.write(json.dumps(record).encode() + b"\n")
        if not places:
            raise DataError(
                "the input holds no document", found=" ".join(args.input), fix="check --input"
            )
    print(f"kept {len(places) - dropped} of {len(places)} documents in {output}")
    print(f"dropped {dropped}, listed in {report}")


def _shingles(text: str, width: int) -> npt.NDArray[np.uint64]:
    """A hash of every stretch of `width` characters, each once; of the whole of a shorter text."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).astype(np.uint64)
    count = max(1, len(codes) - width + 1)
    hashes = np.zeros(count, np.uint64)
    for offset in range(min(width, len(codes))):
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + codes[offset : offset + count]
    return np.unique(_mixed(hashes))


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's finalizer: every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="deduplicate.py", description="Drop documents that nearly repeat an earlier one."
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help=".jsonl files (.gz, .zst)")
    add("--output", required=True, help=".jsonl to write; OUTPUT.duplicates lists what is dropped")
    add("--json-key", default="text", help="key of the text [text]")
    add("--threshold", type=float, default=0.7, help="share of common shingles to drop at [0.7]")
    add("--num-hashes", type=int, default=128, help="minima per document, a multiple of 4 [128]")
    add("--seed", type=int, default=0, help="of the hash functions [0]")
    add("--overwrite", action="store_true", help="replace outputs that exist")
    args = parser.parse_args(argv)
    if not 0 < args.threshold <= 1:
        raise ConfigError(
            "a similarity is above 0 and at most 1",
            found=f"--threshold {args.threshold}",
            fix="use --threshold 0.7",
        )
    if args.num_hashes < _ROWS_PER_BAND or args.num_hashes % _ROWS_PER_BAND:
        raise ConfigError(
            f"the minima are compared in bands of {_ROWS_PER_BAND}",
            found=f"--num-hashes {args.num_hashes}",
            fix="use --num-hashes 128",
        )
    return args


if __name__ == "__main__":
    run(main)
