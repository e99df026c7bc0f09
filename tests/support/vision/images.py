"""Folders of tiny images for tests, and runs of tiny ViTs on them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from megatron.config.run import RunConfig
from tests.support.tiny import tiny_run

CLASSES = ("ant", "bee", "cow")
SIDE = 8
# 4 x 4 patches of 2 x 2 pixels; with a class token 17 tokens, without one 16.
TINY = {"num_classes": len(CLASSES), "img_dim": SIDE, "patch_dim": 2}
AUGMENTED = {
    "random_shift": 0.1,
    "random_rotation": 10.0,
    "mixup_alpha": 0.3,
    "label_smoothing": 0.1,
}


def image(number: int, label: int, side: int = SIDE) -> Image.Image:
    """Return a noisy image whose colour depends on its class."""
    random = np.random.RandomState(1000 * label + number)
    values = random.randint(0, 100, (side, side, 3))
    values[..., label] += 100
    return Image.fromarray(values.astype(np.uint8))


def write_images(folder: Path, *, per_class: int = 12, first: int = 0, side: int = SIDE) -> str:
    """Write a folder for each class with PNGs in it; return its path."""
    for label, name in enumerate(CLASSES):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(first, first + per_class):
            image(number, label, side).save(folder / name / f"{number:03d}.png")
    return str(folder)


def tiny_vit_run(path: str, **flags: Any) -> RunConfig:
    """`tiny_run` of a ViT on images, as its flags are given."""
    values = {"seq_length": 1, "split": "70,30,0", **TINY, **flags}
    return tiny_run(path, **values)
