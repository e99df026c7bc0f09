"""From the strings of `--data-path` and `--split`, or named groups of ranges, to datasets.

One builder for every kind of dataset: a `DatasetMaker` defines the kind. What a reader would get
wrong: each component of a blend is cut by itself, in what its kind calls a document; and the
borders follow Megatron's rounding, because a document that moves from test to train between two
tools is a leak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.config.data import DataConfig, DataIntegrity
from megatron.data.blendable_dataset import (
    BlendableDataset,
    SampleDataset,
    draw_problems,
    samples_of_component,
)
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.corpus.weighted_paths import (
    WeightedGroup,
    WeightedSplits,
    announce_overlaps,
    weighted_splits,
)
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.orders.index_cache import IndexCache, cache_folders
from megatron.errors import ConfigError, DataError, MegatronError

SPLITS = ("train", "valid", "test")
OpenCorpus = Callable[[str], MMapIndexedDataset]


class WeightedPrefix(NamedTuple):
    """One corpus of a mixture."""

    weight: float
    prefix: str


class DatasetSplits(NamedTuple):
    """A dataset for each use, or None for a use without samples."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class NamedDatasets(NamedTuple):
    """The dataset of training, and those of each group of validation and test by name."""

    train: SampleDataset | None
    valid: dict[str, SampleDataset]
    test: dict[str, SampleDataset]


class Corpus(NamedTuple):
    """The corpus of a prefix, opened as its kind of dataset requires."""

    prefix: str
    source: Any  # the argument of datasets of the kind
    num_documents: int  # number of the items that splits divide
    files: tuple[MMapIndexedDataset, ...]  # the files that hold tokens of the vocabulary
    lengths: npt.NDArray[np.integer]  # tokens, of each document or smaller part of one


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentSlice:
    """Documents `start` to `stop` - 1 of a corpus, under the name of the split they make."""

    name: str
    start: int
    stop: int


