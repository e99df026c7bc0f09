"""Samples of a `ImageSource`: which image comes when, augmented, scaled and normalised.

Sample i is a function of the seed and of i alone. Each pass over the images has an order of its
own, so that sample i of a later pass is another crop of another image.
"""

import operator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from megatron.config.models.vision import VisionConfig
from megatron.data.blendable_dataset import Sample
from megatron.data.orders.index_cache import description_digest
from megatron.data.vision.augment import augmented, centred
from megatron.data.vision.image_source import ImageSource

if TYPE_CHECKING:
    from PIL.Image import Image

_VERSION = 1  # of the recipe below
_ORDER, _DRAWS = 0, 1  # what a generator is for
_FLAGS_WITHOUT_EFFECT = ("head_lr_mult", "layer_lr_decay", "vision_head", "image_pooling")


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageDataset:
    """`num_samples` samples of images, in a new order on each pass over them.

    Sample i is `{"image": float32 [c, height, width], "targets": int64 [2], "shares": float32
    [2]}`, as `image_loss` takes them. Where samples are not for training, images come in their
    order and nothing is drawn.

    Attributes:
        name: of the split; others have other draws.
        is_training: whether images are shuffled, augmented and mixed, and targets smoothed.
    """

    source: ImageSource
    name: str
    num_samples: int
    seed: int
    vision: VisionConfig
    is_training: bool
    _orders: dict[int, npt.NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False)

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return sample `index`; IndexError outside 0..len - 1."""
        i = operator.index(index)
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {self.name}, which has {len(self)} samples")
        rng = self._generator(_DRAWS, i)
        at = self.image_of(i)
        label = int(self.source.labels[at])
        image = self._pixels(at, rng)
        targets, share, smoothing = (label, label), 1.0, 0.0
        if self.is_training:
            smoothing = self.vision.label_smoothing
            if self.vision.mixup_alpha > 0:
                other = int(rng.integers(len(self.source)))
                share = float(rng.beta(self.vision.mixup_alpha, self.vision.mixup_alpha))
                image = share * image + (1 - share) * self._pixels(other, rng)
                targets = (label, int(self.source.labels[other]))
        sample: dict[str, Any] = {
            "image": image.astype(np.float32),
            "targets": np.array(targets, dtype=np.int64),
            "shares": np.array((share, smoothing), dtype=np.float32),
        }
        return sample

    def image_of(self, index: int) -> int:
        """Return the number of the image in the source that a sample is made of."""
        epoch, at = divmod(index, len(self.source))
        return int(self._order(epoch)[at]) if self.is_training else at

    def fingerprint(self) -> str:
        """Return 32 hex digits, equal exactly where all samples are."""
        flags = {
            k: str(v) for k, v in asdict(self.vision).items() if k not in _FLAGS_WITHOUT_EFFECT
        }
        return description_digest(
            {
                "order": f"images-{_VERSION}",
                "source": self.source.digest,
                "positions": description_digest({"all": self.source.positions.tolist()}),
                "name": self.name,
                "num_samples": self.num_samples,
                "seed": self.seed,
                "is_training": self.is_training,
                **flags,
            }
        )

    def check_unchanged(self) -> None:
        """Raise DataError if files below were touched since they were opened."""
        self.source.check_unchanged()

    def _pixels(self, at: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        """Return one image, normalised: [c, height, width]."""
        position = int(self.source.positions[at])
        image = self.source.reader.read(position, self.vision.num_channels)
        image = (
            augmented(image, self.vision, rng) if self.is_training else centred(image, self.vision)
        )
        return normalised(image, self.vision)

    def _generator(self, *numbers: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *numbers, *self.name.encode()))

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch not in self._orders:
            self._orders.clear()
            self._orders[epoch] = self._generator(_ORDER, epoch).permutation(len(self.source))
        return self._orders[epoch]


def normalised(image: "Image", vision: VisionConfig) -> npt.NDArray[np.float64]:
    """Return the values of an image from 0 to 1, less the mean and over the std: [c, h, w]."""
    values = np.asarray(image, dtype=np.float64).reshape(image.height, image.width, -1) / 255
    return np.ascontiguousarray(((values - vision.mean) / vision.std).transpose(2, 0, 1))
