"""Datasets of images for a run: shares of them, classes of several paths, and flags."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config.data import DataConfig
from megatron.config.models.vision import VisionConfig
from megatron.data.data_utils import DocumentSlice, IndexPlace
from megatron.data.kinds.dataset_kind import DatasetKind
from megatron.data.vision.image_dataset import ImageDataset
from megatron.data.vision.image_maker import image_data, shuffled_images
from megatron.errors import ConfigError, DataError
from tests.support.vision.images import TINY, write_images


@pytest.fixture
def path(tmp_path: Path) -> str:
    return write_images(tmp_path / "images", per_class=10)


def maker(**flags: Any) -> Any:
    data = DataConfig(seq_length=17, data_path=("x",))
    reads = image_data(VisionConfig(**(TINY | flags)))
    assert reads.kind(data) is DatasetKind.IMAGES
    return reads.maker(data, tokenizer=None, seed=1, is_builder=True)


def made(path: str, name: str, start: int, stop: int, **flags: Any) -> ImageDataset:
    images = maker(**flags)
    part = DocumentSlice(name=name, start=start, stop=stop)
    cache = IndexPlace().cache(path)
    found: ImageDataset = images.make(images.open(path), part, num_samples=50, cache=cache)
    return found


def test_a_split_holds_images_of_all_classes_and_none_of_another_split(path: str) -> None:
    train, valid = made(path, "train", 0, 20), made(path, "valid", 20, 30)
    assert train.is_training
    assert not valid.is_training
    assert set(train.source.positions) | set(valid.source.positions) == set(range(30))
    assert len(valid.source) == 10
    assert set(valid.source.labels) == {0, 1, 2}
    assert maker().epochs(train, 50) == 2.5


def test_the_order_of_splits_is_fixed() -> None:
    assert shuffled_images(8).tolist() == [5, 4, 3, 7, 2, 0, 6, 1]
    for count in (1, 100, 1000):
        assert sorted(shuffled_images(count)) == list(range(count))
    # Neighbours are spread: their distances are those of random numbers, a third on average.
    distances = np.abs(np.diff(shuffled_images(1000))) / 1000
    assert distances.mean() == pytest.approx(1 / 3, abs=0.03)


def test_fractions_take_the_first_classes_and_images_for_training_alone(path: str) -> None:
    flags = {"classes_fraction": 0.7, "data_per_class_fraction": 0.5}
    assert made(path, "train", 0, 30, **flags).source.labels.tolist() == [0] * 5 + [1] * 5
    assert len(made(path, "valid", 0, 30, **flags).source) == 30


def test_another_number_of_classes_is_refused(path: str) -> None:
    for classes in (2, 4):
        with pytest.raises(ConfigError, match="use --num-classes 3"):
            maker(num_classes=classes).open(path)


def test_a_path_that_lacks_a_class_is_refused(path: str, tmp_path: Path) -> None:
    other = Path(write_images(tmp_path / "valid", per_class=1))
    (other / "bee").rename(other / "dog")
    images = maker()
    images.open(path)
    with pytest.raises(DataError, match="it lacks bee; it alone has dog"):
        images.open(str(other))


def test_flags_of_text_are_refused() -> None:
    data = DataConfig(seq_length=17, data_path=("x",), reset_position_ids=True, mask_prob=0.3)
    problems = [str(one.found) for one in image_data(VisionConfig()).unread_flags(data)]
    assert problems == ["--reset-position-ids True", "--mask-prob 0.3"]
