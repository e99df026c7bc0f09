"""VisionConfig: images, their patches, and what is done to them; read by programs for images alone.

What a reader would get wrong: the number of tokens of an image follows from these flags, and is
what `--seq-length` is in such a run.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from megatron.config.fields import check_field, flag, raise_all
from megatron.errors import ConfigError

# Of ImageNet's training images, by channel, as torchvision and Megatron have them.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
RGB = 3
_SUPPORTED_CHANNELS = (1, RGB)


class ImagePooling(StrEnum):
    """What of the last hidden states the classes are scored by."""

    CLASS_TOKEN = "class_token"  # noqa: S105  # a learned token before the patches
    MEAN = "mean"  # of all patches; there is no class token


class VisionHead(StrEnum):
    """The layers between the pooled vector and the scores of classes."""

    LINEAR = "linear"
    MLP = "mlp"  # a hidden layer with tanh before it, as Megatron's pretraining has


class AugmentationPolicy(StrEnum):
    """Operations on colours and shapes that are drawn for each training image."""

    NONE = "none"
    RANDAUGMENT = "randaugment"  # Cubuk et al. 2019, arXiv 1909.13719
    AUTOAUGMENT = "autoaugment"  # Cubuk et al. 2018, arXiv 1805.09501, table 9: ImageNet's


class ImageCheck(StrEnum):
    """How much of each image file is read before training."""

    HEADER = "header"
    FULL = "full"  # decoded once


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """Images and their classes."""

    num_classes: int = flag(1000, help="classes of images")
    img_dim: int = flag(224, help="height and width of images in pixels, to which they are scaled")
    img_h: int | None = flag(None, help="height of images; when not set img-dim")
    img_w: int | None = flag(None, help="width of images; when not set img-dim")
    num_channels: int = flag(RGB, help="channels of images: 3 for RGB, 1 for gray")
    patch_dim: int = flag(16, help="height and width of a patch, which becomes one token")
    image_pooling: ImagePooling = flag(
        ImagePooling.CLASS_TOKEN,
        help="what the classes are scored by: class_token, a learned token before the patches, or "
        "mean, that of all patches",
    )
    vision_head: VisionHead = flag(
        VisionHead.LINEAR,
        help="linear, or mlp for a hidden layer with tanh, as in Megatron's pretraining",
    )
    image_mean: tuple[float, ...] | None = flag(
        None,
        help="mean that is subtracted from each channel, of values from 0 to 1; one number for all "
        "channels, or one for each; when not set ImageNet's for RGB, 0.5 for gray",
    )
    image_std: tuple[float, ...] | None = flag(
        None, help="what each channel is divided by after that; when not set as for image-mean"
    )
    random_crop_area: float = flag(
        0.08,
        help="least share of an image's area that a random crop of training keeps; 1: no crops",
    )
    random_flip: bool = flag(True, help="mirror half of the training images")
    random_shift: float = flag(
        0.0, help="shift training images by at most this share of their size, each way"
    )
    random_rotation: float = flag(0.0, help="turn training images by at most so many degrees")
    augmentation_policy: AugmentationPolicy = flag(
        AugmentationPolicy.NONE,
        help="further operations on training images: none, randaugment, or autoaugment for the "
        "policy of ImageNet, which Megatron's program has",
    )
    randaugment_ops: int = flag(2, help="operations on each image under randaugment")
    randaugment_magnitude: int = flag(9, help="strength of these operations, 0 to 10")
    mixup_alpha: float = flag(
        0.0,
        help="mix training images and their classes in pairs, by shares from Beta(alpha, alpha) "
        "(arXiv 1710.09412); 0: not",
    )
    label_smoothing: float = flag(
        0.0, help="share of a training target that all classes have equally"
    )
    head_lr_mult: float = flag(1.0, help="factor on the learning rate of the classification head")
    layer_lr_decay: float = flag(
        1.0,
        help="factor on the learning rate of each layer to that of the layer above it (arXiv "
        "2106.08254, appendix): 0.75 for fine-tuning, 1 for equal rates",
    )
    classes_fraction: float = flag(1.0, help="share of the classes to train on, the first ones")
    data_per_class_fraction: float = flag(
        1.0, help="share of the images of each class to train on, the first ones"
    )
    image_check: ImageCheck = flag(
        ImageCheck.HEADER,
        help="what is read of each image file before training: header, or full to decode it",
    )
    max_broken_images: int = flag(
        0, help="broken image files that are left out, with a warning; more end the run"
    )

    def __post_init__(self) -> None:
        raise_all(self._problems())

    @property
    def height(self) -> int:
        """Height of images in pixels."""
        return self.img_dim if self.img_h is None else self.img_h

    @property
    def width(self) -> int:
        """Width of images in pixels."""
        return self.img_dim if self.img_w is None else self.img_w

    @property
    def patch_grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch_dim, self.width // self.patch_dim

    @property
    def has_class_token(self) -> bool:
        """Whether a learned token stands before the patches."""
        return self.image_pooling is ImagePooling.CLASS_TOKEN

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        rows, columns = self.patch_grid
        return rows * columns

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: its patches, and the class token if there is one."""
        return self.num_patches + self.has_class_token

    @property
    def patch_values(self) -> int:
        """Numbers of a patch."""
        return self.num_channels * self.patch_dim**2

    @property
    def mean(self) -> tuple[float, ...]:
        """What is subtracted, of each channel."""
        return self._by_channel(self.image_mean, IMAGENET_MEAN)

    @property
    def std(self) -> tuple[float, ...]:
        """What is divided by, of each channel."""
        return self._by_channel(self.image_std, IMAGENET_STD)

    def _by_channel(
        self, given: tuple[float, ...] | None, of_rgb: tuple[float, ...]
    ) -> tuple[float, ...]:
        if given is None:
            return of_rgb if self.num_channels == RGB else (0.5,) * self.num_channels
        return given * self.num_channels if len(given) == 1 else given

    def _problems(self) -> Iterator[ConfigError]:
        sizes = ("num_classes", "img_dim", "img_h", "img_w", "patch_dim")
        for name in sizes:
            value = getattr(self, name)
            yield from check_field(
                value is None or value > 0,
                name,
                value,
                problem="a size is not positive",
                fix="use a whole number above 0",
            )
        yield from check_field(
            self.num_channels in _SUPPORTED_CHANNELS,
            "num_channels",
            self.num_channels,
            problem="images have one channel or three",
            fix="use 3 for RGB, or 1 for gray",
        )
        if self.patch_dim > 0:
            yield from self._patch_problems()
        for name in ("image_mean", "image_std"):
            yield from self._channel_problems(name)
        yield from self._number_problems()

    def _patch_problems(self) -> Iterator[ConfigError]:
        for flag_of, size in (("--img-h", self.height), ("--img-w", self.width)):
            if size % self.patch_dim:
                below = size - size % self.patch_dim
                yield ConfigError(
                    "patches do not fill an image",
                    found=f"{flag_of} {size}, --patch-dim {self.patch_dim}",
                    fix=f"use {below or self.patch_dim} or {below + self.patch_dim} pixels",
                )

    def _channel_problems(self, name: str) -> Iterator[ConfigError]:
        values = getattr(self, name)
        if values is None:
            return
        shown = " ".join(map(str, values))
        yield from check_field(
            len(values) in (1, self.num_channels),
            name,
            shown,
            problem="there are other numbers than channels",
            fix=f"give one number, or {self.num_channels}",
        )
        least = 0 if name == "image_std" else -math.inf
        yield from check_field(
            all(least < value < math.inf for value in values),
            name,
            shown,
            problem="it is not a finite number, or a divisor is not positive",
            fix="leave it out, or use 0.5",
        )

    def _number_problems(self) -> Iterator[ConfigError]:
        for name, low, high, fix in _RANGES:
            value = getattr(self, name)
            yield from check_field(
                low <= value <= high,
                name,
                value,
                problem=f"it is not from {low:g} to {high:g}",
                fix=fix,
            )
        for name in ("random_crop_area", "layer_lr_decay", "head_lr_mult"):
            value = getattr(self, name)
            yield from check_field(
                value > 0, name, value, problem="it is not positive", fix="use 1 for no effect"
            )


_RANGES: tuple[tuple[str, float, float, str], ...] = (
    ("random_crop_area", 0, 1, "use 0.08, or 1 for no crops"),
    ("random_shift", 0, 0.5, "use 0.1, or 0 for no shifts"),
    ("random_rotation", 0, 180, "use 10, or 0 for no rotation"),
    ("randaugment_ops", 1, 16, "use 2"),
    ("randaugment_magnitude", 0, 10, "use 9"),
    ("mixup_alpha", 0, 1000, "use 0.2, or 0 for no mixing"),
    ("label_smoothing", 0, 0.99, "use 0.1, or 0 for none"),
    ("head_lr_mult", 0, 1e6, "use 1, or 10 for a new head"),
    ("layer_lr_decay", 0, 1, "use 0.75, or 1 for equal rates"),
    ("classes_fraction", 0, 1, "use 1 for all classes"),
    ("data_per_class_fraction", 0, 1, "use 1 for all images"),
    ("max_broken_images", 0, math.inf, "use 0 to accept none"),
)
