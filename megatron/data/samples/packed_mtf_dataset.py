"""Rows of packed input-target pairs for a decoder, in Megatron-DeepSpeed's order for the same seed.

What a reader would get wrong: there, every split reads the documents from the first on; here a
split has those of its own range, which is the same for training and differs for validation and
test.
"""

import numpy as np
import numpy.typing as npt

from megatron.config.data import OnTooLong
from megatron.data.samples.mtf_dataset import MTFDataset
from megatron.data.samples.packing import PackedDataset
from megatron.errors import ConfigError, DataError


class PackedMTFDataset(PackedDataset):
    """A `PackedDataset` of pairs; a pair that is longer than a row is left out or refused.

    Raises ConfigError for the policy cut, which would remove targets, and DataError for a split in
    which no pair that fits has a target.
    """

    source: MTFDataset

    def _checked_lengths(
        self, documents: npt.NDArray[np.int64], on_too_long: OnTooLong
    ) -> npt.NDArray[np.int64]:
        if on_too_long is OnTooLong.CUT:
            raise ConfigError(
                "a pair that is cut loses its target, which is what is learned",
                found="--on-too-long-document cut for pairs that are longer than a row",
                fix="use --on-too-long-document skip or error, or a larger --seq-length",
            )
        lengths = super()._checked_lengths(documents, on_too_long)
        fits = documents[lengths <= self.row_length]
        if not self.source.targets.sizes[fits].any():
            raise DataError(
                f"the {self.name} split of {self.source.prefix} has no targets to learn",
                found=f"{len(fits)} pairs that fit into a row, all with empty targets",
                fix="check the key of the targets, and preprocess the corpus again",
            )
        return lengths
