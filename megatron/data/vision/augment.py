"""Training images drawn from a generator: crops, mirrors, shifts, rotations, and named policies.

Images are Pillow's, of any size; what comes out has the size of the model. What a reader would get
wrong: everything is drawn from the generator of one sample, in a fixed order, so that a sample is
the same in every layout and after a resume.
"""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.config.models.vision import AugmentationPolicy, VisionConfig

if TYPE_CHECKING:
    from PIL.Image import Image

Generator = np.random.Generator

_ATTEMPTS = 10  # at a crop whose shape fits into the image
_NARROWEST = (
    3 / 4
)  # width over height of crops, up to its inverse (Szegedy et al. 2015, arXiv 1409.4842, section 6)
_LARGEST_TURN, _LARGEST_SHEAR, _LARGEST_SHIFT = 30.0, 0.3, 150 / 331  # of both policies
_LARGEST_ENHANCEMENT = 0.9
_HIGHEST = 10  # magnitude
_RESIZE = 256 / 224  # the shorter side, before the crop in the middle of an evaluated image


def augmented(image: "Image", vision: VisionConfig, rng: Generator) -> "Image":
    """Return a training image of the model's size."""
    if vision.random_crop_area < 1:
        image = _random_crop(image, vision, rng)
    else:
        image = _resized(image, (vision.width, vision.height))
    if vision.random_flip and rng.random() < 0.5:
        image = _mirrored(image)
    if vision.random_rotation > 0:
        image = _turned(image, rng.uniform(-vision.random_rotation, vision.random_rotation))
    if vision.random_shift > 0:
        across, down = rng.uniform(-vision.random_shift, vision.random_shift, 2)
        image = _shifted(image, round(across * image.width), round(down * image.height))
    if vision.augmentation_policy is AugmentationPolicy.RANDAUGMENT:
        for name in rng.choice(sorted(_OPERATIONS), vision.randaugment_ops):
            image = _operated(image, str(name), vision.randaugment_magnitude, rng)
    elif vision.augmentation_policy is AugmentationPolicy.AUTOAUGMENT:
        for step in IMAGENET_POLICY[int(rng.integers(len(IMAGENET_POLICY)))]:
            if rng.random() < step.probability:
                image = _operated(image, step.operation, step.magnitude, rng)
    return image


def centred(image: "Image", vision: VisionConfig) -> "Image":
    """Return an image as it is evaluated: the middle of it, at the model's size.

    An image of that size is left as it is; of all others the shorter side is scaled to 256/224 of
    the model's, as Megatron and torchvision do.
    """
    width, height = vision.width, vision.height
    if image.size == (width, height):
        return image
    if vision.random_crop_area >= 1:
        return _resized(image, (width, height))  # training saw whole images too
    scale = _RESIZE * max(width / image.width, height / image.height)
    wide, high = (
        max(round(scale * side), least) for side, least in zip(image.size, (width, height))
    )
    image = _resized(image, (wide, high))
    left, top = (wide - width) // 2, (high - height) // 2
    return image.crop((left, top, left + width, top + height))


def _random_crop(image: "Image", vision: VisionConfig, rng: Generator) -> "Image":
    """Return a part of random area and shape, scaled to the model's size."""
    size = (vision.width, vision.height)
    for _ in range(_ATTEMPTS):
        area = image.width * image.height * rng.uniform(vision.random_crop_area, 1)
        aspect = math.exp(rng.uniform(math.log(_NARROWEST), -math.log(_NARROWEST)))
        wide, high = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= image.width and 0 < high <= image.height:
            left = int(rng.integers(image.width - wide + 1))
            top = int(rng.integers(image.height - high + 1))
            box = (left, top, left + wide, top + high)
            return _resized(image, size, box)
    return _resized(image, size)


def _resized(
    image: "Image", size: tuple[int, int], box: tuple[int, int, int, int] | None = None
) -> "Image":
    """Return an image, or the part `box` of it, at `size`."""
    if box is None and image.size == size:
        return image
    from PIL.Image import Resampling

    return image.resize(size, Resampling.BILINEAR, box=box)


def _mirrored(image: "Image") -> "Image":
    from PIL.Image import Transpose

    return image.transpose(Transpose.FLIP_LEFT_RIGHT)


def _turned(image: "Image", degrees: float) -> "Image":
    from PIL.Image import Resampling

    return image.rotate(degrees, Resampling.BILINEAR)


def _affine(image: "Image", *matrix: float) -> "Image":
    from PIL.Image import Resampling, Transform

    return image.transform(image.size, Transform.AFFINE, matrix, Resampling.BILINEAR)


def _shifted(image: "Image", across: float, down: float) -> "Image":
    return _affine(image, 1, 0, -across, 0, 1, -down)


