"""From the strings of `--data-path` and `--split`, or named groups of ranges, to datasets.

What a reader would get wrong: a split is cut from the *items* of each corpus, so every component
of a blend is cut by itself; and the borders follow Megatron's rounding, because a document that
moves from test to train between two tools is a leak.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypedDict

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
from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_cache import IndexCache, cache_folders
from megatron.data.indexed_dataset import MMapIndexedDataset
from megatron.data.weighted_paths import WeightedGroup, WeightedSplits, announce_overlaps
from megatron.errors import ConfigError, DataError, MegatronError

SPLITS = ("train", "valid", "test")
OpenCorpus = Callable[[str], MMapIndexedDataset]


class WeightedPrefix(NamedTuple):
    """One corpus of a mixture."""

    weight: float
    prefix: str


class DatasetSplits(NamedTuple):
    """A dataset for each use, or None for a use of which no sample was asked."""

    train: SampleDataset | None
    valid: SampleDataset | None
    test: SampleDataset | None


class NamedDatasets(NamedTuple):
    """The dataset of training, and those of each group of validation and test by name."""

    train: SampleDataset | None
    valid: dict[str, SampleDataset]
    test: dict[str, SampleDataset]


class _Component(NamedTuple):
    weight: float
    prefix: str
    indexed: MMapIndexedDataset
    documents: npt.NDArray[np.integer]


class _Corpora(dict[str, MMapIndexedDataset]):
    """Corpora by prefix, each opened once, when it is first asked for."""

    def __init__(self, open_corpus: OpenCorpus) -> None:
        super().__init__()
        self._open_corpus = open_corpus

    def __missing__(self, prefix: str) -> MMapIndexedDataset:
        self[prefix] = self._open_corpus(prefix)
        return self[prefix]


@dataclass(frozen=True, slots=True)
class _Order:
    """What a sample order depends on beside the documents, and where its index is kept."""

    seq_length: int
    seed: int
    last_epoch_cutoff: float
    cache_path: str | None
    is_builder: bool
    wait: Callable[[], None]


def corpus_opener(data: DataConfig, *, is_builder: bool) -> OpenCorpus:
    """How `data` wants its corpora opened.

    Of --data-integrity full only builders read everything first; the others wait for them, and
    verify what they touch, since they may see another disk.
    """
    integrity = data.data_integrity
    if integrity is DataIntegrity.FULL and not is_builder:
        integrity = DataIntegrity.TOUCHED
    return partial(MMapIndexedDataset, integrity=integrity, mapped=data.mmap_bin_files)


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
    open_corpus: OpenCorpus = MMapIndexedDataset,
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
    prefixes: list[str] = []
    for words in (data_path, *separate):
        try:
            prefixes += [] if words is None else [part.prefix for part in parse_data_path(words)]
        except MegatronError as error:
            errors.append(error)
    return errors + corpus_problems(prefixes, open_corpus)


def corpus_problems(
    prefixes: Sequence[str], open_corpus: OpenCorpus = MMapIndexedDataset
) -> list[MegatronError]:
    """Why corpora cannot be opened, each said once; raises nothing itself."""
    errors: list[MegatronError] = []
    for prefix in dict.fromkeys(prefixes):
        try:
            open_corpus(prefix)
        except MegatronError as error:
            errors.append(error)
    return errors


class BuildOptions(TypedDict):
    """What both builders below take beside the corpora, for callers that choose between them."""

    num_samples: tuple[int, int, int]
    seq_length: int
    seed: int
    cache_path: str | None
    is_builder: bool
    wait: Callable[[], None]
    last_epoch_cutoff: float
    min_samples: int
    open_corpus: OpenCorpus


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
    open_corpus: OpenCorpus = MMapIndexedDataset,
) -> DatasetSplits:
    """A GPT dataset, or a blend of them, for every split of which samples are asked.

    Either `data_path` is cut by `split`, or each split has its own path, used whole. `min_samples`
    is what one step needs (the global batch size), `open_corpus` a `corpus_opener()`. Every rank
    must call this alike: `wait` is reached once per index.
    """
    _check_seed(seed)
    separate = (train_data_path, valid_data_path, test_data_path)
    _refuse_both_ways(data_path, separate)
    order = _Order(seq_length, seed, last_epoch_cutoff, cache_path, is_builder, wait)
    corpora = _Corpora(open_corpus)
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
        dataset = _build_split(name, parts, wanted, order, is_training=name == "train")
        _require_samples(name, dataset, min_samples)
        datasets.append(dataset)
    return DatasetSplits(*datasets)


def build_weighted_datasets(
    splits: WeightedSplits,
    *,
    num_samples: tuple[int, int, int],
    seq_length: int,
    seed: int,
    cache_path: str | None = None,
    is_builder: bool = True,
    wait: Callable[[], None] = lambda: None,
    last_epoch_cutoff: float = 0.95,
    min_samples: int = 1,
    open_corpus: OpenCorpus = MMapIndexedDataset,
) -> NamedDatasets:
    """A GPT dataset, or a blend of them, for every group of ranges; each has all the samples asked.

    A use without groups has no dataset, as in Megatron-DeepSpeed, and that is said. Every rank must
    call this alike: `wait` is reached once per index.
    """
    _check_seed(seed)
    announce_overlaps(splits)
    order = _Order(seq_length, seed, last_epoch_cutoff, cache_path, is_builder, wait)
    corpora = _Corpora(open_corpus)
    built: list[dict[str, SampleDataset]] = []
    for use, groups, wanted in zip(SPLITS, splits, num_samples):
        built.append({})
        if wanted > 0 and not groups:
            log.info(f"no --{use}-weighted-split-paths: nothing is evaluated on {use} data")
        for group in groups if wanted > 0 else ():
            parts = _open_ranges(group, corpora)
            dataset = _build_split(group.name, parts, wanted, order, is_training=use == "train")
            _require_samples(group.name, dataset, min_samples)
            built[-1][group.name] = dataset
    train, valid, test = built
    return NamedDatasets(next(iter(train.values()), None), valid, test)


def _open(
    parts: list[WeightedPrefix],
    corpora: _Corpora,
    cut: tuple[str, int] | None,
) -> list[_Component]:
    """The documents that one split uses of each corpus, each of which is opened once."""
    components = []
    for weight, prefix in parts:
        indexed = corpora[prefix]
        start, stop = 0, len(indexed)
        if cut is not None:
            split, number = cut
            start, stop = split_ranges(split, len(indexed))[number : number + 2]
        components.append(_Component(weight, prefix, indexed, np.arange(start, stop)))
    return components


def _open_ranges(group: WeightedGroup, corpora: _Corpora) -> list[_Component]:
    """The documents that a group uses of each corpus, each of which is opened once."""
    components = []
    for part in group.ranges:
        indexed = corpora[part.prefix]
        documents = np.arange(*part.items(len(indexed)))
        components.append(_Component(part.weight, part.prefix, indexed, documents))
    return components


def _build_split(
    name: str, components: list[_Component], wanted: int, order: _Order, *, is_training: bool
) -> SampleDataset:
    total = sum(component.weight for component in components)
    blended = len(components) > 1
    names = [component.prefix for component in components]
    weights = [component.weight for component in components]
    for problem in draw_problems(names, weights, wanted):
        if is_training:
            raise problem
        # Few samples evaluate on few corpora; nobody has to change the mixture for that.
        log.warning_once(f"draws {name} {problem.found}", f"{name}: {problem}")
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
    blend = BlendableDataset(datasets, weights, num_samples=wanted, names=names)
    _announce_mixture(name, datasets, blend, components)
    return blend


def _announce_mixture(
    name: str,
    datasets: Sequence[GPTDataset],
    blend: BlendableDataset,
    components: Sequence[_Component],
) -> None:
    """Say once what each component of a blend really gives, and how often it is passed over."""
    total = sum(component.weight for component in components)
    lines = [f"{name} is a blend of {len(blend):,} samples:"]
    for component, dataset, samples in zip(components, datasets, blend.counts):
        epochs = samples * dataset.seq_length / dataset.plan.tokens_per_epoch
        lines.append(
            f"  {component.prefix}: weight {component.weight / total:.6g}, {samples:,} samples "
            f"({samples / len(blend):.2%}), {epochs:.3g} epochs"
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


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**32:
        raise ConfigError(
            "the seed of the sample order is out of range",
            found=f"--seed {seed}",
            fix="use a seed from 0 to 4294967295",
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
