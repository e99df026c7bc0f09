"""Flags of images: what follows from them, and which of them are refused."""

from typing import Any

import pytest

from megatron.config.models.vision import IMAGENET_STD, ImagePooling, VisionConfig
from megatron.errors import ConfigError


def test_an_image_has_a_token_for_each_patch_and_a_class_token() -> None:
    config = VisionConfig(img_dim=32, img_w=16, patch_dim=8, num_channels=1)
    assert (config.height, config.width, config.patch_grid) == (32, 16, (4, 2))
    assert (config.num_patches, config.num_tokens, config.patch_values) == (8, 9, 64)
    mean = VisionConfig(img_dim=32, patch_dim=8, image_pooling=ImagePooling.MEAN)
    assert (mean.num_tokens, mean.patch_values) == (16, 192)


def test_one_number_is_of_all_channels() -> None:
    assert VisionConfig(image_mean=(0.5,)).mean == (0.5, 0.5, 0.5)
    assert VisionConfig(image_mean=(0.1, 0.2, 0.3)).mean == (0.1, 0.2, 0.3)
    assert VisionConfig().std == IMAGENET_STD
    assert VisionConfig(num_channels=1).std == (0.5,)


@pytest.mark.parametrize(
    ("flags", "problem", "fix"),
    [
        ({"num_classes": 0}, "a size is not positive", "use a whole number above 0"),
        ({"patch_dim": 0}, "a size is not positive", "use a whole number above 0"),
        ({"num_channels": 4}, "one channel or three", "use 3 for RGB, or 1 for gray"),
        ({"img_h": 30}, "patches do not fill an image", "use 16 or 32 pixels"),
        ({"img_dim": 8}, "patches do not fill an image", "use 16 or 16 pixels"),
        ({"image_mean": (1.0, 2.0)}, "other numbers than channels", "give one number, or 3"),
        ({"image_std": (0.0,)}, "a divisor is not positive", "leave it out, or use 0.5"),
        ({"random_crop_area": 0.0}, "it is not positive", "use 1 for no effect"),
        ({"random_shift": 0.6}, "not from 0 to 0.5", "use 0.1, or 0 for no shifts"),
        ({"label_smoothing": 1.0}, "not from 0 to 0.99", "use 0.1, or 0 for none"),
        ({"layer_lr_decay": 1.1}, "not from 0 to 1", "use 0.75, or 1 for equal rates"),
        ({"max_broken_images": -1}, "not from 0 to inf", "use 0 to accept none"),
    ],
)
def test_a_wrong_value_is_refused_with_what_works(
    flags: dict[str, Any], problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        VisionConfig(**flags)
    assert problem in str(refused.value)
    assert fix in str(refused.value)
