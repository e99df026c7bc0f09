"""Samples of images: which comes when, with which targets, and the digest of all of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.config.models.vision import VisionConfig, VisionHead
from megatron.data.vision.image_dataset import ImageDataset, normalised
from megatron.data.vision.image_source import open_images
from tests.support.vision.images import SIDE, TINY, write_images

COUNT = 9
# float32 on one side.
CLOSE = 1e-6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images(Path(tmp_path_factory.mktemp("images")), per_class=3)


def dataset(path: str, **changes: Any) -> ImageDataset:
    fields = {"name": "train", "num_samples": 30, "seed": 5, "is_training": True}
    flags = {key: changes.pop(key) for key in list(changes) if key not in fields}
    vision = VisionConfig(**(TINY | flags))
    return ImageDataset(source=open_images(path), vision=vision, **(fields | changes))


def test_every_pass_takes_each_image_once_in_an_order_of_its_own(path: str) -> None:
    data = dataset(path)
    order = [data.image_of(at) for at in range(2 * COUNT)]
    assert sorted(order[:COUNT]) == sorted(order[COUNT:]) == list(range(COUNT))
    assert order[:COUNT] != order[COUNT:]
    # In any order of questions, as a resumed run asks.
    again = dataset(path)
    assert [again.image_of(at) for at in reversed(range(2 * COUNT))] == order[::-1]
    for other in (dataset(path, seed=6), dataset(path, name="other")):
        assert [other.image_of(at) for at in range(COUNT)] != order[:COUNT]


def test_a_sample_depends_on_its_number_alone(path: str) -> None:
    one, other = dataset(path, mixup_alpha=0.3), dataset(path, mixup_alpha=0.3)
    for at in (7, 20, 3):
        other[at + 1]
        first, second = one[at], other[at]
        assert first.keys() == {"image", "targets", "shares"}
        assert all(np.array_equal(first[key], second[key]) for key in first)


def test_images_of_an_evaluation_come_in_their_order_as_they_are(path: str) -> None:
    flags: dict[str, Any] = {"mixup_alpha": 0.3, "label_smoothing": 0.1}
    data = dataset(path, is_training=False, **flags)
    assert [int(data[at]["targets"][0]) for at in range(COUNT)] == [0] * 3 + [1] * 3 + [2] * 3
    assert all(data[at]["shares"].tolist() == [1, 0] for at in range(COUNT))
    whole = normalised(data.source.reader.read(4, 3), data.vision).astype(np.float32)
    assert np.array_equal(data[4]["image"], whole)
    assert np.array_equal(data[4]["image"], data[4 + COUNT]["image"])


def test_mixed_images_have_both_classes_in_their_shares(path: str) -> None:
    plain = {"random_crop_area": 1, "random_flip": False}
    mixed = dataset(path, mixup_alpha=1.0, label_smoothing=0.1, **plain)
    seen = set()
    for at in range(20):
        sample = mixed[at]
        first, second = sample["targets"].tolist()
        share, smoothing = sample["shares"].tolist()
        assert smoothing == pytest.approx(0.1)
        seen.add(first != second)
        own = mixed.source.positions[mixed.image_of(at)]
        own_image = normalised(mixed.source.reader.read(int(own), 3), mixed.vision)
        rest = (sample["image"] - share * own_image) / (1 - share)
        # What is left over is an image of the second class.
        of_class = np.flatnonzero(mixed.source.labels == second)
        others = [normalised(mixed.source.reader.read(int(n), 3), mixed.vision) for n in of_class]
        nearest = min(float(np.abs(rest - one).max()) for one in others)
        assert nearest < CLOSE * 30 / (1 - share)
    assert seen == {True, False}


def test_values_are_less_the_mean_and_over_the_std() -> None:
    image = Image.fromarray(np.full((SIDE, SIDE, 3), (255, 51, 0), np.uint8))
    vision = VisionConfig(**TINY, image_mean=(0.5, 0.1, 0.0), image_std=(0.25,))
    assert normalised(image, vision)[:, 3, 4].tolist() == pytest.approx([2.0, 0.4, 0.0])
    gray = VisionConfig(**TINY, num_channels=1)
    assert normalised(image.convert("L"), gray).shape == (1, SIDE, SIDE)


def test_the_fingerprint_changes_with_what_decides_a_sample(path: str, tmp_path: Path) -> None:
    base = dataset(path).fingerprint()
    assert dataset(path).fingerprint() == base
    assert dataset(path, vision_head=VisionHead.MLP, layer_lr_decay=0.5).fingerprint() == base
    part = dataset(path)
    changed = [
        dataset(path, seed=6),
        dataset(path, num_samples=31),
        dataset(path, random_flip=False),
        dataset(path, is_training=False),
        dataset(write_images(tmp_path, per_class=2)),
        ImageDataset(
            source=part.source.of(np.arange(8)),
            name="train",
            num_samples=30,
            seed=5,
            vision=part.vision,
            is_training=True,
        ),
    ]
    assert len({base, *(one.fingerprint() for one in changed)}) == len(changed) + 1


def test_there_are_no_samples_outside(path: str) -> None:
    with pytest.raises(IndexError, match="sample 30 of train, which has 30 samples"):
        dataset(path)[30]
