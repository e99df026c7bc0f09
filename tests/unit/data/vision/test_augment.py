"""Augmented images: of the model's size, a function of the draws, and what each flag does."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from megatron.config.models.vision import AugmentationPolicy, VisionConfig
from megatron.data.vision.augment import _OPERATIONS, IMAGENET_POLICY, augmented, centred
from tests.support.examples import examples

PLAIN: dict[str, Any] = {"img_dim": 16, "patch_dim": 2, "random_crop_area": 1, "random_flip": False}


def ramp(width: int = 16, height: int = 16) -> Image.Image:
    """Red grows to the right, green downwards."""
    values = np.zeros((height, width, 3), np.uint8)
    values[..., 0] = np.linspace(0, 255, width)
    values[..., 1] = np.linspace(0, 255, height)[:, None]
    values[..., 2] = 90
    return Image.fromarray(values)


def drawn(seed: int = 0, image: Image.Image | None = None, **flags: Any) -> np.ndarray:
    vision = VisionConfig(**(PLAIN | flags))
    return np.asarray(augmented(image or ramp(), vision, np.random.default_rng(seed)))


@examples(20)
@given(
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    policy=st.sampled_from(AugmentationPolicy),
    seed=st.integers(0, 99),
)
def test_every_image_gets_the_models_size_and_the_same_draws_the_same_values(
    width: int, height: int, policy: AugmentationPolicy, seed: int
) -> None:
    flags = {
        **{"img_h": 12, "random_crop_area": 0.3, "random_flip": True},
        **{"random_shift": 0.2, "random_rotation": 20.0, "augmentation_policy": policy},
    }
    first = drawn(seed, ramp(width, height), **flags)
    assert first.shape == (12, 16, 3)
    assert np.array_equal(first, drawn(seed, ramp(width, height), **flags))


def test_nothing_is_changed_where_nothing_is_asked_for() -> None:
    assert np.array_equal(drawn(), np.asarray(ramp()))


def test_half_of_the_images_are_mirrored() -> None:
    kept = [np.array_equal(drawn(s, random_flip=True), np.asarray(ramp())) for s in range(200)]
    # Of 200 fair draws fewer than 70 or more than 130 come once in 50,000 tries.
    assert 70 < sum(kept) < 130
    mirrored = drawn(kept.index(False), random_flip=True)
    assert np.array_equal(mirrored, np.asarray(ramp())[:, ::-1])


def test_a_crop_keeps_its_share_of_the_area_and_another_at_each_draw() -> None:
    # A crop of a ramp has a smaller range: sides of a share a, in shapes of up to 4 : 3.
    for seed in range(20):
        red = drawn(seed, ramp(64, 64), random_crop_area=0.5)[..., 0].astype(float)
        share = (red.max() - red.min()) / 255
        assert 0.5**0.5 * 0.75**0.5 - 0.1 < share <= 1
    assert not np.array_equal(
        drawn(1, ramp(64, 64), random_crop_area=0.5), drawn(2, ramp(64, 64), random_crop_area=0.5)
    )


def test_a_shift_moves_the_image_and_fills_up_with_zeros() -> None:
    for seed in range(10):
        blue = drawn(seed, random_shift=0.25)[..., 2]
        assert (blue == 90).mean() >= (1 - 0.25) ** 2
    assert any((drawn(seed, random_shift=0.25)[..., 2] == 0).any() for seed in range(10))


@pytest.mark.parametrize("name", sorted(_OPERATIONS))
def test_every_operation_changes_an_image_and_keeps_its_size(name: str) -> None:
    values = np.random.RandomState(1).randint(20, 200, (16, 16, 3)).astype(np.uint8)
    image = Image.fromarray(values)
    changed = [_OPERATIONS[name](image, 0.9, sign) for sign in (1.0, -1.0)]
    assert all(one.size == (16, 16) for one in changed)
    assert any(not np.array_equal(np.asarray(one), values) for one in changed)


def test_the_policy_of_imagenet_has_25_pairs_of_known_operations() -> None:
    assert len(IMAGENET_POLICY) == 25
    steps = [step for pair in IMAGENET_POLICY for step in pair]
    assert {step.operation for step in steps} <= _OPERATIONS.keys()
    assert all(0 <= step.probability <= 1 and 0 <= step.magnitude < 10 for step in steps)


def test_an_evaluated_image_is_the_middle_of_it() -> None:
    cropping = VisionConfig(img_dim=16, patch_dim=2)
    assert np.array_equal(centred(ramp(), cropping), np.asarray(ramp()))
    wide = np.asarray(centred(ramp(64, 32), cropping)).astype(float)
    assert wide.shape == (16, 16, 3)
    red, green = wide[..., 0], wide[..., 1]
    # 16 of the 36 x 18 pixels that it was scaled to: the middle.
    assert (red.max() - red.min()) / 255 == pytest.approx(16 / 36, abs=0.05)
    assert red.mean() == pytest.approx(127, abs=6)
    assert (green.max() - green.min()) / 255 == pytest.approx(16 / 18, abs=0.05)
    whole = VisionConfig(**PLAIN)
    red = np.asarray(centred(ramp(64, 32), whole))[..., 0].astype(float)
    # All of the width, but that the outer pixels are means of several.
    assert (red.max() - red.min()) / 255 == pytest.approx(1 - 1 / 16, abs=0.05)