def _operated(image: "Image", name: str, magnitude: int, rng: Generator) -> "Image":
    """Apply an operation with a strength of 0 to 10; signs are drawn, for every operation."""
    sign = 1.0 if rng.random() < 0.5 else -1.0
    return _OPERATIONS[name](image, magnitude / _HIGHEST, sign)


def _enhanced(kind: str) -> Callable[["Image", float, float], "Image"]:
    def apply(image: "Image", strength: float, sign: float) -> "Image":
        from PIL import ImageEnhance

        enhancer = getattr(ImageEnhance, kind)
        changed: Image = enhancer(image).enhance(1 + sign * strength * _LARGEST_ENHANCEMENT)
        return changed

    return apply


def _by_values(kind: str) -> Callable[["Image", float, float], "Image"]:
    def apply(image: "Image", strength: float, sign: float) -> "Image":
        from PIL import ImageOps

        del sign
        arguments: tuple[int, ...] = ()
        if kind == "posterize":
            arguments = (8 - round(4 * strength),)
        elif kind == "solarize":
            arguments = (256 - round(256 * strength),)
        changed: Image = getattr(ImageOps, kind)(image, *arguments)
        return changed

    return apply


# Name: the image, a strength from 0 to 1 and a sign, to the new image.
_OPERATIONS: Mapping[str, Callable[["Image", float, float], "Image"]] = {
    "shear_x": lambda image, s, sign: _affine(image, 1, sign * s * _LARGEST_SHEAR, 0, 0, 1, 0),
    "shear_y": lambda image, s, sign: _affine(image, 1, 0, 0, sign * s * _LARGEST_SHEAR, 1, 0),
    "shift_x": lambda image, s, sign: _shifted(image, sign * s * _LARGEST_SHIFT * image.width, 0),
    "shift_y": lambda image, s, sign: _shifted(image, 0, sign * s * _LARGEST_SHIFT * image.height),
    "rotate": lambda image, s, sign: _turned(image, sign * s * _LARGEST_TURN),
    "color": _enhanced("Color"),
    "contrast": _enhanced("Contrast"),
    "brightness": _enhanced("Brightness"),
    "sharpness": _enhanced("Sharpness"),
    "posterize": _by_values("posterize"),
    "solarize": _by_values("solarize"),
    "autocontrast": _by_values("autocontrast"),
    "equalize": _by_values("equalize"),
    "invert": _by_values("invert"),
}


class PolicyStep(NamedTuple):
    """One of the two operations of a pair of AutoAugment."""

    operation: str
    probability: float
    magnitude: int


def _pair(
    one: str, p: float, strength: int, other: str, q: float, other_strength: int
) -> tuple[PolicyStep, PolicyStep]:
    return PolicyStep(one, p, strength), PolicyStep(other, q, other_strength)


# Cubuk et al. 2018, table 9; magnitudes of operations without one are 0.
IMAGENET_POLICY: tuple[tuple[PolicyStep, PolicyStep], ...] = (
    _pair("posterize", 0.4, 8, "rotate", 0.6, 9),
    _pair("solarize", 0.6, 5, "autocontrast", 0.6, 0),
    _pair("equalize", 0.8, 0, "equalize", 0.6, 0),
    _pair("posterize", 0.6, 7, "posterize", 0.6, 6),
    _pair("equalize", 0.4, 0, "solarize", 0.2, 4),
    _pair("equalize", 0.4, 0, "rotate", 0.8, 8),
    _pair("solarize", 0.6, 3, "equalize", 0.6, 0),
    _pair("posterize", 0.8, 5, "equalize", 1.0, 0),
    _pair("rotate", 0.2, 3, "solarize", 0.6, 8),
    _pair("equalize", 0.6, 0, "posterize", 0.4, 6),
    _pair("rotate", 0.8, 8, "color", 0.4, 0),
    _pair("rotate", 0.4, 9, "equalize", 0.6, 0),
    _pair("equalize", 0.0, 0, "equalize", 0.8, 0),
    _pair("invert", 0.6, 0, "equalize", 1.0, 0),
    _pair("color", 0.6, 4, "contrast", 1.0, 8),
    _pair("rotate", 0.8, 8, "color", 1.0, 2),
    _pair("color", 0.8, 8, "solarize", 0.8, 7),
    _pair("sharpness", 0.4, 7, "invert", 0.6, 0),
    _pair("shear_x", 0.6, 5, "equalize", 1.0, 0),
    _pair("color", 0.4, 0, "equalize", 0.6, 0),
    _pair("equalize", 0.4, 0, "solarize", 0.2, 4),
    _pair("solarize", 0.6, 5, "autocontrast", 0.6, 0),
    _pair("invert", 0.6, 0, "equalize", 1.0, 0),
    _pair("color", 0.6, 4, "contrast", 1.0, 8),
    _pair("equalize", 0.8, 0, "equalize", 0.6, 0),
)
