"""From the strings of `--data-path` and `--split` to datasets for training and evaluation.

What a reader would get wrong: a split is cut from the *items* of each corpus, so every component
of a blend is cut by itself; and the borders follow Megatron's rounding, because a document that
moves from test to train between two tools is a leak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.data.blendable_dataset import (
    BlendableDataset,
    SampleDataset,
    samples_of_component,
)
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache, cache_folders
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.errors import ConfigError, DataError, MegatronError

SPLITS = ("train", "valid", "test")


class WeightedPrefix(NamedTuple):
    """One corpus of a mixture."""

    weight: float
    prefix: str


class DatasetSplits(NamedTuple):
    """A dataset for each use, or None for a use of which no sample was asked."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class _Component(NamedTuple):
    weight: float
    prefix: str
    indexed: MMapIndexedDataset
    documents: npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class _Order:
    """What a sample order depends on beside the documents, and where its index is kept."""

    seq_length: int
    seed: int
    last_epoch_cutoff: float
    cache_path: str | None
    is_builder: bool
    wait: Callable[[], None]


def parse_data_path(data_path: Sequence[str]) -> list[WeightedPrefix]:
    """`("P",)` or `("w1", "P1", "w2", "P2", ...)` as weighted prefixes; raises ConfigError."""
    words = [str(word) for word in data_path]
    if not words:
        raise ConfigError(
            "there is no corpus", found="an empty --data-path", fix="give --data-path PREFIX"
        )
    if len(words) == 1:
        return [WeightedPrefix(1.0, words[0])]
    if len(words) % 2:
        raise ConfigError(
            "a blend is a list of pairs, and this list has an odd number of words",
            found=f"--data-path {' '.join(words)}",
            fix="write --data-path WEIGHT PREFIX WEIGHT PREFIX ...",
        )
    parts = [
        WeightedPrefix(_parse_weight(weight, prefix), prefix)
        for weight, prefix in zip(words[::2], words[1::2])
    ]
    prefixes = [part.prefix for part in parts]
    for prefix in sorted({prefix for prefix in prefixes if prefixes.count(prefix) > 1}):
        log.warning_once(
            f"data_path {prefix}", f"--data-path names {prefix} more than once; its weights add up"
        )
    return parts


def parse_split(split: str) -> tuple[float, float, float]:
    """Fractions of train, valid and test that sum to one, from "969,30,1"; raises ConfigError."""
    words = split.replace("/", ",").split(",")
    try:
        parts = [float(word) for word in words]
    except ValueError as error:
        raise _bad_split(split, "it holds something that is no number") from error
    if len(parts) > len(SPLITS):
        raise _bad_split(split, f"it has {len(parts)} parts")
    if not all(math.isfinite(part) and part >= 0 for part in parts):
        raise _bad_split(split, "every part must be a number of 0 or more")
    total = sum(parts)
    if total <= 0:
        raise _bad_split(split, "all parts are 0")
    train, valid, test = (part / total for part in parts + [0.0] * (len(SPLITS) - len(parts)))
    return train, valid, test


def split_ranges(split: str, num_documents: int) -> tuple[int, int, int, int]:
    """Borders b so that split k holds documents b[k]..b[k + 1] - 1, in Megatron's rounding.

    Each part is rounded half to even, then what the sum is off by is taken from every border. A
    first part of zero stays empty, where Megatron would give it a document or a negative border.
    """
    fractions = parse_split(split)
    borders = [0]
    for fraction in fractions:
        borders.append(borders[-1] + round(fraction * num_documents))
    off = borders[-1] - num_documents
    train, valid, test = (border - off for border in borders[1:])
    return 0, train if fractions[0] > 0 else 0, valid, test


def check_data_path(
    data_path: Sequence[str] | None,
    *,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    split: str | None = None,
) -> list[MegatronError]:
    """Everything wrong with the flags that name data and with every corpus they name.

    Opens each corpus and checks its index; raises nothing itself.
    """
    errors: list[MegatronError] = []
    separate = (train_data_path, valid_data_path, test_data_path)
    try:
        _refuse_both_ways(data_path, separate)
        if split is not None:
            parse_split(split)
    except MegatronError as error:
        errors.append(error)
    seen: set[str] = set()
    for words in (data_path, *separate):
        try:
            parts = [] if words is None else parse_data_path(words)
        except MegatronError as error:
            errors.append(error)
            continue
        for prefix in dict.fromkeys(part.prefix for part in parts):
            if prefix in seen:
                continue
            seen.add(prefix)
            try:
                MMapIndexedDataset(prefix)
            except MegatronError as error:
                errors.append(error)
    return errors