class DatasetMaker(Protocol):
    """A kind of dataset with all parameters of its samples except the documents."""

    def open(self, prefix: str) -> Corpus:
        """Return the corpus that datasets of this kind read under `prefix`; raises DataError."""
        ...

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> SampleDataset:
        """Return the dataset of at least `num_samples` samples of these documents."""
        ...

    def epochs(self, dataset: Any, samples: int) -> float | None:
        """Return how many passes over its documents the first `samples` take; None if unknown."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexPlace:
    """Where indices of samples are kept, and which rank builds them; each rank has its own value.

    `wait` is reached once per index, by every rank.
    """

    cache_path: str | None = None
    is_builder: bool = True
    wait: Callable[[], None] = lambda: None
    report_progress: ReportProgress = no_progress

    def cache(self, prefix: str) -> IndexCache:
        """Return the cache of indices over the corpus `prefix`."""
        return IndexCache(
            folders=cache_folders(prefix, self.cache_path),
            is_builder=self.is_builder,
            wait=self.wait,
            report_progress=self.report_progress,
        )


class _Component(NamedTuple):
    weight: float
    corpus: Corpus
    documents: DocumentSlice


class _Corpora(dict[str, Corpus]):
    """Corpora by prefix, each opened once, on first use."""

    def __init__(self, maker: DatasetMaker) -> None:
        super().__init__()
        self._maker = maker

    def __missing__(self, prefix: str) -> Corpus:
        self[prefix] = self._maker.open(prefix)
        return self[prefix]


def corpus_opener(
    data: DataConfig, *, is_builder: bool, report_progress: ReportProgress = no_progress
) -> OpenCorpus:
    """Return a function that opens corpora as `data` configures.

    With --data-integrity full only builders read everything first, and report their progress
    through `report_progress`; the others wait for them, and verify blocks on first use, since they
    may see another disk.
    """
    integrity = data.data_integrity
    if integrity is DataIntegrity.FULL and not is_builder:
        integrity = DataIntegrity.TOUCHED
    mapped = data.mmap_bin_files
    return partial(
        MMapIndexedDataset, integrity=integrity, mapped=mapped, report_progress=report_progress
    )


def parse_data_path(data_path: Sequence[str]) -> list[WeightedPrefix]:
    """Parse `("P",)` or `("w1", "P1", "w2", "P2", ...)`, weighted prefixes; raises ConfigError."""
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
    """Parse "969,30,1" as fractions of train, valid and test that sum to 1; raises ConfigError."""
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


def splits_without_share(split: str) -> tuple[str, ...]:
    """Return which of validation and test have a share of 0: such data is not evaluated on."""
    evaluated = zip(SPLITS[1:], parse_split(split)[1:], strict=True)
    return tuple(name for name, share in evaluated if share == 0)


def split_ranges(split: str, num_documents: int) -> tuple[int, int, int, int]:
    """Return borders b: split k holds documents b[k]..b[k + 1] - 1, in Megatron's rounding.

    Each part is rounded half to even, then the error of the sum is subtracted from every border. A
    first part of zero stays empty, where Megatron would give it a document or a negative border.
    """
    fractions = parse_split(split)
    borders = [0]
    for fraction in fractions:
        borders.append(borders[-1] + round(fraction * num_documents))
    off = borders[-1] - num_documents
    train, valid, test = (border - off for border in borders[1:])
    return 0, train if fractions[0] > 0 else 0, valid, test


def check_data_path(data: DataConfig) -> list[MegatronError]:
    """Return all errors in --data-path, its siblings and --split; opens and raises nothing.

    `weighted_problems` does the same for weighted ranges.
    """
    errors: list[MegatronError] = []
    try:
        parse_split(data.split)
    except MegatronError as error:
        errors.append(error)
    for words in _given_paths(data):
        try:
            parse_data_path(words)
        except MegatronError as error:
            errors.append(error)
    return errors


def named_prefixes(data: DataConfig) -> tuple[str, ...]:
    """Return each prefix that the flags name, once; raises ConfigError if unreadable."""
    splits = weighted_splits(data)
    if splits is not None:
        return splits.prefixes
    named = (part.prefix for words in _given_paths(data) for part in parse_data_path(words))
    return tuple(dict.fromkeys(named))


def _given_paths(data: DataConfig) -> list[tuple[str, ...]]:
    paths = (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path)
    return [words for words in paths if words is not None]


def build_datasets(
    maker: DatasetMaker,
    data: DataConfig,
    *,
    num_samples: tuple[int, int, int],
    min_samples: int = 1,
    place: IndexPlace,
) -> DatasetSplits | NamedDatasets:
    """Return the datasets of a run from its flags, whichever flags name the data."""
    groups = weighted_splits(data)
    if groups is not None:
        return build_weighted_datasets(
            maker, groups, num_samples=num_samples, min_samples=min_samples, place=place
        )
    return build_train_valid_test_datasets(
        maker,
        data_path=("mock",) if data.mock_data else data.data_path,
        split=data.split,
        separate=(data.train_data_path, data.valid_data_path, data.test_data_path),
        num_samples=num_samples,
        min_samples=min_samples,
        place=place,
    )


def build_train_valid_test_datasets(
    maker: DatasetMaker,
    *,
    data_path: Sequence[str] | None,
    split: str,
    num_samples: tuple[int, int, int],
    separate: Sequence[Sequence[str] | None] = (None, None, None),
    min_samples: int = 1,
    place: IndexPlace,
) -> DatasetSplits:
    """Return a dataset by `maker`, or a blend, for each split of which samples are requested.

    Either `data_path` is cut by `split`, or each split has its own path in `separate`, used whole.
    `min_samples` is what one step needs (the global batch size). Every rank must call this alike.
    """
    _refuse_both_ways(data_path, separate)
    corpora = _Corpora(maker)
    datasets: list[SampleDataset | None] = []
    for number, (name, wanted) in enumerate(zip(SPLITS, num_samples)):
        if wanted <= 0:
            datasets.append(None)
            continue
        if data_path is not None and name in splits_without_share(split):
            log.info(f"--split {split}: nothing is evaluated on {name} data")
            datasets.append(None)
            continue
        words = separate[number] if data_path is None else data_path
        if words is None:
            raise ConfigError(
                f"samples are requested of the {name} split, which has no corpus",
                found=f"{wanted} samples, no --{name}-data-path",
                fix=f"give --{name}-data-path, or ask for no {name} samples",
            )
        components = []
        for weight, prefix in parse_data_path(words):
            count = corpora[prefix].num_documents
            start, stop = 0, count
            if data_path is not None:
                start, stop = split_ranges(split, count)[number : number + 2]
            documents = DocumentSlice(name=name, start=start, stop=stop)
            components.append(_Component(weight, corpora[prefix], documents))
        dataset = _build_split(maker, components, wanted, place, is_training=name == "train")
        _require_samples(name, dataset, min_samples)
        datasets.append(dataset)
    return DatasetSplits(*datasets)


def build_weighted_datasets(
    maker: DatasetMaker,
    splits: WeightedSplits,
    *,
    num_samples: tuple[int, int, int],
    min_samples: int = 1,
    place: IndexPlace,
) -> NamedDatasets:
    """Return a dataset by `maker`, or a blend, for every group of ranges, with all its samples.

    A use without groups has no dataset, as in Megatron-DeepSpeed; a log line states it. Every rank
    must call this alike.
    """
    announce_overlaps(splits)
    corpora = _Corpora(maker)
    built: list[dict[str, SampleDataset]] = []
    for use, groups, wanted in zip(SPLITS, splits, num_samples):
        built.append({})
        if wanted > 0 and not groups:
            log.info(f"no --{use}-weighted-split-paths: nothing is evaluated on {use} data")
        for group in groups if wanted > 0 else ():
            components = _components_of(group, corpora)
            dataset = _build_split(maker, components, wanted, place, is_training=use == "train")
            _require_samples(group.name, dataset, min_samples)
            built[-1][group.name] = dataset
    train, valid, test = built
    return NamedDatasets(next(iter(train.values()), None), valid, test)


def _components_of(group: WeightedGroup, corpora: _Corpora) -> list[_Component]:
    """Return the documents that a group uses of each corpus; each corpus is opened once."""
    components = []
    for part in group.ranges:
        start, stop = part.items(corpora[part.prefix].num_documents)
        documents = DocumentSlice(name=group.name, start=start, stop=stop)
        components.append(_Component(part.weight, corpora[part.prefix], documents))
    return components


def _build_split(
    maker: DatasetMaker,
    components: list[_Component],
    wanted: int,
    place: IndexPlace,
    *,
    is_training: bool,
) -> SampleDataset:
    total = sum(component.weight for component in components)
    blended = len(components) > 1
    name = components[0].documents.name
    names = [component.corpus.prefix for component in components]
    weights = [component.weight for component in components]
    for problem in draw_problems(names, weights, wanted):
        if is_training:
            raise problem
        # Few samples evaluate on few corpora; that is no reason to change the mixture.
        log.warning_once(f"draws {name} {problem.found}", f"{name}: {problem}")
    datasets = [
        maker.make(
            corpus,
            documents,
            num_samples=samples_of_component(wanted, weight / total) if blended else wanted,
            cache=place.cache(corpus.prefix),
        )
        for weight, corpus, documents in components
    ]
    if not blended:
        return datasets[0]
    blend = BlendableDataset(datasets, weights, num_samples=wanted, names=names)
    _announce_mixture(name, maker, blend, components)
    return blend


def _announce_mixture(
    name: str, maker: DatasetMaker, blend: BlendableDataset, components: Sequence[_Component]
) -> None:
    """Log once the share of each component in a blend, and its number of epochs."""
    total = sum(component.weight for component in components)
    lines = [f"{name} is a blend of {len(blend):,} samples:"]
    for (weight, corpus, _), dataset, samples in zip(components, blend.datasets, blend.counts):
        epochs = maker.epochs(dataset, samples)
        lines.append(
            f"  {corpus.prefix}: weight {weight / total:.6g}, {samples:,} samples "
            f"({samples / len(blend):.2%})" + ("" if epochs is None else f", {epochs:.3g} epochs")
        )
    log.info("\n".join(lines))


def _require_samples(name: str, dataset: SampleDataset, min_samples: int) -> None:
    if len(dataset) < min_samples:
        raise DataError(
            f"the {name} split holds less than one global batch",
            found=f"{len(dataset)} samples; one batch takes {min_samples}",
            fix=f"give {name} a larger part with --split or in its group, ask for more {name} "
            "samples, or use a smaller --global-batch-size",
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
