"""The data of programs for images: which flags they read, and the maker of their datasets.

A corpus is here a path of images, and a document is an image, so that blends, splits and checks are
those of text. What a reader would get wrong: all paths of a run have the same classes, in the same
order; one that lacks a class is refused, as its numbers would mean other classes.
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from megatron.config.data import DataConfig
from megatron.config.models.vision import VisionConfig
from megatron.data.corpus.verification_progress import ReportProgress, no_progress
from megatron.data.data_utils import Corpus, DatasetMaker, DocumentSlice
from megatron.data.kinds.dataset_kind import DatasetKind, flags_unread_by_images
from megatron.data.kinds.dataset_makers import Vocabulary
from megatron.data.kinds.program_data import ProgramData
from megatron.data.orders.index_cache import IndexCache
from megatron.data.vision.image_dataset import ImageDataset
from megatron.data.vision.image_source import ImageSource, open_images
from megatron.errors import ConfigError, DataError

_SHOWN = 5
_MIXING = 0x9E3779B97F4A7C15  # odd: numbers of images, spread over 64 bits


@dataclass(frozen=True, kw_only=True)
class ImageOpener:
    """Opens the images of a path once, and checks their classes."""

    vision: VisionConfig
    _found: dict[str, ImageSource] = field(default_factory=dict, init=False, repr=False)

    def __call__(self, path: str) -> Corpus:
        """Return the corpus of a path, of which each document is an image.

        Raises:
            DataError: there are no images, or they are of other classes than those of other paths.
            ConfigError: there are more classes than --num-classes, or fewer in folders.
        """
        if path not in self._found:
            vision = self.vision
            source = open_images(
                path, check=vision.image_check, max_broken=vision.max_broken_images
            )
            _check_number_of_classes(source, vision)
            for other in self._found.values():
                _check_same_classes(source, other)
            self._found[path] = source
        source = self._found[path]
        lengths = np.full(len(source), self.vision.num_tokens)
        return Corpus(path, source, len(source), (), lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Datasets of images."""

    opener: ImageOpener
    vision: VisionConfig
    seed: int

    def open(self, prefix: str) -> Corpus:
        """Return the images of a path."""
        return self.opener(prefix)

    def make(
        self, corpus: Corpus, documents: DocumentSlice, *, num_samples: int, cache: IndexCache
    ) -> ImageDataset:
        """Return the samples of a share of the images, which was drawn from all of them.

        Files lie in the order of their classes, so that a range of them would lack classes: a
        range of a shuffled order, that depends on nothing but their number, is taken instead.
        """
        del cache  # orders take no time to make
        source: ImageSource = corpus.source
        chosen = shuffled_images(len(source))[documents.start : documents.stop]
        is_training = documents.name == "train"
        part = source.of(np.sort(chosen))
        if is_training:
            part = _fractions(part, self.vision)
        return ImageDataset(
            source=part,
            name=documents.name,
            num_samples=num_samples,
            seed=self.seed,
            vision=self.vision,
            is_training=is_training,
        )

    def epochs(self, dataset: ImageDataset, samples: int) -> float:
        """Return passes over the images that `samples` samples are."""
        return samples / len(dataset.source)


def shuffled_images(count: int) -> npt.NDArray[np.intp]:
    """Return the numbers 0 to count - 1 in the fixed order of which splits are ranges.

    Numbers are ordered by a product of 64 bits, not drawn, so that no generator can change it.
    """
    numbers = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_MIXING)
    mixed = (numbers ^ (numbers >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return np.argsort(mixed, kind="stable")


def image_data(vision: VisionConfig) -> ProgramData:
    """Return the data of a program that reads images, for one run."""
    opener = ImageOpener(vision=vision)

    def maker(
        data: DataConfig,
        *,
        tokenizer: Vocabulary | None,
        seed: int,
        is_builder: bool,
        report_progress: ReportProgress = no_progress,
    ) -> DatasetMaker:
        del data, tokenizer, is_builder, report_progress
        return Images(opener=opener, vision=vision, seed=seed)

    return ProgramData(_kind, maker, flags_unread_by_images, open=opener)


def _kind(data: DataConfig) -> DatasetKind:
    del data
    return DatasetKind.IMAGES


def _check_number_of_classes(source: ImageSource, vision: VisionConfig) -> None:
    found, wanted = len(source.classes), vision.num_classes
    # Numbers need not all occur, and names of folders are all that there are.
    if found > wanted or (found < wanted and not source.classes[0].isdigit()):
        raise ConfigError(
            "images are of another number of classes than the model scores",
            found=f"{source.path}: {found} classes, --num-classes {wanted}",
            fix=f"use --num-classes {found}",
        )


def _check_same_classes(source: ImageSource, other: ImageSource) -> None:
    if source.classes[0].isdigit() and other.classes[0].isdigit():
        return
    missing = sorted(set(other.classes) - set(source.classes))
    spare = sorted(set(source.classes) - set(other.classes))
    if not missing and not spare:
        return
    parts = [
        f"{text} {', '.join(names[:_SHOWN])}{', ..' if len(names) > _SHOWN else ''}"
        for text, names in (("it lacks", missing), ("it alone has", spare))
        if names
    ]
    raise DataError(
        "two paths of images have other folders of classes, so that numbers of classes differ",
        found=f"{source.path}, beside {other.path}: {'; '.join(parts)}",
        fix="give both paths a folder for each class, of the same names",
    )


def _fractions(source: ImageSource, vision: VisionConfig) -> ImageSource:
    """Return the first classes, and the first images of each, as the flags say."""
    if vision.classes_fraction == vision.data_per_class_fraction == 1:
        return source
    classes = max(1, math.floor(vision.classes_fraction * len(source.classes)))
    chosen = []
    for number in range(classes):
        of_class = np.flatnonzero(source.labels == number)
        kept = math.ceil(vision.data_per_class_fraction * len(of_class))
        chosen.append(of_class[:kept])
    return source.of(np.sort(np.concatenate(chosen)))