def build_train_valid_test_datasets(
    *,
    data_path: Sequence[str] | None,
    split: str,
    num_samples: tuple[int, int, int],
    seq_length: int,
    seed: int,
    cache_path: str | None = None,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
    last_epoch_cutoff: float = 0.95,
    train_data_path: Sequence[str] | None = None,
    valid_data_path: Sequence[str] | None = None,
    test_data_path: Sequence[str] | None = None,
    min_samples: int = 1,
) -> DatasetSplits:
    """A GPT dataset, or a blend of them, for every split of which samples are asked.

    Either `data_path` is cut by `split`, or each split has its own path, used whole. `min_samples`
    is what one step needs (the global batch size). Every rank must call this alike: `wait` is
    reached once per index.
    """
    if not 0 <= seed < 2**32:
        raise ConfigError(
            "the seed of the sample order is out of range",
            found=f"--seed {seed}",
            fix="use a seed from 0 to 4294967295",
        )
    separate = (train_data_path, valid_data_path, test_data_path)
    _refuse_both_ways(data_path, separate)
    order = _Order(seq_length, seed, last_epoch_cutoff, cache_path, is_builder, wait)
    corpora: dict[str, MMapIndexedDataset] = {}
    datasets: list[SampleDataset | None] = []
    for number, (name, wanted) in enumerate(zip(SPLITS, num_samples)):
        if wanted <= 0:
            datasets.append(None)
            continue
        words = separate[number] if data_path is None else data_path
        if words is None:
            raise ConfigError(
                f"samples are asked of the {name} split, which has no corpus",
                found=f"{wanted} samples, no --{name}-data-path",
                fix=f"give --{name}-data-path, or ask for no {name} samples",
            )
        cut = None if data_path is None else (split, number)
        parts = _open(parse_data_path(words), corpora, cut)
        dataset = _build_split(name, parts, wanted, order)
        _require_samples(name, dataset, min_samples)
        datasets.append(dataset)
    return DatasetSplits(*datasets)


def _open(
    parts: list[WeightedPrefix],
    corpora: dict[str, MMapIndexedDataset],
    cut: tuple[str, int] | None,
) -> list[_Component]:
    """The documents that one split uses of each corpus, each of which is opened once."""
    components = []
    for weight, prefix in parts:
        indexed = corpora.get(prefix)
        if indexed is None:
            indexed = corpora[prefix] = MMapIndexedDataset(prefix)
        start, stop = 0, len(indexed)
        if cut is not None:
            split, number = cut
            start, stop = split_ranges(split, len(indexed))[number : number + 2]
        components.append(_Component(weight, prefix, indexed, np.arange(start, stop)))
    return components


def _build_split(
    name: str, components: list[_Component], wanted: int, order: _Order
) -> SampleDataset:
    total = sum(component.weight for component in components)
    blended = len(components) > 1
    datasets = [
        GPTDataset(
            component.indexed,
            name=name,
            documents=component.documents,
            num_samples=(
                samples_of_component(wanted, component.weight / total) if blended else wanted
            ),
            seq_length=order.seq_length,
            seed=order.seed,
            cache=IndexCache(
                folders=cache_folders(component.prefix, order.cache_path),
                is_builder=order.is_builder,
                wait=order.wait,
            ),
            last_epoch_cutoff=order.last_epoch_cutoff,
        )
        for component in components
    ]
    if not blended:
        return datasets[0]
    return BlendableDataset(
        datasets,
        [component.weight for component in components],
        num_samples=wanted,
        names=[component.prefix for component in components],
    )


def _require_samples(name: str, dataset: SampleDataset, min_samples: int) -> None:
    if len(dataset) < min_samples:
        raise DataError(
            f"the {name} split holds less than one global batch",
            found=f"{len(dataset)} samples; one batch takes {min_samples}",
            fix=f"give {name} a larger part with --split, ask for more {name} samples, or use a "
            "smaller --global-batch-size",
        )


def _refuse_both_ways(
    data_path: Sequence[str] | None, separate: Sequence[Sequence[str] | None]
) -> None:
    given = [f"--{name}-data-path" for name, path in zip(SPLITS, separate) if path is not None]
    if data_path is not None and given:
        raise ConfigError(
            "the data is named in two ways at once",
            found=f"--data-path and {', '.join(given)}",
            fix="give --data-path with --split, or a path for each split",
        )
    if data_path is None and not given:
        raise ConfigError(
            "there is no data",
            found="neither --data-path nor --train-data-path",
            fix="give --data-path PREFIX",
        )


def _parse_weight(word: str, prefix: str) -> float:
    try:
        weight = float(word)
    except ValueError as error:
        raise ConfigError(
            f"the weight of a corpus is not a number: {prefix}",
            found=word,
            fix="write --data-path WEIGHT PREFIX WEIGHT PREFIX ..., each weight before its prefix",
        ) from error
    if not math.isfinite(weight):
        raise ConfigError(
            f"the weight of a corpus is not finite: {prefix}", found=word, fix="use a plain number"
        )
    if weight <= 0:
        raise ConfigError(
            f"the weight of a corpus is not above zero: {prefix}",
            found=word,
            fix="use a weight above zero, or leave the corpus out",
        )
    return weight


def _bad_split(split: str, why: str) -> ConfigError:
    return ConfigError(
        f"--split cannot be read: {why}",
        found=f"--split {split}",
        fix="write up to three shares for train, valid and test, as in --split 969,30,1",
    )
