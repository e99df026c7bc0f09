"""A blend draws its shares in Megatron's order and never runs past a component."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.blendable_dataset import (
    BlendableDataset,
    draw_problems,
    samples_of_component,
)
from megatron.data.orders.sample_maps import build_blending_indices
from megatron.errors import ConfigError, DataError
from tests.support.examples import examples


class Numbers:
    """A dataset whose sample i is [tag, i]."""

    def __init__(self, tag, length):
        self.tag, self.length, self.touched = tag, length, False

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        return {"text": np.array([self.tag, index], np.int64)}

    def fingerprint(self):
        return f"{self.tag}-{self.length}"

    def check_unchanged(self):
        if self.touched:
            raise DataError("touched", fix="do not")


def test_a_blend_draws_each_component_in_its_own_order():
    blend = BlendableDataset([Numbers(0, 20), Numbers(1, 20)], [0.3, 0.7], num_samples=10)
    drawn = [blend[i]["text"].tolist() for i in range(len(blend))]
    assert [tag for tag, _ in drawn] == [1, 0, 1, 1, 0, 1, 1, 0, 1, 1]
    assert [index for _, index in drawn] == [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]
    assert blend[np.int64(9)]["text"].tolist() == [1, 6]
    assert blend.counts == (3, 7)


def test_a_longer_blend_starts_like_a_shorter_one():
    parts = [Numbers(0, 100), Numbers(1, 100), Numbers(2, 100)]
    short, long = (
        BlendableDataset(parts, [1, 2, 3], num_samples=size).dataset_index for size in (20, 90)
    )
    assert long[:20].tolist() == short.tolist()


def test_without_a_size_all_components_are_used_up_together():
    blend = BlendableDataset([Numbers(0, 10), Numbers(1, 30)], [1, 3])
    assert len(blend) == 40
    assert np.bincount(blend.dataset_index).tolist() == [10, 30]


@pytest.mark.parametrize("index", [-1, 10])
def test_an_index_outside_the_blend_never_wraps(index):
    with pytest.raises(IndexError, match="a blend of 10 samples"):
        BlendableDataset([Numbers(0, 20)], [1.0], num_samples=10)[index]


def test_a_component_too_small_for_its_weight_is_named_before_training():
    with pytest.raises(DataError, match="too small for its weight: data/b") as raised:
        BlendableDataset(
            [Numbers(0, 20), Numbers(1, 3)], [0.5, 0.5], num_samples=10, names=["data/a", "data/b"]
        )
    assert "found: 3 samples; 10 samples of the blend want 5" in str(raised.value)
    assert "fix: lower its weight" in str(raised.value)


def test_a_component_that_lacks_one_sample_is_refused_and_one_that_just_suffices_is_not():
    blend = BlendableDataset([Numbers(0, 3), Numbers(1, 7)], [0.3, 0.7], num_samples=10)
    assert blend.counts == (3, 7)
    drawn = [blend[at]["text"].tolist() for at in range(10)]
    assert sorted(drawn) == [[0, at] for at in range(3)] + [[1, at] for at in range(7)]
    for sizes, found in (((2, 7), "found: 2 samples"), ((3, 6), "found: 6 samples")):
        with pytest.raises(DataError, match=found):
            BlendableDataset(
                [Numbers(tag, size) for tag, size in enumerate(sizes)], [0.3, 0.7], num_samples=10
            )


@pytest.mark.parametrize("weight", [0, -1, float("nan"), float("inf")])
def test_a_weight_that_is_no_positive_number_is_refused(weight):
    with pytest.raises(ConfigError, match="not a positive number: component 1"):
        BlendableDataset([Numbers(0, 5), Numbers(1, 5)], [1, weight])


@pytest.mark.parametrize(("parts", "weights"), [([], []), ([Numbers(0, 5)], [1, 2])])
def test_one_weight_per_dataset_is_needed(parts, weights):
    with pytest.raises(ConfigError, match="one weight per dataset"):
        BlendableDataset(parts, weights)


def test_the_fingerprint_follows_components_weights_and_size():
    parts = [Numbers(0, 50), Numbers(1, 50)]
    fingerprints = {
        BlendableDataset(parts, [1, 1], num_samples=10).fingerprint(),
        BlendableDataset(parts, [1, 2], num_samples=10).fingerprint(),
        BlendableDataset(parts, [1, 1], num_samples=11).fingerprint(),
        BlendableDataset(parts[::-1], [1, 1], num_samples=10).fingerprint(),
    }
    assert len(fingerprints) == 4


def test_a_touched_component_is_noticed():
    parts = [Numbers(0, 5), Numbers(1, 5)]
    blend = BlendableDataset(parts, [1, 1])
    blend.check_unchanged()
    parts[1].touched = True
    with pytest.raises(DataError, match="touched"):
        blend.check_unchanged()


@examples(200)
@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=10), st.integers(1, 500))
def test_what_is_asked_of_a_component_always_suffices(weights, size):
    total = sum(weights)
    chosen, _ = build_blending_indices(weights, size)
    counts = np.bincount(chosen, minlength=len(weights))
    for weight, count in zip(weights, counts):
        assert count <= samples_of_component(size, weight / total)


def test_a_share_of_less_than_one_sample_is_a_problem():
    assert list(draw_problems(["a", "b"], [9, 1], 10)) == []
    (problem,) = draw_problems(["a", "b"], [99, 1], 50)
    assert "a component of a blend is too rare to be drawn once: b" in str(problem)
    assert "weight 1 of 100 is 0.5 of 50 samples" in str(problem)
    assert list(draw_problems(["a", "b"], [99, 2.1], 50)) == [], "the fix works"


@examples(200)
@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=12), st.integers(1, 400))
def test_at_every_prefix_no_component_is_a_whole_sample_ahead_of_its_share(weights, size):
    """And behind it by no more than Megatron's order can be: less than one sample for two.

    The order takes the component that lags most, before the share of the sample itself is added.
    So for n of them the lag of the j that lag most adds up to less than that of j + 1 of them and
    a j-th more, which makes 1 + 1/2 + ... + 1/(n - 1) at most.
    """
    chosen, _ = build_blending_indices(weights, size)
    shares = np.array(weights) / np.sum(weights)
    drawn = np.cumsum(chosen[:, None] == np.arange(len(weights)), axis=0)
    ahead = drawn - np.arange(1, size + 1)[:, None] * shares
    rounding = 1e-9 * size
    assert ahead.max() <= 1 + rounding
    most_behind = sum(1 / i for i in range(1, len(weights)))
    assert -ahead.min() <= most_behind + rounding
    if len(weights) == 2:
        assert np.abs(ahead).max() <= 1 + rounding


def test_three_components_may_lag_by_more_than_one_sample():
    """The order is Megatron's; it does not keep every component within one sample of its share."""
    weights = [40.57, 0.59, 0.01]
    chosen, _ = build_blending_indices(weights, 200)
    shares = np.array(weights) / np.sum(weights)
    drawn = np.cumsum(chosen[:, None] == np.arange(3), axis=0)
    behind = np.arange(1, 201)[:, None] * shares - drawn
    assert 1 < behind.max() <= 1.5
