"""Describes what a run reads, in short texts that ranks compare and checkpoints store.

Flags name files, and files change. So each corpus is identified by the digest of its index, the
length of its tokens and the pair id of its checksums, and each file of weighted paths by its text.
What a reader would get wrong: nothing is refused here. A missing file is recorded as absent, since
other checks report why, and a rank that lacks it is named when ranks compare.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import xxhash

from megatron import log
from megatron.config.data import DataConfig
from megatron.data.corpus.checksums import digest_of_file, recorded_digests
from megatron.data.corpus.paths import (
    both_files_exist,
    data_file_path,
    index_file_path,
    pairing_doubts,
)
from megatron.data.corpus.weighted_paths import weighted_splits
from megatron.data.data_utils import parse_data_path
from megatron.data.vision.image_source import image_digest
from megatron.errors import MegatronError

ABSENT = "absent"
PAIR_ID = "pair id of "  # prefix of the keys that only a corpus with checksums has
_LONGEST_TEXT = 200
_PARTS = (
    "",
    "_inputs_document",
    "_targets_document",
    "_tokens_document",
    "_mask_document",
)


def files_of_paths(data: DataConfig) -> dict[str, str]:
    """Return the text of each file that lists corpora, by flag; a long text cut, with a digest."""
    named = {
        "train": data.train_weighted_split_paths_path,
        "valid": data.valid_weighted_split_paths_path,
        "test": data.test_weighted_split_paths_path,
    }
    return {
        f"--{use}-weighted-split-paths-path {path}": _text_of(Path(path))
        for use, path in named.items()
        if path is not None
    }


def data_sources(data: DataConfig) -> dict[str, str]:
    """Return a description of every file that `data` names, which two runs can compare.

    Reads the index of corpora without checksums, and otherwise a few bytes of each.
    """
    found = files_of_paths(data)
    for prefix in _prefixes(data):
        found |= _corpora(prefix)
    return found


def changed_sources(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the names in both whose values differ, as text: `name: before -> now`."""
    return [
        f"{name}: {before[name]} -> {now[name]}"
        for name in before
        if name in now and before[name] != now[name]
    ]


def announce_shared_corpora(data: DataConfig, sources: Mapping[str, str]) -> None:
    """Warn of corpora of validation and test that training reads too, whatever their names are.

    Splits and weighted ranges are not checked here: the first cannot overlap, and
    `announce_overlaps` checks the second.
    """
    trained = {_identity(prefix, sources): prefix for prefix in _prefixes_of(data.train_data_path)}
    for use, words in (("valid", data.valid_data_path), ("test", data.test_data_path)):
        for prefix in _prefixes_of(words):
            twin = trained.get(_identity(prefix, sources))
            if twin is not None:
                log.warning_once(
                    f"shared corpus {use} {prefix}",
                    f"--{use}-data-path names {prefix}, which is what --train-data-path names as "
                    f"{twin}: its loss is one of training data",
                )


def announce_doubtful_pairs(data: DataConfig) -> None:
    """Warn of corpora without checksums whose .bin and .idx may not be of one corpus."""
    for prefix in _prefixes(data):
        for name in _existing(prefix):
            try:
                doubts = pairing_doubts(name) if recorded_digests(name) is None else []
            except (OSError, MegatronError):
                continue  # the check of the corpora reports it
            for doubt in doubts:
                log.warning_once(
                    f"pairing {doubt}",
                    f"{doubt}. Compare a sample with its text: python tools/inspect_dataset.py "
                    f"{name} --sample 1 --tokenizer-type TYPE; --write-sidecar then adds checksums",
                )


def _identity(prefix: str, sources: Mapping[str, str]) -> str:
    """Return a key that all names of one corpus share; without checksums its real path."""
    return sources.get(f"{PAIR_ID}{prefix}", f"name {os.path.realpath(prefix)}")


def _prefixes_of(words: Sequence[str] | None) -> list[str]:
    try:
        return [part.prefix for part in parse_data_path(words or ())] if words else []
    except MegatronError:
        return []  # the check of the corpora reports it


def _prefixes(data: DataConfig) -> tuple[str, ...]:
    words = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    try:
        splits = weighted_splits(data)
        if splits is not None:
            return splits.prefixes
    except MegatronError:
        return ()  # the check of the corpora reports it
    return tuple(dict.fromkeys(prefix for given in words for prefix in _prefixes_of(given)))


def _corpora(prefix: str) -> dict[str, str]:
    """Return the facts about the corpus `prefix`, about the parts of a pair, or about images."""
    existing = _existing(prefix)
    if not existing:
        images = image_digest(prefix)
        if images is not None:
            return {f"images of {prefix}": f"xxh3_128 {images}"}
        return {f"index of {prefix}": ABSENT}
    return {key: value for name in existing for key, value in _corpus(name).items()}


def _existing(prefix: str) -> list[str]:
    """Return the corpora under a prefix: itself, or the parts of a pair or dialogue."""
    return [name for name in (prefix + part for part in _PARTS) if both_files_exist(name)]


def _corpus(prefix: str) -> dict[str, str]:
    try:
        length = os.stat(data_file_path(prefix)).st_size
        digests = recorded_digests(prefix)
        index = (
            digests.index_digest if digests is not None else digest_of_file(index_file_path(prefix))
        )
    except (OSError, MegatronError):
        return {f"index of {prefix}": ABSENT}
    found = {f"index of {prefix}": f"xxh3_128 {index}", f"tokens of {prefix}": f"{length} bytes"}
    if digests is not None:
        found[f"{PAIR_ID}{prefix}"] = digests.pair_id
    return found


def _text_of(path: Path) -> str:
    try:
        text = " ".join(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError):
        return ABSENT
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}... (xxh3_128 {xxhash.xxh3_128_hexdigest(text.encode())})"
