"""Several datasets as one, mixed by weight in Megatron's greedy order.

The order of the first n samples does not depend on how many follow. What a reader would get wrong:
weights are shares of *samples drawn*, not of the sizes of the components; a component that is too
small for its share is an error before training, and never wraps around.
"""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Protocol, SupportsIndex

import numpy as np
import numpy.typing as npt
import xxhash

from megatron.data.orders.sample_maps import build_blending_indices
from megatron.errors import ConfigError, DataError

Sample = dict[str, npt.NDArray[np.int64]]


class SampleDataset(Protocol):
    """The interface of a dataset for loaders and blends."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: SupportsIndex, /) -> Sample:
        """Return one sample; IndexError outside 0..len - 1."""
        ...

    def fingerprint(self) -> str:
        """Return hex digits that are equal exactly where the data and their order are."""
        ...

    def check_unchanged(self) -> None:
        """Raise DataError if files below were touched since they were opened."""
        ...


class BlendableDataset:
    """`num_samples` samples drawn from `datasets` in proportion to `weights`.

    Without `num_samples`, as many as all components hold together. Raises ConfigError for weights
    that are not positive numbers and DataError for a component too small for its share.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        weights: Sequence[float],
        *,
        num_samples: int | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.datasets = list(datasets)
        names = list(names) if names else [f"component {i}" for i in range(len(datasets))]
        _check_weights(weights, names)
        size = sum(len(dataset) for dataset in datasets) if num_samples is None else num_samples
        self.dataset_index, self.dataset_sample_index = build_blending_indices(weights, size)
        counts = np.bincount(self.dataset_index, minlength=len(datasets)).tolist()
        self.counts: tuple[int, ...] = tuple(counts)  # samples drawn from each component
        for name, dataset, wanted in zip(names, datasets, counts):
            if wanted > len(dataset):
                raise DataError(
                    f"a component of a blend is too small for its weight: {name}",
                    found=f"{len(dataset)} samples; {size} samples of the blend want {wanted}",
                    fix="lower its weight in --data-path, or train on fewer samples",
                )
        digest = xxhash.xxh3_128(",".join(dataset.fingerprint() for dataset in datasets).encode())
        digest.update(np.array(weights, np.float64).data)
        digest.update(str(size).encode())
        self._fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1: no index counts from the end."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)} samples")
        return self.datasets[int(self.dataset_index[i])][int(self.dataset_sample_index[i])]

    def fingerprint(self) -> str:
        """Return hex digits that are equal exactly where the components and the mixture are."""
        return self._fingerprint

    def check_unchanged(self) -> None:
        """Raise DataError if a corpus of any component was touched since it was opened."""
        for dataset in self.datasets:
            dataset.check_unchanged()


def draw_problems(
    names: Sequence[str], weights: Sequence[float], num_samples: int
) -> Iterator[ConfigError]:
    """Yield an error for each component whose share of `num_samples` is less than one sample."""
    total = sum(weights)
    for name, weight in zip(names, weights):
        expected = num_samples * weight / total
        if expected < 1:
            yield ConfigError(
                f"a component of a blend is too rare to be drawn once: {name}",
                found=f"weight {weight:g} of {total:g} is {expected:.2g} of {num_samples} samples",
                fix=f"give it a weight above {total / num_samples:.2g}, or leave it out",
            )


def samples_of_component(num_samples: int, weight: float) -> int:
    """Return the samples that a blend of `num_samples` needs of a component with this share.

    The half percent on top is Megatron's. The greedy order never takes more than
    `weight * (num_samples - 1) + 1`, so the result always suffices.
    """
    return math.ceil(num_samples * weight * 1.005)


def _check_weights(weights: Sequence[float], names: Sequence[str]) -> None:
    if len(weights) != len(names) or not names:
        raise ConfigError(
            "a blend needs one weight per dataset and at least one dataset",
            found=f"{len(weights)} weights, {len(names)} datasets",
            fix="write --data-path WEIGHT PREFIX WEIGHT PREFIX ...",
        )
    for name, weight in zip(names, weights):
        if not math.isfinite(weight) or weight <= 0:
            raise ConfigError(
                f"a weight of a blend is not a positive number: {name}",
                found=weight,
                fix="use weights above zero; leave out what should not be drawn",
            )
